"""Ranges of an arena: a best-fit allocator in pages of 4,096 bytes, O(log n) in the number of holes.

Holes are kept by start, by end (to join neighbours) and by size: a heap of starts for each size, with entries that
no longer hold left in the heap until they come up. The lowest hole of the smallest size that fits is taken, so a
namespace's blocks, all of one size, leave holes that the next block fills exactly.

Joining a range with its neighbours to cut it off again would be most of the work where blocks of one size come and
go. So a freed range is first *loose*: the next allocation of its size takes it as it is, and any other one has the
loose ranges joined before it looks for a hole.
"""

from __future__ import annotations

import heapq
import threading
from bisect import bisect_left, insort
from collections.abc import Callable

from kvstore.core.namespace import PAGE_BYTES
from kvstore.kernels.layout import align_up


class RangeAllocator:
    """Hands out ranges of ``capacity`` bytes. Its lock guards every field; no call waits for anything else."""

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self._used = 0
        self._taken: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._sizes: list[int] = []
        self._heaps: dict[int, list[int]] = {}
        self._loose: dict[int, list[int]] = {}
        """Starts of freed ranges that are not holes yet, by size."""
        if self.capacity:
            self._add_hole(0, self.capacity)

    @property
    def used(self) -> int:
        """Bytes handed out, rounding included."""
        return self._used

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of ``nbytes`` rounded up to pages, or None if no hole is large enough."""
        if nbytes < 1:
            raise ValueError(f"nbytes is {nbytes}; a range has at least 1 byte")
        size = align_up(nbytes, PAGE_BYTES)
        with self._lock:
            loose = self._loose.get(size)
            start = loose.pop() if loose else self._cut(size)
            if start is not None:
                self._taken[start] = size
                self._used += size
            return start

    def free(self, offset: int, nbytes: int, leaving: Callable[[int, int], None] | None = None) -> None:
        """Give a range back. ValueError if it was not handed out with this offset and size.

        ``leaving`` is told offset and bytes before the range can be handed out again.
        """
        size = align_up(nbytes, PAGE_BYTES)
        with self._lock:
            if self._taken.get(offset) != size:
                raise ValueError(f"{offset}+{nbytes} was not handed out; found {self._taken.get(offset)} bytes there")
            if leaving is not None:
                leaving(offset, size)
            del self._taken[offset]
            self._used -= size
            self._loose.setdefault(size, []).append(offset)

    def holes_beside(self, begin: int, end: int) -> tuple[int, int]:
        """Bytes of the hole that ends at ``begin``, and of the one that begins at ``end``; 0 where there is none."""
        with self._lock:
            self._join_loose()
            return begin - self._ends.get(begin, begin), self._starts.get(end, 0)

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes outside of the largest hole; 0 where nothing is free."""
        with self._lock:
            self._join_loose()
            free = self.capacity - self._used
            return 1 - self._sizes[-1] / free if free else 0.0

    def _cut(self, size: int) -> int | None:
        """Start of a range cut off the lowest of the smallest holes that fit."""
        self._join_loose()
        position = bisect_left(self._sizes, size)
        if position == len(self._sizes):
            return None
        hole = self._sizes[position]
        start = self._lowest(hole)
        self._drop_hole(start, hole)
        if hole > size:
            self._add_hole(start + size, hole - size)
        return start

    def _join_loose(self) -> None:
        """Make holes of the loose ranges, joined with the holes beside them."""
        for size, offsets in self._loose.items():
            for start in offsets:
                end = start + size
                before = self._ends.get(start)
                if before is not None:
                    self._drop_hole(before, start - before)
                    start = before  # noqa: PLW2901  the hole begins there
                after = self._starts.get(end)
                if after is not None:
                    self._drop_hole(end, after)
                    end += after
                self._add_hole(start, end - start)
        self._loose.clear()

    def _lowest(self, size: int) -> int:
        heap = self._heaps[size]
        while self._starts.get(heap[0]) != size:
            heapq.heappop(heap)
        return heap[0]

    def _add_hole(self, start: int, size: int) -> None:
        self._starts[start] = size
        self._ends[start + size] = start
        heap = self._heaps.get(size)
        if heap is None:
            insort(self._sizes, size)
            self._heaps[size] = [start]
        else:
            heapq.heappush(heap, start)
            if len(heap) > 64 and len(heap) > 2 * len(self._starts):
                heap[:] = sorted(s for s in set(heap) if self._starts.get(s) == size)

    def _drop_hole(self, start: int, size: int) -> None:
        del self._starts[start]
        del self._ends[start + size]
        heap = self._heaps[size]
        # Entries that no longer hold come off the top; when none is left, no hole has this size.
        while heap and self._starts.get(heap[0]) != size:
            heapq.heappop(heap)
        if not heap:
            del self._heaps[size]
            del self._sizes[bisect_left(self._sizes, size)]
