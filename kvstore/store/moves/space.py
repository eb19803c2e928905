"""Who has to go: victims by LRU order, leaves first, gathered whole or not at all. Called with the lock held.

An eviction frees what was asked for or changes nothing. Walking starts at the cold end and never skips a block
that has to be demoted first: where demotion is not possible now (a call that must not wait), the gathering fails
and the reclaimer is woken, so that the order stays LRU and the work stays O(victims).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.core.namespace import PAGE_BYTES
from kvstore.core.types import Busy, Reason, Tier, WritePolicy
from kvstore.kernels.layout import align_up
from kvstore.store.columns.index import NONE
from kvstore.store.moves.victims import Holes, Verdict, Victim, Victims
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.state import SECTION, State

ANCHORS: Final = 8
"""Copies around which a run of neighbours is sought when one large block needs room among small ones."""

NEVER: Final = 1 << 32

GATHERED_MAX: Final = 4
"""Holes that one section makes for large blocks among small ones: each is the work of dozens of drops."""


class Space:
    """Allocation in the arenas with reclaim on demand."""

    def __init__(self, state: State) -> None:
        self.state = self._state = state
        self.vanishing: dict[int, int] = {}
        """Of the choice that is being made: by slot, how many of its children go and have no other copy."""
        self.tired = False
        """Whether the last ``gather`` found nothing because it had passed by as many guaranteed copies as one may."""

    def allocate(self, book: Book, tier: Tier, nbytes: int) -> int | None:
        """A range of an arena, dropping the coldest copies that have a colder one. None if that is not enough: what
        needs demotion, or more drops than one section has time for, is left to whoever may wait (``Movement.take``), or
        to the reclaimer (``Queues.want_room``)."""
        arena = self._state.arenas[tier]
        offset = arena.allocate(nbytes)
        if offset is None:
            victims = self.gather(book, tier, nbytes, demote=False)
            if victims is None or len(victims) > SECTION:
                return None
            self.drop(book, tier, victims)
            offset = arena.allocate(nbytes)
        return offset

    def allocate_all(self, book: Book, tier: Tier, sizes: Sequence[int]) -> list[int | None]:
        """``allocate`` for many ranges, whose victims are gathered together; None from the first that has no room, or
        that one locked section has no time to make it for."""
        arena = self._state.arenas[tier]
        found: list[int | None] = []
        for nbytes in sizes:
            offset = arena.allocate(nbytes)
            if offset is None:
                break
            found.append(offset)
        if len(found) < len(sizes):
            # Holes of the right size nearly always, since blocks of one size replace each other; else one by one.
            left = sum(align_up(nbytes, PAGE_BYTES) for nbytes in sizes[len(found) :])
            victims = self.gather(book, tier, left, demote=False, total=True, limit=SECTION) or []
            if all(victim.nbytes >= max(sizes) for victim in victims):
                self.drop(book, tier, victims)
        gathered = 0
        for nbytes in sizes[len(found) :]:
            offset = arena.allocate(nbytes)
            if offset is None and gathered < GATHERED_MAX:
                gathered += 1
                offset = self.allocate(book, tier, nbytes)
            if offset is None:
                break
            found.append(offset)
        return found + [None] * (len(sizes) - len(found))

    def busy(self, book: Book, tier: Tier, nbytes: int, reason: Reason = Reason.NO_SPACE) -> Busy:
        """What an allocation needed and what there is. ``evictable_bytes`` counts the copies that are not pinned."""
        arena = self._state.arenas[tier]
        evictable = book.bytes[tier] - book.pinned_bytes(tier)
        return Busy(tier, nbytes, arena.capacity_bytes - arena.used_bytes, max(evictable, 0), reason)

    def gather(
        self, book: Book, tier: Tier, nbytes: int, *, demote: bool, total: bool = False, limit: int = 1 << 30
    ) -> list[Victim] | None:
        """Copies whose going makes a hole of ``nbytes`` (with ``total``: as many bytes in all), children first.

        No more than ``limit``, which are then an answer although they are not enough.
        None if there are not enough, or if one has to be demoted first and ``demote`` is False. Drops nothing.
        """
        book.uses.hand_over()
        policy = book.policies[tier]
        if total or tier not in self._state.arenas:
            choice = Victims(self, book, tier, nbytes, limit, demote=demote)
            policy.victims(choice)
            return self._answer(choice)
        return self._gather_hole(book, tier, align_up(nbytes, PAGE_BYTES), demote)

    def _gather_hole(self, book: Book, tier: Tier, nbytes: int, demote: bool) -> list[Victim] | None:
        """The coldest copy if its going is enough, as where blocks of one size replace each other. Else the cheapest of
        a few runs of neighbours, each around one of the coldest. Else the coldest until a hole happens to come of it.
        """
        arena = self._state.arenas[tier]
        policy = book.policies[tier]
        first = Victims(self, book, tier, 1, 1, demote=demote)
        policy.victims(first)
        if self._answer(first) is None:
            return None
        begin = book.index.offset(first.victims[0].slot, tier)
        if sum(arena.holes_beside(begin, begin + first.freed)) + first.freed >= nbytes:
            return first.victims
        some = Victims(self, book, tier, nbytes, ANCHORS, demote=demote)
        policy.victims(some)
        best: list[Victim] = []
        for anchor in some.victims:
            victims, found = self._run_around(book, anchor.slot, tier, nbytes, demote)
            if found >= nbytes and (not best or sum(v.nbytes for v in victims) < sum(v.nbytes for v in best)):
                best = victims
        if best:
            return best
        choice = Victims(self, book, tier, nbytes, 1 << 30, demote=demote, holes=Holes(arena))
        policy.victims(choice)
        return self._answer(choice)

    def _answer(self, choice: Victims) -> list[Victim] | None:
        self.tired = choice.tired and not choice.well
        return choice.victims if choice.well else None

    def _run_around(self, book: Book, anchor: int, tier: Tier, nbytes: int, demote: bool) -> tuple[list[Victim], int]:
        """Neighbours in the arena that may all go, grown around one copy until they and the holes between them have
        ``nbytes``, towards the colder side first. The victims, children first, and the bytes that the run has."""
        arena = self._state.arenas[tier]
        index, around = book.index, book.occupants[tier]
        run = Victims(self, book, tier, nbytes, 1 << 30, demote=demote)
        if not run.take(anchor):
            return [], 0
        begin = index.place[tier][anchor] * PAGE_BYTES
        end = begin + run.victims[0].nbytes
        before, after = arena.holes_beside(begin, end)
        begin, end = begin - before, end + after
        while end - begin < nbytes:
            sides = [around.ending_at(begin // PAGE_BYTES), around.beginning_at(end // PAGE_BYTES)]
            sides.sort(key=lambda slot: index.last_use[slot] if slot >= 0 else NEVER)
            slot = next((slot for slot in sides if slot >= 0 and run.take(slot)), NONE)
            if slot == NONE:
                return [], 0
            at = index.place[tier][slot] * PAGE_BYTES
            begin, end = min(begin, at), max(end, at + run.victims[-1].nbytes)
            before, after = arena.holes_beside(begin, end)
            begin, end = begin - before, end + after
        return run.victims, end - begin

    def may_go_alone(self, book: Book, slot: int, tier: Tier) -> bool:
        """Whether a copy with children in its tier may go: on DEVICE, where a colder one keeps the chain whole.

        Engines keep the recent blocks of a context on DEVICE that way while its older ones leave.
        """
        return tier is Tier.DEVICE and bool(book.index.residency[slot] & ~tier.bit & self._state.readable)

    def judge(self, book: Book, slot: int, tier: Tier) -> Verdict:
        """What may become of a leaf of this tier."""
        state = self._state
        share = book.namespace(slot).share
        if copy_number(slot, tier) in book.io or (share is not None and share.keeps(tier, book.nbytes(slot, tier))):
            return Verdict.KEEP
        others = book.index.residency[slot] & ~tier.bit
        if others & state.readable:
            return Verdict.DROP
        if tier is Tier.DEVICE:
            return Verdict.DEMOTE
        if tier is Tier.HOST and state.disk_ready and wants_disk(book, slot):
            return Verdict.DEMOTE
        if tier in state.storages and not others and state.colder(tier) is not None:
            return Verdict.DEMOTE
        if others:
            # The other copy is on a tier that does not answer now; it will.
            return Verdict.DROP
        if slot in book.holds:
            return Verdict.KEEP
        # Children that are chosen to go for good are none any more.
        if book.index.children[slot] > self.vanishing.get(slot, 0) and (tier in state.storages or state.disk_ready):
            return Verdict.KEEP
        return Verdict.DROP

    def drop(self, book: Book, tier: Tier, victims: list[Victim]) -> int:
        """Drop gathered copies in their order; returns their bytes."""
        for victim in victims:
            book.drop(victim.slot, tier, Reason.EVICTED)
        return sum(victim.nbytes for victim in victims)


def wants_disk(book: Book, slot: int) -> bool:
    """Whether the policy of the block's namespace sends it to SSD before its last copy in memory goes."""
    policy = book.namespace(slot).policy.write
    return policy is not WritePolicy.SECOND_HIT or book.index.hits[slot] >= 2 or slot in book.holds
