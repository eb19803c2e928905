"""Sessions and leases: opening, ending, and what goes with them. Their end frees everything that they own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from kvstore.core.errors import InvalidArgument, ResourceExhausted, Unavailable, UnknownLease
from kvstore.core.namespace import PAGE_BITS
from kvstore.core.types import Area, BlockKey, LeaseId, NamespaceId, Place, ReservationId, SessionId, Tier
from kvstore.store.columns.index import NONE, TIER_BITS
from kvstore.store.columns.lifecycle import Event
from kvstore.store.tables import validate
from kvstore.store.tables.book import Book
from kvstore.store.tables.buffers import Buffers
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.owners import Lease, Owner, Reservation, Who
from kvstore.store.tables.state import State
from kvstore.tiers.base import Arena
from kvstore.tiers.versions import Versions

SECTION_THINGS = 256
"""Leases, pins, holds, ranges and reservations given back in one locked section."""

SECTION_JOBS = 16
"""Jobs ended in one locked section; the blocks that they hold are let go in sections after it."""

OPERATOR_SESSIONS: Final = 16
"""Sessions without a buffer, of root or the daemon's own user, beyond ``sessions_max``."""

MakeBuffer = Callable[[int], Arena]

# Plain numbers: sums with an enum cost more than the rest of a release.
_DEVICE, _HOST = int(Tier.DEVICE), int(Tier.HOST)


