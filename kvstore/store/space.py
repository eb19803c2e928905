"""Who has to go: victims by LRU order, leaves first, gathered whole or not at all. Called with the lock held.

An eviction frees what was asked for or changes nothing. Walking starts at the cold end and never skips a block
that has to be demoted first: where demotion is not possible now (a call that must not wait), the gathering fails
and the reclaimer is woken, so that the order stays LRU and the work stays O(victims).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvstore.core.types import Busy, Reason, Tier, WritePolicy
from kvstore.kernels.layout import align_up
from kvstore.store.book import Book, copy_number
from kvstore.store.index import NONE, PAGE
from kvstore.store.state import State


class Verdict(Enum):
    """What may become of a copy at the cold end."""

    DROP = "drop"
    DEMOTE = "demote"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Victim:
    """A copy to be dropped; with ``demote`` after it was copied to a colder tier."""

    slot: int
    demote: bool
    nbytes: int


class Space:
    """Allocation in the arenas with reclaim on demand."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.wake: Callable[[Tier, int], None] = lambda tier, nbytes: None
        """Called (lock held, must not block) when room for ``nbytes`` needs demotion."""

    def allocate(self, tier: Tier, nbytes: int) -> int | None:
        """A range of an arena, dropping the coldest copies that have a colder one. None if that is not enough: what
        needs demotion is left to whoever may wait (``Movement.take``), or to the reclaimer (``wake``)."""
        arena = self._state.arenas[tier]
        offset = arena.allocate(nbytes)
        if offset is None:
            victims = self.gather(tier, nbytes, demote=False)
            if victims is None:
                return None
            self.drop(tier, victims)
            offset = arena.allocate(nbytes)
        return offset

    def allocate_all(self, tier: Tier, sizes: Sequence[int]) -> list[int | None]:
        """``allocate`` for many ranges, whose victims are gathered together; None from the first that has no room."""
        arena = self._state.arenas[tier]
        found: list[int | None] = []
        for nbytes in sizes:
            offset = arena.allocate(nbytes)
            if offset is None:
                break
            found.append(offset)
        if len(found) < len(sizes):
            # Holes of the right size nearly always, since blocks of one size replace each other; else one by one.
            left = sum(align_up(nbytes, PAGE) for nbytes in sizes[len(found) :])
            self.drop(tier, self.gather(tier, left, demote=False, total=True) or [])
        for nbytes in sizes[len(found) :]:
            offset = self.allocate(tier, nbytes)
            if offset is None:
                break
            found.append(offset)
        return found + [None] * (len(sizes) - len(found))

    def busy(self, tier: Tier, nbytes: int, reason: Reason = Reason.NO_SPACE) -> Busy:
        """What an allocation needed and what there is. ``evictable_bytes`` counts the copies that are not pinned."""
        book, arena = self._state.book, self._state.arenas[tier]
        evictable = book.bytes[tier] - book.pinned_bytes[tier]
        return Busy(tier, nbytes, arena.capacity_bytes - arena.used_bytes, max(evictable, 0), reason)

    def gather(
        self, tier: Tier, nbytes: int, *, demote: bool, total: bool = False, limit: int = 1 << 30
    ) -> list[Victim] | None:
        """Coldest copies whose going makes a hole of ``nbytes`` (with ``total``: as many bytes in all), children first.

        No more than ``limit``, which are then an answer although they are not enough.
        None if there are not enough, or if one has to be demoted first and ``demote`` is False. Only sets blocks
        aside; drops nothing.
        """
        book = self._state.book
        lru, kids, parents = book.lists[tier], book.index.kids[tier], book.index.parent
        chosen: list[Victim] = []
        going: dict[int, int] = {}
        freed = 0
        orphaned: list[int] = []
        cursor = lru.coldest
        while True:
            if orphaned:
                slot = orphaned.pop()
            elif cursor != NONE:
                slot, cursor = cursor, lru.hotter_than(cursor)
            else:
                return None
            kept = kids[slot] > going.get(slot, 0) and not self._may_go_alone(slot, tier)
            verdict = Verdict.KEEP if kept else self.judge(slot, tier)
            if verdict is Verdict.KEEP:
                lru.set_aside(slot)
                continue
            if verdict is Verdict.DEMOTE and not demote:
                return None
            size = align_up(book.nbytes(slot, tier), PAGE)
            chosen.append(Victim(slot, verdict is Verdict.DEMOTE, size))
            freed += size
            enough = freed >= nbytes and (total or self._makes_hole(tier, chosen, nbytes))
            if enough or len(chosen) == limit:
                return chosen
            parent = parents[slot]
            if parent >= 0:
                going[parent] = going.get(parent, 0) + 1
                # Its last child in the tier goes, and it had been set aside for that: it is next in line.
                if parent in lru.aside and kids[parent] == going[parent]:
                    orphaned.append(parent)

    def _may_go_alone(self, slot: int, tier: Tier) -> bool:
        """Whether a copy with children in its tier may go: on DEVICE, where a colder one keeps the chain whole.

        Engines keep the recent blocks of a context on DEVICE that way while its older ones leave.
        """
        return tier is Tier.DEVICE and bool(self._state.book.index.residency[slot] & ~tier.bit & self._state.readable)

    def judge(self, slot: int, tier: Tier) -> Verdict:
        """What may become of a leaf of this tier."""
        book, state = self._state.book, self._state
        if copy_number(slot, tier) in book.io:
            return Verdict.KEEP
        others = book.index.residency[slot] & ~tier.bit
        if others & state.readable:
            return Verdict.DROP
        if tier is Tier.DEVICE:
            return Verdict.DEMOTE
        if tier is Tier.HOST and state.disk_ready and wants_disk(book, slot):
            return Verdict.DEMOTE
        if others:
            # The other copy is on a tier that does not answer now; it will.
            return Verdict.DROP
        if slot in book.holds or (book.index.children[slot] and (tier is Tier.SSD or state.disk_ready)):
            return Verdict.KEEP
        return Verdict.DROP

    def drop(self, tier: Tier, victims: list[Victim]) -> int:
        """Drop gathered copies in their order; returns their bytes."""
        for victim in victims:
            self._state.book.drop(victim.slot, tier, Reason.EVICTED)
        return sum(victim.nbytes for victim in victims)

    def _makes_hole(self, tier: Tier, chosen: list[Victim], nbytes: int) -> bool:
        if tier is Tier.SSD or chosen[-1].nbytes >= nbytes:
            return True
        index = self._state.book.index
        ranges = [(index.offset(victim.slot, tier), victim.nbytes) for victim in chosen]
        return self._state.arenas[tier].largest_hole_with(ranges) >= align_up(nbytes, PAGE)


def wants_disk(book: Book, slot: int) -> bool:
    """Whether the policy of the block's namespace sends it to SSD before its last copy in memory goes."""
    policy = book.namespace(slot).policy.write
    return policy is not WritePolicy.SECOND_HIT or book.index.hits[slot] >= 2 or slot in book.holds
