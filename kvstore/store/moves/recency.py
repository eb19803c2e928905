"""What the disk is told of uses, so that a restart does not forget them: the order of SSD's list, now and then.

The list itself is in memory. Every ``PERIOD_SECONDS``, and at a clean end, the disk hears which of its blocks were used
since the last time, the coldest first; it keeps that with its next checkpoint. A kill loses what came after.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvstore.core.types import Tier
from kvstore.store.tables.state import State
from kvstore.tiers.base import DiskHandle

PERIOD_SECONDS: Final = 60.0


class Recency:
    """Remembers up to when the disk was told. One thread at a time calls it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._next = state.clock.now() + PERIOD_SECONDS
        self._since = 1
        """In units of ``last_use``; 0 is the use of blocks that were not used."""

    def tick(self) -> None:
        """Tell if it is time."""
        if self._state.clock.now() >= self._next:
            self.tell()

    def tell(self) -> None:
        """Tell the disk what was used since the last time. Copies columns under the lock, and sorts without it."""
        state = self._state
        self._next = state.clock.now() + PERIOD_SECONDS
        if state.disk is None:
            return
        with state.locked() as book:
            index, top = book.index, book.index.top
            columns = [column[:top].tobytes() for column in (index.residency, index.last_use, index.place[Tier.SSD])]
        residency = np.frombuffer(columns[0], np.uint8)[:top]
        last_use = np.frombuffer(columns[1], np.uint32)[:top]
        handles = np.frombuffer(columns[2], np.int32)[:top]
        used = np.flatnonzero((residency & Tier.SSD.bit != 0) & (last_use >= self._since))
        if len(used):
            self._since = int(last_use[used].max())
            order = used[np.argsort(last_use[used], kind="stable")]
            state.disk.touch([DiskHandle(handle) for handle in handles[order].tolist()])
