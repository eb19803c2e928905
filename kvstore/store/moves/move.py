"""Copies between tiers, run by a mover or by a caller that may wait. Nothing here holds the lock over a copy.

A move is claimed, done and published: the claim (under the lock) marks the source as read from and the copy as
FILLING, so that nobody else makes it and nobody reuses the bytes; whoever else wants it waits for it. Claims
are waited for in one direction only (DEVICE for HOST for SSD), so that waits can not form a ring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import TierUnavailable
from kvstore.core.types import BlockKey, Codec, Outcome, Reason, Tier
from kvstore.store.columns.index import NONE
from kvstore.store.columns.lifecycle import Copy, CopyState
from kvstore.store.moves.space import Space
from kvstore.store.moves.vain import Vain
from kvstore.store.moves.victims import Verdict, Victim
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.state import SECTION, State, parts
from kvstore.tiers.base import DeviceArena
from kvstore.tiers.maintained import Maintained

log = logging.getLogger(__name__)

WAIT_SECONDS_MAX: Final = 60.0
"""Longest wait for a copy that another thread makes; past it, a miss."""

ROUNDS_MAX: Final = 8
"""How often room is made again when others take it first."""

PATIENCE: Final = 1024
"""Rounds that only passed by guaranteed copies, in one call: a quarter of a million of them."""

Failures = dict[int, Reason]
"""Slots that could not be moved, and why."""


@dataclass(slots=True)
class Fill:
    """One claimed move: everything that the copying needs, read under the lock.

    ``codec`` is the one below DEVICE, ``device_codec`` the one there where DEVICE is the source or the target.
    """

    slot: int
    key: BlockKey
    parent: BlockKey
    namespace: Namespace
    codec: Codec
    source: Tier
    source_place: int
    copy: Copy
    device_codec: Codec = Codec.RAW
    well: bool = False


class Movement:
    """Room in arenas with demotion, and the claims of moves. ``demotions`` copies victims to the next colder tier."""

    def __init__(self, state: State, space: Space, device: DeviceArena | None) -> None:
        self.state = state
        self.space = space
        self.demotions: dict[Tier, Callable[[Sequence[int]], Failures]] = {}
        self.device = device
        self.vain = Vain(state.clock)

    # -- room ----------------------------------------------------------------------------------------------------

    def take(self, tier: Tier, nbytes: int) -> int | None:
        """A range of an arena; demotes and drops what has to go. None if nothing more can go."""
        arena, rounds, patience = self.state.arenas[tier], ROUNDS_MAX, PATIENCE
        while rounds and patience:
            with self.state.locked() as book:
                offset = arena.allocate(nbytes)
                if offset is not None:
                    return offset
                victims = self._choose(book, tier, nbytes)
                if victims is None:
                    patience -= 1
                    if self.space.tired:
                        continue
                    return None
                rounds -= 1
                if not victims and (offset := arena.allocate(nbytes)) is not None:
                    return offset
            if victims and not self._demote_and_drop(tier, victims):
                return None
        return None

    def make_room(self, tier: Tier, nbytes: int, *, total: bool = False, limit: int = 1 << 30) -> bool:
        """Free a hole of ``nbytes`` (with ``total``: as many bytes in all), or nothing; False if that can not be.

        With ``limit`` it is enough to free that many blocks.
        """
        rounds, patience = ROUNDS_MAX, PATIENCE
        while rounds and patience:
            with self.state.locked() as book:
                victims = self._choose(book, tier, nbytes, total=total, limit=limit)
                tired = self.space.tired
            if victims is None:
                patience -= 1
                if tired:
                    continue
                return False
            rounds -= 1
            gone = self._demote_and_drop(tier, victims) if victims else 0
            if gone == len(victims):
                return True
            if gone == 0:
                return False
        return False

    def _choose(
        self, book: Book, tier: Tier, nbytes: int, *, total: bool = False, limit: int = 1 << 30
    ) -> list[Victim] | None:
        """Who has to go: dropped at once (then the list is empty) where one section has time for it and nothing is
        demoted; else under I/O, for ``_demote_and_drop``. None if there are not enough."""
        victims = self.space.gather(book, tier, nbytes, demote=True, total=total, limit=limit)
        if victims is not None and len(victims) <= SECTION and not any(victim.demote for victim in victims):
            self.space.drop(book, tier, victims)
            return []
        for victim in victims or ():
            book.io_begin(victim.slot, tier)
        return victims

    def evict_one(self, slot: int, tier: Tier) -> Outcome:
        """Drop one named copy, demoted first if need be: HIT, MISS if it is not there, BUSY if it has to stay.

        The caller holds a ref on the slot.
        """
        with self.state.locked() as book:
            if not book.has(slot, tier):
                return Outcome.MISS
            verdict = self.space.judge(book, slot, tier)
            kept = book.index.kids[tier][slot] or copy_number(slot, tier) in book.pins
            if kept or verdict is Verdict.KEEP:
                return Outcome.BUSY
            victim = Victim(slot, verdict is Verdict.DEMOTE, book.nbytes(slot, tier))
            if not victim.demote:
                self.space.drop(book, tier, [victim])
                return Outcome.HIT
            book.io_begin(slot, tier)
        return Outcome.HIT if self._demote_and_drop(tier, [victim]) else Outcome.BUSY

    def _demote_and_drop(self, tier: Tier, victims: list[Victim]) -> int:
        """Copy victims down, then drop those that are still droppable; returns how many went."""
        failures: Failures = {}
        try:
            failures = self.demotions[tier]([victim.slot for victim in victims if victim.demote])
        finally:
            gone = 0
            for part in parts(victims):
                with self.state.locked() as book:
                    gone += self._end_demotion(book, tier, part, failures)
        return gone

    def _end_demotion(self, book: Book, tier: Tier, victims: Sequence[Victim], failures: Failures) -> int:
        gone = 0
        for victim in victims:
            # The number must outlive the end of the I/O, which may free the slot of a removed block.
            book.ref(victim.slot)
            book.io_end(victim.slot, tier)
        for victim in victims:
            gone += self._drop_demoted(book, tier, victim, failed=victim.slot in failures)
            book.unref(victim.slot)
        self.state.changed.notify_all()
        return gone

    def reclaim(self, tier: Tier, nbytes: int) -> bool:
        """Blocks were dropped from storage for ``nbytes``: where it does not give their space back by itself, it does
        so now. False if it could not."""
        storage = self.state.storages[tier]
        if not isinstance(storage, Maintained):
            return True
        try:
            storage.reclaim(nbytes)
        except TierUnavailable as error:
            log.warning("space on %s could not be reclaimed: %s", tier.name, error)
            return False
        return True

    def _drop_demoted(self, book: Book, tier: Tier, victim: Victim, *, failed: bool) -> int:
        slot = victim.slot
        if not book.has(slot, tier) or copy_number(slot, tier) in book.pins or book.index.kids[tier][slot]:
            return 0
        verdict = self.space.judge(book, slot, tier)
        lost = verdict is Verdict.DEMOTE and failed and tier is Tier.HOST and slot not in book.holds
        if verdict is not Verdict.DROP and not lost:
            return 0
        if victim.demote and not lost:
            book.counters.count(f"{tier.name.lower()}_demoted")
        book.drop(slot, tier, Reason.EVICTED)
        return 1

    # -- claims --------------------------------------------------------------------------------------------------

    def fill(
        self,
        slots: Iterable[int],
        tier: Tier,
        sources: Sequence[Tier],
        work: Callable[[list[Fill], Failures], None],
    ) -> Failures:
        """Make READY copies in ``tier`` from the first of ``sources`` that has one; the caller holds refs on ``slots``.

        ``work`` copies the claimed ones: it sets ``well`` and the copy's place, or puts a reason into the failures.
        """
        failures: Failures = {}
        for part in parts(list(dict.fromkeys(slots))):
            self._fill_part(list(part), tier, sources, work, failures)
        return failures

    def _fill_part(
        self,
        waiting: list[int],
        tier: Tier,
        sources: Sequence[Tier],
        work: Callable[[list[Fill], Failures], None],
        failures: Failures,
    ) -> None:
        while waiting:
            claimed, waiting = self._claim(waiting, tier, sources, failures)
            try:
                if claimed:
                    work(claimed, failures)
            finally:
                self._publish(claimed)
            if waiting and not claimed and not self._wait_for_others(waiting, tier):
                failures.update(dict.fromkeys(waiting, Reason.TIER_UNAVAILABLE))
                return

    def _claim(
        self, slots: list[int], tier: Tier, sources: Sequence[Tier], failures: Failures
    ) -> tuple[list[Fill], list[int]]:
        claimed: list[Fill] = []
        waiting: list[int] = []
        with self.state.locked() as book:
            index = book.index
            for slot in slots:
                if book.has(slot, tier):
                    continue
                if copy_number(slot, tier) in book.fills:
                    waiting.append(slot)
                    continue
                usable = index.residency[slot] & self.state.readable
                source = next((s for s in sources if usable & s.bit), None)
                if source is None:
                    failures[slot] = self._why_not(book, slot)
                    continue
                namespace, codec = book.namespace(slot), book.codec(slot)
                to_device = tier is Tier.DEVICE
                device_codec = namespace.device_codec_of(codec) if to_device else book.device_codec(slot)
                copy = Copy(tier, namespace.bytes_in(tier, codec, device_codec))
                place = index.offset(slot, source) if source in self.state.arenas else index.place[source][slot]
                book.io_begin(slot, source)
                book.fill_begin(slot, copy)
                names = (index.key_of(slot), index.parent_key(slot))
                claimed.append(Fill(slot, *names, namespace, codec, source, place, copy, device_codec))
        return claimed, waiting

    def _publish(self, fills: list[Fill]) -> None:
        with self.state.locked() as book:
            for fill in fills:
                if fill.well and fill.copy.tier in self.state.arenas and fill.copy.state is not CopyState.DOOMED:
                    to_device = fill.copy.tier is Tier.DEVICE
                    device_codec = fill.device_codec if to_device else book.device_codec(fill.slot)
                    book.set_codecs(fill.slot, fill.codec, device_codec)
                book.fill_end(fill.slot, fill.copy, well=fill.well)
                book.io_end(fill.slot, fill.source)
            self.state.changed.notify_all()

    def _why_not(self, book: Book, slot: int) -> Reason:
        """Why no source of a block can be read."""
        if book.index.residency[slot]:
            return Reason.TIER_UNAVAILABLE
        return book.tombstones.reason(book.name(slot))

    def _wait_for_others(self, slots: list[int], tier: Tier) -> bool:
        with self.state.locked() as book:
            return self.state.wait_for(
                lambda: any(copy_number(slot, tier) not in book.fills for slot in slots), WAIT_SECONDS_MAX
            )

    def forget_lost(self, book: Book) -> None:
        """Drop the copies that the disk has lost by itself."""
        state = self.state
        fresh = [(tier, *one) for tier, storage in state.storages.items() for one in storage.lost()]
        lost, state.lost = [*state.lost, *fresh], []
        for tier, handle, name in lost:
            slot = book.find(name)
            if slot == NONE:
                continue
            if copy_number(slot, tier) in book.fills:
                # Perhaps of this copy: its write was answered, and it is about to be published.
                state.lost.append((tier, handle, name))
            elif book.has(slot, tier) and book.index.place[tier][slot] == handle:
                book.drop(slot, tier, Reason.DROPPED)

    # -- the disk's health ---------------------------------------------------------------------------------------

    def look_at(self, tier: Tier) -> bool:
        """Ask a storage tier how it is and remember it; True if it takes reads and writes."""
        ready = self.state.storages[tier].state.ready
        with self.state.locked() as book:
            before = bool(self.state.readable & tier.bit)
            if ready:
                self.state.readable |= tier.bit
            else:
                self.state.readable &= ~tier.bit
            self.state.tell_readers(book)
            if ready and not before:
                for policy in book.policies[1:]:
                    policy.reconsider_all()
        if ready != before:
            log.warning("the %s tier is %s now", tier.name, "ready" if ready else "degraded")
        return ready
