"""One LRU list a tier: exact, O(1) a step, leaves first.

A list holds the copies of its tier that may be dropped: READY, not pinned, not under I/O. Links are columns of the
index, so a listed block costs eight bytes a tier and no object. From the cold end:

- a block with children in the tier is not a leaf. It is *set aside* and comes back to the cold end when its last
  child leaves the tier (it was colder than everything listed, so that is its place), or to the hot end when used;
- a block that may not go for another reason (held, its only copy, no colder tier to take it) is set aside too, and
  ``reconsider`` brings it back when that reason may have gone.

Each setting aside is paid for by one use or one arrival, so eviction stays O(1) amortised however long the chains.
Guarded by the store's lock.
"""

from __future__ import annotations

from kvstore.core.types import Tier
from kvstore.store.index import NONE, UNLISTED, BlockIndex


class LruList:
    """The droppable copies of one tier, cold to hot."""

    def __init__(self, index: BlockIndex, tier: Tier) -> None:
        self.tier = tier
        self._colder = index.colder[tier]
        self._hotter = index.hotter[tier]
        self._cold = NONE
        self._hot = NONE
        self.aside: set[int] = set()

    @property
    def coldest(self) -> int:
        """Slot at the cold end, or NONE."""
        return self._cold

    def hotter_than(self, slot: int) -> int:
        """The next slot towards the hot end, or NONE."""
        return self._hotter[slot]

    def __contains__(self, slot: int) -> bool:
        return self._hotter[slot] != UNLISTED

    def use(self, slot: int) -> None:
        """Put a slot, listed or not, to the hot end."""
        hot = self._hot
        if hot == slot:
            return
        if self._hotter[slot] != UNLISTED or slot in self.aside:
            self.take(slot)
            hot = self._hot
        self._colder[slot] = hot
        self._hotter[slot] = NONE
        if hot == NONE:
            self._cold = slot
        else:
            self._hotter[hot] = slot
        self._hot = slot

    def return_cold(self, slot: int) -> None:
        """Bring a slot that was set aside back to the cold end; nothing happens to any other."""
        if slot not in self.aside:
            return
        self.aside.remove(slot)
        cold = self._cold
        self._hotter[slot] = cold
        self._colder[slot] = NONE
        if cold == NONE:
            self._hot = slot
        else:
            self._colder[cold] = slot
        self._cold = slot

    def take(self, slot: int) -> None:
        """Take a slot off the list (or from aside); nothing happens if it is on neither."""
        hotter = self._hotter[slot]
        if hotter == UNLISTED:
            self.aside.discard(slot)
            return
        colder = self._colder[slot]
        if colder == NONE:
            self._cold = hotter
        else:
            self._hotter[colder] = hotter
        if hotter == NONE:
            self._hot = colder
        else:
            self._colder[hotter] = colder
        self._colder[slot] = UNLISTED
        self._hotter[slot] = UNLISTED

    def set_aside(self, slot: int) -> None:
        """Take a listed slot off until ``return_cold`` or ``use``."""
        self.take(slot)
        self.aside.add(slot)

    def reconsider_all(self) -> None:
        """Bring everything that was set aside back to the cold end, in no promised order among themselves."""
        for slot in sorted(self.aside):
            self.return_cold(slot)
