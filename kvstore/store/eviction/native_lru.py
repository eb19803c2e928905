"""The LRU list of a tier in the native index: ``lru.LruList`` with its steps in C++.

Uses and pins of blocks move its slots in the same call that notes them (``NativeIndex.listed``), so that nothing is
told later. What goes first is chosen by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.core.types import Tier
from kvstore.store.columns.index import UNLISTED
from kvstore.store.columns.native import NativeIndex
from kvstore.store.eviction.lru import LruList


class NativeLru(LruList):
    """The droppable copies of one tier, cold to hot; links and ends are the index's own."""

    def __init__(self, index: NativeIndex, tier: Tier) -> None:
        super().__init__(index, tier)
        index.keep_list(tier)
        self._core = index.core
        self._number = int(tier)

    @property
    def coldest(self) -> int:
        """See ``LruList``."""
        return int(self._core.coldest(self._number))

    @property
    def hottest(self) -> int:
        """See ``LruList``."""
        return int(self._core.hottest(self._number))

    @property
    def aside(self) -> dict[int, None]:
        """See ``LruList``: a copy."""
        return dict.fromkeys(self._core.list_from(self._number, True))

    def is_aside(self, slot: int) -> bool:
        """See ``LruList``."""
        return slot >= 0 and bool(self._core.is_aside(self._number, slot))

    def from_aside(self) -> Iterator[int]:
        """See ``LruList``."""
        slot = self.first_aside()
        while slot >= 0:
            yield slot
            slot = self._hotter[slot]

    def first_aside(self) -> int:
        """See ``LruList``."""
        return int(self._core.coldest_aside(self._number))

    def __contains__(self, slot: int) -> bool:
        return self._hotter[slot] != UNLISTED and not self.is_aside(slot)

    def use(self, slot: int) -> None:
        """See ``LruList``."""
        self._core.use(self._number, slot)

    def return_cold(self, slot: int) -> None:
        """See ``LruList``."""
        self._core.return_cold(self._number, slot)

    def take(self, slot: int) -> None:
        """See ``LruList``."""
        self._core.take(self._number, slot)

    def set_aside(self, slot: int) -> None:
        """See ``LruList``."""
        self._core.set_aside(self._number, slot)

    def reconsider_all(self) -> None:
        """See ``LruList``."""
        self._core.reconsider_all(self._number)

    inserted = use
    released = use
    held = take
    removed = take
    reconsider = return_cold

    def used(self, slots: Sequence[int]) -> None:
        """See ``LruList``."""
        self._core.use_known(self._number, list(slots))
