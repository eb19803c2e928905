"""Whose copy lies where in an arena: the slot at the first and at the last page of each READY copy.

So the neighbours of a range are found in one step, whatever the sizes. Four bytes a page of 4 KiB, and pages that no
copy begins or ends on cost no memory. Guarded by the store's lock.
"""

from __future__ import annotations

import mmap

from kvstore.core.namespace import PAGE_BYTES
from kvstore.store.columns.index import NONE
from kvstore.tiers.base import Arena


class Occupants:
    """Slots by page of one arena."""

    def __init__(self, arena: Arena) -> None:
        self._pages = arena.capacity_bytes // PAGE_BYTES
        # One cell before the first page, so that nothing lies before the arena without a test for it.
        memory = mmap.mmap(-1, 4 * (self._pages + 2), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._cells = memoryview(memory).cast("i")

    def put(self, page: int, nbytes: int, slot: int) -> None:
        """A copy of ``nbytes`` became READY at a page."""
        self._cells[page + 1] = self._cells[page - (-nbytes // PAGE_BYTES)] = slot + 1

    def clear(self, page: int, nbytes: int) -> None:
        """It is not READY any more."""
        self._cells[page + 1] = self._cells[page - (-nbytes // PAGE_BYTES)] = 0

    def beginning_at(self, page: int) -> int:
        """Slot of the copy that begins at a page which is the first of a range, or NONE."""
        return self._cells[page + 1] - 1 if page < self._pages else NONE

    def ending_at(self, page: int) -> int:
        """Slot of the copy whose last page is before a page which is the first of a range, or NONE."""
        return self._cells[page] - 1
