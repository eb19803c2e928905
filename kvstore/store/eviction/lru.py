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

from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.core.types import Tier
from kvstore.store.columns.index import NONE, UNLISTED, BlockIndex
from kvstore.store.eviction.contract import Choice

YOUNG_MAX: Final = 64
"""Leaves too young to go that a walk over storage passes before it looks for chains to break."""


class LruList:
    """The droppable copies of one tier, cold to hot; meets ``eviction.Eviction``, leaves first."""

    def __init__(self, index: BlockIndex, tier: Tier) -> None:
        self.tier = tier
        self._colder = index.colder[tier]
        self._hotter = index.hotter[tier]
        self._last_use = index.last_use
        self._kids = index.kids[tier]
        self._cold = NONE
        self._hot = NONE
        self._aside: dict[int, None] = {}

    @property
    def coldest(self) -> int:
        """Slot at the cold end, or NONE."""
        return self._cold

    @property
    def hottest(self) -> int:
        """Slot at the hot end, or NONE."""
        return self._hot

    @property
    def aside(self) -> dict[int, None]:
        """What is set aside, in the order of its setting aside: nearly always the coldest first."""
        return self._aside

    def is_aside(self, slot: int) -> bool:
        """Whether a slot is set aside."""
        return slot in self._aside

    def from_aside(self) -> Iterator[int]:
        """The slots that are set aside, in the order of ``aside``; nothing is brought back meanwhile."""
        return iter(self._aside)

    def first_aside(self) -> int:
        """Slot that was set aside first, or NONE."""
        return next(iter(self._aside), NONE)

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
        if self._hotter[slot] != UNLISTED or slot in self._aside:
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
        if slot not in self._aside:
            return
        del self._aside[slot]
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
            self._aside.pop(slot, None)
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
        self._aside[slot] = None

    def reconsider_all(self) -> None:
        """Bring everything that was set aside back to the cold end, in the order in which it was set aside."""
        for slot in reversed(list(self._aside)):
            self.return_cold(slot)

    # -- eviction.Eviction ---------------------------------------------------------------------------------------

    inserted = use
    released = use
    held = take
    removed = take
    reconsider = return_cold

    def used(self, slots: Sequence[int]) -> None:
        """Put those that are listed or aside to the hot end, the last one hottest."""
        hotter, aside, use = self._hotter, self._aside, self.use
        for slot in slots:
            if hotter[slot] != UNLISTED or slot in aside:
                use(slot)

    def victims(self, choice: Choice) -> None:
        """The coldest leaves, each followed by its parent where that has become one. Then, where a chain may break, the
        oldest blocks whatever hangs under them, and last the leaves that are too young to go before those."""
        young: list[int] = []
        cursor = self._walk(choice, self.coldest, self._middle_age() if choice.may_break else None, young)
        if not choice.done:
            choice.take_anyway(self.from_aside())
        for slot in young:
            if choice.done:
                return
            choice.take(slot)
        if cursor != NONE:
            self._walk(choice, cursor, None, [])
            if not choice.done:
                choice.take_anyway(self.from_aside())

    def _walk(self, choice: Choice, cursor: int, limit: int | None, young: list[int]) -> int:
        """Offer what is listed from a slot on, until it is enough. Leaves used after ``limit`` are left for ``young``;
        where many came, those after them are no older, and are left, too. Where it stopped, NONE at the hot end."""
        uncovered: list[int] = []
        while not choice.done:
            if uncovered:
                slot = uncovered.pop()
            elif cursor != NONE:
                slot, cursor = cursor, self._hotter[cursor]
            else:
                break
            if limit is not None and self._last_use[slot] > limit and not self._kids[slot]:
                young.append(slot)
                if len(young) >= YOUNG_MAX:
                    break
            elif not choice.take(slot):
                if not choice.done and not self.is_aside(slot):
                    self.set_aside(slot)
            elif self.is_aside(choice.uncovered):
                # It had been set aside for its children, and was colder than all that is listed: it is next.
                uncovered.append(choice.uncovered)
        return cursor

    def _middle_age(self) -> int:
        """The last use half way between the coldest and the hottest copy's. A leaf after that is likely to be the end
        of a chain that grows: its own root is older, and goes before it."""
        first, hottest = self.first_aside(), self.hottest
        coldest = self.coldest if first == NONE else first
        if NONE in (coldest, hottest):
            return 0
        return (self._last_use[coldest] + self._last_use[hottest]) // 2