class Tenancy:
    """Sessions and leases of one store."""

    def __init__(self, state: State, make_buffer: MakeBuffer | None = None) -> None:
        self._state = state
        self._make_buffer: MakeBuffer = make_buffer or Buffers(state.config.buffers_bytes_max)

    # -- sessions ------------------------------------------------------------------------------------------------

    def open_session(self, name: str, buffer_bytes: int, who: Who) -> Owner:
        """See ``Store.open_session``. Faults the buffer in, outside the lock."""
        state = self._state
        validate.check_session(name, buffer_bytes, state.config.buffer_bytes_max)
        with state.locked():
            self._require_room(who, buffer_bytes)
        buffer = self._make_buffer(buffer_bytes) if buffer_bytes else None
        try:
            with state.locked():
                self._require_room(who, buffer_bytes)
                number = SessionId(state.owners.next_id())
                owner = Owner(number, name, who.uid, who.pid, who.remote, who.peer, buffer)
                state.owners.add_session(owner)
        except BaseException:
            if buffer is not None:
                buffer.close()
            raise
        return owner

    def _require_room(self, who: Who, buffer_bytes: int) -> None:
        owners, config, peer = self._state.owners, self._state.config, who.peer
        if not buffer_bytes and not who.remote and who.uid in (0, os.geteuid()):
            # Some are kept for operators, whose tools have no buffer: whoever took all sessions is found with them.
            if len(owners.sessions) >= config.sessions_max + OPERATOR_SESSIONS:
                owners.require_room("sessions", peer, config)
            return
        owners.require_room("sessions", peer, config)
        share = config.peer_bound(config.buffers_bytes_max)
        mine = sum(o.buffer.capacity_bytes for o in owners.sessions.values() if o.peer == peer and o.buffer is not None)
        if buffer_bytes and mine + buffer_bytes > share:
            raise ResourceExhausted(
                f"{peer} has buffers of {mine} bytes; the bound of one peer is {share} bytes",
                field="buffer_bytes",
                value=buffer_bytes,
                expected=f"at most {max(share - mine, 0)} now",
            )

    def close_session(self, owner: Owner) -> None:
        """See ``Store.close_session``."""
        state = self._state
        with state.locked() as book:
            if owner.ended:
                return
            state.owners.take_session(owner)
            owner.ended = True
            # Its buffer stays until all that lies in it was given back.
            owner.buffer_io += 1
        while owner.leases or owner.reservations:
            with state.locked() as book:
                self._end_some(book, owner)
        self.give_back_all()
        while owner.jobs:
            with state.locked() as book:
                for job_id in tuple(islice(owner.jobs, SECTION_JOBS)):
                    job = state.owners.jobs[job_id]
                    state.owners.take_job(job)
                    job.cancel()
                    job.done.set()
        with state.locked() as book:
            book.counters.count("sessions_ended")
            self.buffer_io_end(book, owner)

    def _end_some(self, book: Book, owner: Owner) -> None:
        """End as many of an ended session's rights as one locked section may."""
        leases = tuple(islice(owner.leases, SECTION_THINGS))
        for lease_id in leases:
            self.end_lease(book, self._state.owners.leases[lease_id])
        self.give_back_reservations(book, tuple(islice(owner.reservations, SECTION_THINGS - len(leases))))

    def close_all(self) -> None:
        """End every session."""
        with self._state.locked():
            owners = tuple(self._state.owners.sessions.values())
        for owner in owners:
            self.close_session(owner)

    def require(self, owner: Owner) -> None:
        """Raise Unauthenticated once the session has ended."""
        with self._state.locked():
            owner.require_open()

    def memory(self, owner: Owner, area: Area) -> memoryview:
        """See ``Store.memory``."""
        with self._state.locked():
            owner.require_open()
        if area is Area.BUFFER and owner.buffer is not None:
            return owner.buffer.view(0, owner.buffer.capacity_bytes)
        tier = {Area.HOST: Tier.HOST, Area.DEVICE: Tier.DEVICE}.get(area)
        arena = self._state.arenas.get(tier) if tier else None
        if arena is None:
            raise Unavailable(f"this session has no {area.name} memory", field="area", value=area.name)
        whole = arena.view(0, arena.capacity_bytes)
        return whole if arena.client_writable else whole.toreadonly()

    def versions(self, owner: Owner, area: Area) -> Versions:
        """See ``Cache.versions``."""
        self.require(owner)
        tier = {Area.HOST: Tier.HOST, Area.DEVICE: Tier.DEVICE}.get(area)
        arena = self._state.arenas.get(tier) if tier else owner.buffer
        if arena is None:
            raise Unavailable(f"this session has no {area.name} memory", field="area", value=area.name)
        return arena.versions

    def held(self, owner: Owner, place: Place) -> bool:
        """See ``Session.held``: the range was not handed out again if its page has the version it had."""
        self.require(owner)
        tier = {Area.HOST: Tier.HOST, Area.DEVICE: Tier.DEVICE}.get(place.area)
        arena = self._state.arenas.get(tier) if tier else owner.buffer
        return arena is not None and arena.versions[place.offset >> PAGE_BITS] == place.version

    def buffer_io_end(self, book: Book, owner: Owner) -> None:
        """A job no longer lands bytes in the session's buffer."""
        owner.buffer_io -= 1
        if not owner.ended or owner.buffer_io:
            return
        for namespace in owner.namespaces.values():
            self._state.namespaces.leave(namespace)
        owner.namespaces.clear()
        self._state.owners.charge_namespaces(owner, -owner.weight)
        if owner.buffer is not None:
            self._state.afterwards(owner.buffer.close)
            owner.buffer = None

    def give_back_reservations(self, book: Book, reservation_ids: Sequence[ReservationId]) -> None:
        """Abort reservations that are known to exist."""
        owners = self._state.owners
        for reservation_id in reservation_ids:
            reservation = owners.reservations[reservation_id]
            owners.take_reservation(reservation)
            reservation.copy.advance(Event.ABORT)
            if reservation.device is not None:
                reservation.device.advance(Event.ABORT)
            self.free_device(book, reservation)
            self.free_buffer(book, reservation)

    def free_device(self, book: Book, reservation: Reservation, *, kept: bool = False) -> None:
        """A finished reservation has no place in DEVICE any more; it is free unless it is ``kept``."""
        place = reservation.on_device
        if place is None:
            return
        self._state.reserved_bytes -= place.nbytes
        if not kept:
            self._state.arenas[Tier.DEVICE].free(place.place, place.nbytes)

    def free_buffer(self, book: Book, reservation: Reservation) -> None:
        """Give the range of the buffer that a finished reservation had back."""
        buffer = reservation.owner.buffer
        if reservation.area is Area.BUFFER and buffer is not None:
            buffer.free(reservation.copy.place, reservation.copy.nbytes)

    # -- leases --------------------------------------------------------------------------------------------------

    def grant(self, owner: Owner, name: str, ttl_ms: int) -> LeaseId:
        """See ``Cache.grant_lease``."""
        state = self._state
        validate.check_lease(name, ttl_ms)
        ttl_ms = min(ttl_ms, state.config.lease_ttl_ms_max)
        with state.locked() as book:
            owner.require_open()
            self.expire_leases(book)
            state.owners.require_room("leases", owner.peer, state.config)
            lease_id = LeaseId(state.owners.next_id())
            state.owners.add_lease(Lease(lease_id, owner, name, ttl_ms, state.clock.now() + ttl_ms / 1000))
        return lease_id

    def grant_untimed(self, owner: Owner, name: str) -> Lease:
        """A lease without a clock, which is its caller's to ``end``; the session's end ends it, too."""
        state = self._state
        validate.check_lease(name, 1)
        with state.locked():
            owner.require_open()
            state.owners.require_room("leases", owner.peer, state.config)
            lease = Lease(LeaseId(state.owners.next_id()), owner, name)
            state.owners.add_lease(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """End a lease, if it has not ended yet."""
        with self._state.locked() as book:
            if not lease.ended:
                self.end_lease(book, lease)
            # Few pins, in a section of the loop's. What others have left over is not its affair.
            self.give_back(book)

    def renew(self, owner: Owner, lease_id: LeaseId) -> int:
        """See ``Store.renew_lease``."""
        with self._state.locked() as book:
            lease = self.lease(book, owner, lease_id)
            if lease.timed:
                lease.deadline = self._state.clock.now() + lease.ttl_ms / 1000
            return lease.ttl_ms

    def hold(
        self, owner: Owner, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]
    ) -> tuple[bool, ...]:
        """See ``Cache.hold``."""
        validate.check_keys(keys)
        held: list[bool] = []
        for begin in range(0, len(keys) or 1, SECTION_THINGS):
            with self._state.locked() as book:
                lease = self.lease(book, owner, lease_id)
                slot_of = book.index.slots(owner.namespace(namespace_id).number).get
                for key in keys[begin : begin + SECTION_THINGS]:
                    slot = slot_of(key, NONE)
                    there = slot != NONE and book.index.residency[slot] != 0
                    held.append(there)
                    if there and slot not in lease.holds:
                        lease.holds.add(slot)
                        book.hold(slot)
        return tuple(held)

    def release(
        self, owner: Owner, lease_id: LeaseId, namespace_id: NamespaceId | None, keys: Sequence[BlockKey]
    ) -> int:
        """See ``Cache.release``."""
        validate.check_keys(keys)
        if keys and namespace_id is None:
            raise InvalidArgument("namespace_id", "empty", "the namespace of the keys")
        if namespace_id is not None:
            released = 0
            # Children first, as at the end of a lease.
            backwards = keys[::-1]
            for begin in range(0, len(keys) or 1, SECTION_THINGS):
                with self._state.locked() as book:
                    lease, namespace = self.lease(book, owner, lease_id), owner.namespace(namespace_id)
                    released += self._release_keys(book, lease, namespace, backwards[begin : begin + SECTION_THINGS])
            return released
        begun = self.begin_release(owner, lease_id)
        return begun if isinstance(begun, int) else begun()

    def begin_release(self, owner: Owner, lease_id: LeaseId) -> int | Callable[[], int]:
        """See ``Session.begin_release``."""
        with self._state.locked() as book:
            released = self.end_lease(book, self.lease(book, owner, lease_id))
            if self.give_back(book):
                return released

        def rest() -> int:
            self.give_back_all()
            return released

        return rest

    def lease(self, book: Book, owner: Owner, lease_id: LeaseId) -> Lease:
        """The session's live lease; raises Unauthenticated or UnknownLease."""
        if owner.ended:
            owner.require_open()
        found, now = self._state.owners.leases.get(lease_id), self._state.clock.now()
        if found is not None and found.deadline <= now:
            self.expire_leases(book)
        if found is None or found.owner is not owner or found.deadline <= now:
            raise UnknownLease(
                f"lease {lease_id} is unknown, has ended or has expired", field="lease_id", value=lease_id
            )
        return found

    def expire_leases(self, book: Book) -> bool:
        """End leases whose time has run out, as many as one locked section may; True if none is left."""
        for things, lease in enumerate(self._state.owners.expired(self._state.clock.now()), 1):
            self.end_lease(book, lease)
            book.counters.count("leases_expired")
            if things >= SECTION_THINGS:
                return False
        return self.give_back(book)

    def expire_all(self) -> None:
        """End all leases whose time has run out, in sections that others can come between."""
        while True:
            with self._state.locked() as book:
                if self.expire_leases(book):
                    return

    def end_lease(self, book: Book, lease: Lease) -> int:
        """It is over at once; what it holds is given back by ``give_back``. Returns how many things."""
        owners = self._state.owners
        owners.take_lease(lease)
        lease.ended = True
        for job_id in tuple(lease.jobs):
            # What it was to pin nobody can have any more; one that has begun ends after its next step.
            owners.jobs[job_id].cancel()
        # The buffer stays until its ranges were given back.
        lease.owner.buffer_io += 1
        owners.ending.append(lease)
        return len(lease.pins) + len(lease.holds) + sum(map(len, lease.buffers.values()))

    def give_back(self, book: Book) -> bool:
        """Give back what ended leases held, as much as one locked section may; True if nothing is left."""
        ending, room = self._state.owners.ending, SECTION_THINGS
        while ending and room > 0:
            room -= 1 + self._give_back(book, ending[0], room)
            if not (ending[0].pins or ending[0].holds or ending[0].buffers):
                self.buffer_io_end(book, ending.popleft().owner)
        return not ending

    def give_back_all(self) -> None:
        """Give back what ended leases held, in sections that others can come between."""
        while True:
            with self._state.locked() as book:
                if self.give_back(book):
                    return

    def _give_back(self, book: Book, lease: Lease, most: int) -> int:
        things = min(most, len(lease.pins))
        if things:
            # Those that came last first: children before their parents, which end up hotter.
            book.unpin_all([lease.pins.popitem()[0] for _ in range(things)])
        while lease.holds and things < most:
            book.unhold(lease.holds.pop())
            things += 1
        while lease.buffers and things < most:
            things += self._free_buffers(lease, lease.buffers.popitem()[1])
        return things

    def _release_keys(self, book: Book, lease: Lease, namespace: Namespace, keys: Sequence[BlockKey]) -> int:
        released = 0
        if lease.buffers:
            for key in keys:
                released += self._free_buffers(lease, lease.buffers.pop((namespace.namespace_id, key), []))
        slot_of, pins = book.index.slots(namespace.number).get, lease.pins
        pinned: list[int] = []
        held: list[int] = []
        for key in keys:
            slot = slot_of(key, NONE)
            if slot == NONE:
                continue
            # Only what lies in an arena is ever pinned.
            for number in (slot << TIER_BITS | _DEVICE, slot << TIER_BITS | _HOST):
                if number in pins:
                    del pins[number]
                    pinned.append(number)
            if slot in lease.holds:
                lease.holds.remove(slot)
                held.append(slot)
        book.unpin_all(pinned)
        for slot in held:
            book.unhold(slot)
        return released + len(pinned) + len(held)

    def _free_buffers(self, lease: Lease, ranges: list[tuple[int, int]]) -> int:
        if lease.owner.buffer is not None:
            for offset, nbytes in ranges:
                lease.owner.buffer.free(offset, nbytes)
        return len(ranges)
