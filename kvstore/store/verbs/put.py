"""Blocks come: reserve, commit, abort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.cache import CommitEntry, CommitResult, ReserveResult
from kvstore.core.errors import InvalidArgument, KVStoreError
from kvstore.core.namespace import PAGE_BITS
from kvstore.core.types import (
    Area,
    BlockKey,
    Busy,
    Codec,
    Durability,
    LeaseId,
    NamespaceId,
    Outcome,
    Place,
    Reason,
    ReservationId,
    Tier,
)  # fmt: skip
from kvstore.store.columns.index import NONE
from kvstore.store.columns.lifecycle import Copy, Event
from kvstore.store.moves.durable import Durably
from kvstore.store.moves.move import Movement
from kvstore.store.moves.queues import Queues
from kvstore.store.tables import validate
from kvstore.store.tables.book import Book
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.owners import Owner, Reservation
from kvstore.store.tables.state import SECTION, State, parts
from kvstore.store.tables.tenancy import Tenancy
from kvstore.store.verbs.commit import Commit


@dataclass(slots=True)
class _Claims:
    """Answers of one reserve, an entry a block."""

    outcomes: list[Outcome]
    ids: list[ReservationId]
    places: list[Place | None]
    busy: Busy | None = None

    def add(self, outcome: Outcome, reservation_id: int = 0, place: Place | None = None) -> None:
        self.outcomes.append(outcome)
        self.ids.append(ReservationId(reservation_id))
        self.places.append(place)

    def refuse(self, busy: Busy) -> None:
        self.busy = busy
        self.add(Outcome.BUSY)

    def none(self) -> list[ReservationId]:
        """Refuse what was claimed, too; returns what is to be given back."""
        claimed = [number for number in self.ids if number]
        self.outcomes = [Outcome.HIT if outcome is Outcome.HIT else Outcome.BUSY for outcome in self.outcomes]
        self.ids, self.places = [ReservationId(0)] * len(self.ids), [None] * len(self.ids)
        return claimed


class _Asked(NamedTuple):
    """What one reserve asks for."""

    owner: Owner
    namespace: Namespace
    tier: Tier
    durable: bool
    standing: bool


class Put:
    """The verbs that bring blocks."""

    def __init__(self, movement: Movement, tenancy: Tenancy, durably: Durably, queues: Queues) -> None:
        self._state: State = movement.state
        self._movement = movement
        self._tenancy = tenancy
        self._durably = durably
        self._queues = queues

    def reserve(  # noqa: PLR0913  the arguments of Cache.reserve
        self,
        owner: Owner,
        namespace_id: NamespaceId,
        tier: Tier,
        keys: Sequence[BlockKey],
        count: int,
        durability: Durability | None = None,
        *,
        standing: bool = False,
        whole: bool = False,
    ) -> ReserveResult:
        """See ``Cache.reserve``.

        A key that another writer has reserved and not committed is reserved once more, which spares engines the
        waiting: both write the same bytes, and the later commit answers HIT with ``existed``. A place in the buffer
        takes raw slices, whatever the namespace's codec: the copy out of the buffer encodes. BUSY on DEVICE with
        ``evictable_bytes`` above 0 means that blocks are being demoted now: the same call will find room soon.
        """
        state = self._state
        validate.check_tier(tier, [t for t in (Tier.DEVICE, Tier.HOST) if t in state.arenas])
        validate.check_reserve(keys, count)
        if standing and (keys or tier is not Tier.HOST):
            raise InvalidArgument("standing", standing, "False, unless places are reserved by count and for HOST")
        entries: Sequence[BlockKey | None] = keys or [None] * count
        claims = _Claims([], [], [])
        with state.locked() as book:
            namespace = owner.namespace(namespace_id)
            if owner.buffer is None and not state.arenas[tier].client_writable:
                raise InvalidArgument(
                    "tier", tier.name, "a tier that this session can write: it was opened without a buffer"
                )
            state.owners.require_room("reservations", owner.peer, state.config, more=len(entries))
            self._tenancy.expire_leases(book)
            durable = (namespace.policy.durability if durability is None else durability) is Durability.DURABLE
            if durable:
                self._movement.forget_lost(book)
            asked = _Asked(owner, namespace, tier, durable, standing)
            self._claim_part(book, claims, asked, entries[:SECTION])
            if len(entries) <= SECTION:
                self._claimed_all(book, claims, asked)
        if len(entries) > SECTION:
            self._claim_rest(claims, asked, entries[SECTION:])
        if whole and claims.busy is not None:
            self._abort(owner, claims.none())
        return ReserveResult(tuple(claims.outcomes), tuple(claims.ids), tuple(claims.places), claims.busy, standing)

    def _claim_rest(self, claims: _Claims, asked: _Asked, entries: Sequence[BlockKey | None]) -> None:
        """Claim in sections that others can come between; a failure gives back what was claimed before."""
        state, owner = self._state, asked.owner
        try:
            for part in parts(entries):
                with state.locked() as book:
                    owner.require_open()
                    state.owners.require_room("reservations", owner.peer, state.config, more=len(part))
                    self._claim_part(book, claims, asked, part)
        except KVStoreError:
            self._abort(owner, claims.none())
            raise
        with state.locked() as book:
            self._claimed_all(book, claims, asked)

    def _claim_part(self, book: Book, claims: _Claims, asked: _Asked, part: Sequence[BlockKey | None]) -> None:
        """Claim places for some blocks."""
        resident, namespace, durable = book.resident, asked.namespace, asked.durable
        for key in part:
            slot = NONE if key is None else resident(key, namespace)
            if slot != NONE and not (durable and not self._durably.is_durable(book, slot)):
                claims.add(Outcome.HIT)
            elif claims.busy is None:
                self._claim(book, claims, asked, key)
            else:
                claims.add(Outcome.BUSY)

    def _claimed_all(self, book: Book, claims: _Claims, asked: _Asked) -> None:
        """Count what was asked for, and have room made where it was refused."""
        state = self._state
        if known := claims.outcomes.count(Outcome.HIT):
            book.counters.count("put_known", known)
        if claims.busy is None:
            return
        refused = claims.outcomes.count(Outcome.BUSY)
        book.counters.count(f"put_refused_{claims.busy.reason.name.lower()}", refused)
        if claims.busy.tier is Tier.DEVICE and not state.draining:
            self._queues.want_room(asked.tier, refused * asked.namespace.layout.device_bytes)

    def _claim(
        self,
        book: Book,
        claims: _Claims,
        asked: _Asked,
        key: BlockKey | None,
    ) -> None:
        owner, namespace, tier, standing = asked.owner, asked.namespace, asked.tier, asked.standing
        state, layout = self._state, namespace.layout
        if state.draining:
            claims.refuse(self._movement.space.busy(book, tier, layout.device_bytes, Reason.DRAINING))
            return
        written, area, arena = None, Area.DEVICE, state.arenas[tier]
        if not arena.client_writable and owner.buffer is not None:
            # Nobody may write where committed blocks lie: the block is copied there when it is committed.
            area, arena, nbytes = Area.BUFFER, owner.buffer, layout.layers * layout.raw_slice_stride
            written = _claimed(Tier.HOST, nbytes, arena.allocate(nbytes))
            if written is None:
                claims.refuse(Busy(Tier.HOST, nbytes, arena.capacity_bytes - arena.used_bytes, 0))
                return
        device = None
        if tier is Tier.DEVICE:
            device = _claimed(tier, layout.device_bytes, self._movement.space.allocate(book, tier, layout.device_bytes))
            if device is None:
                if written is not None:
                    arena.free(written.place, written.nbytes)
                claims.refuse(self._movement.space.busy(book, tier, layout.device_bytes))
                return
            state.reserved_bytes += device.nbytes
        copy, kept = (written, device) if written is not None else (device, None)
        if copy is None:
            raise RuntimeError("a block is reserved in DEVICE, in the buffer, or in both")
        number = ReservationId(state.owners.next_id())
        state.owners.add_reservation(Reservation(number, owner, namespace, area, copy, key, standing, kept))
        version = arena.versions[copy.place >> PAGE_BITS]
        claims.add(Outcome.PENDING, number, Place(area, copy.place, layout.raw_slice_stride, Codec.RAW, version))

    def abort(self, owner: Owner, reservation_ids: Sequence[ReservationId]) -> int:
        """See ``Cache.abort``."""
        validate.check_count("reservation_ids", len(reservation_ids))
        with self._state.locked():
            owner.require_open()
        return self._abort(owner, list(dict.fromkeys(reservation_ids)))

    def _abort(self, owner: Owner, numbers: Sequence[ReservationId]) -> int:
        """Give back those that the session still has, in sections that others can come between; returns how many."""
        aborted = 0
        for part in parts(numbers):
            with self._state.locked() as book:
                known = [number for number in part if number in owner.reservations]
                self._tenancy.give_back_reservations(book, known)
                aborted += len(known)
        return aborted

    def commit(
        self,
        owner: Owner,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        token_ids: Sequence[int],
        durability: Durability | None,
        lease_id: LeaseId | None,
    ) -> CommitResult:
        """See ``Cache.commit``."""
        state = self._state
        namespace = owner.namespace(namespace_id)
        validate.check_commit(namespace, entries, token_ids)
        wanted = namespace.policy.durability if durability is None else durability
        durable = wanted is Durability.DURABLE
        queue = None if durable else self._queues.queue_writes
        commit = Commit(self._movement, self._tenancy, namespace, entries, token_ids, queue)
        with state.locked() as book:
            if owner.ended:
                owner.require_open()
            commit.claim(book, owner, lease_id)
            more = commit.prepare(book)
        try:
            while more:
                with state.locked() as book:
                    more = commit.prepare(book)
            commit.copy()
        finally:
            more = True
            while more:
                with state.locked() as book:
                    more = commit.publish(book)
        if not durable:
            return commit.result({})
        try:
            if state.disk is None:
                # As with a disk that fails: the blocks are in memory, and not durable as was asked.
                return commit.result(dict.fromkeys(commit.slots, Reason.TIER_UNAVAILABLE))
            return commit.result(self._durably.write(commit.slots))
        finally:
            commit.release()


def _claimed(tier: Tier, nbytes: int, offset: int | None) -> Copy | None:
    """A range that was just allocated, reserved; None if it was not."""
    if offset is None:
        return None
    copy = Copy(tier, nbytes, place=offset)
    copy.advance(Event.RESERVE)
    return copy
