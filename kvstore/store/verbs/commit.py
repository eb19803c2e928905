"""One commit: claim (check all, take the reservations, in one step), prepare, copy (without the lock), publish.

A block is visible from its publishing on, parents first. Preparing and publishing go in sections of ``SECTION`` blocks,
so that others come between those of a long commit; one of fewer blocks prepares with its claim and publishes in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from kvstore.cache import CommitEntry, CommitResult
from kvstore.core.errors import InvalidArgument
from kvstore.core.transfers import BUFFER, edge
from kvstore.core.types import (
    ROOT_PARENT,
    Area,
    BlockKey,
    Busy,
    Codec,
    LeaseId,
    Outcome,
    Place,
    Reason,
    Tier,
    WritePolicy,
)  # fmt: skip
from kvstore.store.columns.index import NONE, TIER_BITS, closes_circle
from kvstore.store.columns.lifecycle import Copy, CopyState, Event
from kvstore.store.moves import copies, shrink
from kvstore.store.moves.move import Movement
from kvstore.store.moves.raw_copies import RawBlock, store_raw
from kvstore.store.tables.asked import count_put
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.owners import Lease, Owner, Reservation
from kvstore.store.tables.places import place_of
from kvstore.store.tables.state import SECTION, parts
from kvstore.store.tables.tenancy import Tenancy

_ON_SSD: Final = Tier.SSD.bit
_ON_DEVICE: Final = Tier.DEVICE.bit
_IN_MEMORY: Final = Tier.DEVICE.bit | Tier.HOST.bit


@dataclass(slots=True)
class _Entry:
    """One block on its way. ``copy`` is the one that becomes visible: the DEVICE place itself, or a range of HOST."""

    key: BlockKey
    parent: BlockKey
    reservation: Reservation
    copy: Copy
    codec: Codec
    outcome: Outcome = Outcome.PENDING
    reason: Reason = Reason.NONE
    needed: bool = False
    """Whether it had no copy where it goes when it was prepared: only then its bytes are copied."""
    existed: bool = False
    slot: int = NONE
    place: Place | None = None
    copied: bool = False
    device_codec: Codec = Codec.RAW

    def refuse(self, reason: Reason, outcome: Outcome = Outcome.MISS) -> None:
        self.outcome, self.reason = outcome, reason


_ANSWER: Final = attrgetter("outcome", "reason", "existed", "place")


class Commit:
    """The state of one call of ``Put.commit``."""

    def __init__(
        self,
        movement: Movement,
        tenancy: Tenancy,
        namespace: Namespace,
        entries: Sequence[CommitEntry],
        token_ids: Sequence[int],
        queue: Callable[[Book, Sequence[int]], None] | None,
    ) -> None:
        self._movement = movement
        self._state = movement.state
        self._tenancy = tenancy
        self._namespace = namespace
        self._given = entries
        self._tokens = token_ids
        self._queue = queue
        """Takes blocks that are to be written to SSD later. Without it the caller writes them itself: then
        their slots are kept until ``release``."""
        self._reservations: list[Reservation] = []
        self._entries: list[_Entry] = []
        self._depths: dict[BlockKey, int] = {}
        self._last_child: dict[BlockKey, int] = {}
        """Of a commit of many sections: by parent, the position of its last child."""
        self.slots: list[int] = []
        """Of the blocks that are resident now."""
        self._published = 0
        self._used = False
        self._held: list[int] = []
        self._lease: Lease | None = None
        self._busy: Busy | None = None

    def claim(self, book: Book, owner: Owner, lease_id: LeaseId | None) -> None:
        """Check everything, then take the reservations off the tables. Raises before it changes anything."""
        owners, namespace = self._state.owners, self._namespace
        known, found = owners.reservations, self._reservations
        self._slot_of = book.index.slots(namespace.number).get
        for i, entry in enumerate(self._given):
            reservation = known.get(entry.reservation_id)
            if reservation is None or reservation.owner is not owner:
                reservation = owners.reservation(owner, entry.reservation_id)
            if reservation.namespace is not namespace:
                raise InvalidArgument(f"reservation_ids[{i}]", entry.reservation_id, "a reservation of this namespace")
            if reservation.key is not None and reservation.key != entry.key:
                raise InvalidArgument(f"keys[{i}]", entry.key.hex(), "the key that was reserved")
            found.append(reservation)
        if lease_id is not None:
            self._lease = self._tenancy.lease(book, owner, lease_id)
        owners.take_reservations(owner, found)
        owner.buffer_io += 1
        self._owner = owner

    def prepare(self, book: Book) -> bool:
        """Find what has to be copied, and room for it, for the next blocks; True if some are left."""
        begin = len(self._entries)
        for given, reservation in zip(
            self._given[begin : begin + SECTION], self._reservations[begin : begin + SECTION], strict=True
        ):
            self._entries.append(self._prepare_one(book, given, reservation))
        raw: list[Copy] = []
        sizes: list[int] = []
        for entry in self._entries[begin:]:
            if entry.needed and entry.copy.tier is Tier.HOST and entry.codec is Codec.RAW:
                raw.append(entry.copy)
                sizes.append(entry.copy.nbytes)
        if raw and self._owner.buffer is not None:
            # At once where nothing has to be demoted for it.
            for copy, offset in zip(raw, self._movement.space.allocate_all(book, Tier.HOST, sizes), strict=True):
                copy.place = NONE if offset is None else offset
        return len(self._entries) < len(self._given)

    def _prepare_one(self, book: Book, given: CommitEntry, reservation: Reservation) -> _Entry:
        depths, root = self._depths, given.parent == ROOT_PARENT
        parent = NONE if root else self._resident(book, given.parent)
        depth = 0 if root else 1 + depths.get(given.parent, book.index.depth[parent] if parent != NONE else 0)
        entry = self._entry(given, reservation, depth)
        if parent != NONE:
            # So that the parent is still here when its child is published.
            book.hold(parent)
            self._held.append(parent)
        elif not root and given.parent not in depths:
            entry.refuse(Reason.PARENT_MISSING)
        depths[given.key] = depth
        if self._state.draining and entry.outcome is Outcome.PENDING:
            entry.refuse(Reason.DRAINING)
        if entry.outcome is Outcome.PENDING:
            slot = self._resident(book, given.key)
            enough = _ON_DEVICE if entry.copy.tier is Tier.DEVICE else _IN_MEMORY
            entry.needed = slot == NONE or not book.index.residency[slot] & enough
        return entry

    def _resident(self, book: Book, key: BlockKey) -> int:
        """``Book.resident`` in the commit's namespace, in one call."""
        slot = self._slot_of(key, NONE)
        return slot if slot != NONE and book.index.residency[slot] else NONE

    def _entry(self, given: CommitEntry, reservation: Reservation, depth: int) -> _Entry:
        codec = self._namespace.codec_at(depth)
        if reservation.area is Area.DEVICE:
            return _Entry(given.key, given.parent, reservation, reservation.copy, codec, copied=True)
        reservation.copy.advance(Event.FILL)
        if reservation.device is not None:
            return _Entry(given.key, given.parent, reservation, reservation.device, codec)
        copy = Copy(Tier.HOST, self._namespace.bytes_in(Tier.HOST, codec))
        copy.advance(Event.FILL)
        return _Entry(given.key, given.parent, reservation, copy, codec)

    def copy(self) -> None:
        """Copy out of the buffer: to DEVICE, or to HOST with checksums; encode on DEVICE. Without the lock."""
        if len(self._given) > SECTION:
            self._last_child = {entry.parent: position for position, entry in enumerate(self._entries)}
        began = self._state.transfers.now()
        device: list[_Entry] = []
        raw: list[_Entry] = []
        blocks: list[RawBlock] = []
        for entry in self._entries:
            if not entry.needed:
                continue
            if entry.copy.tier is Tier.DEVICE:
                device.append(entry)
            elif (entry.codec is Codec.RAW or not self._encode(entry)) and (
                entry.copy.place != NONE or self._take(entry)
            ):
                raw.append(entry)
                blocks.append(RawBlock(entry.key, entry.parent, self._slices(entry), self._stored(entry)))
        if device:
            self._fill_device(device)
        store_raw(self._namespace, blocks)
        for entry in raw:
            entry.copied = True
        self._count_copied(began)

    def _count_copied(self, began: float) -> None:
        """One batch a tier; a client reserves for one at a time, so mostly there is one."""
        sizes: dict[Tier, list[int]] = {}
        for entry in self._entries:
            if entry.needed and entry.copied and entry.reservation.area is Area.BUFFER:
                sizes.setdefault(entry.copy.tier, []).append(entry.copy.nbytes)
        for tier, found in sizes.items():
            self._state.transfers.count(edge(BUFFER, tier), began, len(found), sum(found))

    def _fill_device(self, entries: list[_Entry]) -> None:
        """Copy from the buffer to the places in DEVICE that are kept for the blocks, and encode there if wanted."""
        device, layout = self._movement.device, self._namespace.layout
        for entry in entries:
            if entry.reservation.device is not None and device is not None:
                device.write(entry.copy.place, self._slices(entry)[: layout.units_bytes(Codec.RAW)])
                entry.copied = True
        if self._namespace.policy.device_codec != "raw":
            for entry in entries:
                if entry.codec is not Codec.RAW:
                    self._shrink(entry)

    def _shrink(self, entry: _Entry) -> None:
        coded = shrink.encode(self._movement, self._namespace, entry.copy.place)
        if coded is not None:
            # Not to be published if the writing fails.
            entry.copied = False
            shrink.replace(self._movement, self._namespace, entry.copy, coded)
            entry.copied, entry.device_codec = True, entry.codec

    def _slices(self, entry: _Entry) -> memoryview:
        layout, buffer = self._namespace.layout, self._owner.buffer
        if buffer is None:
            raise RuntimeError("a buffer is kept while something is copied out of it")
        return buffer.view(entry.reservation.copy.place, layout.layers * layout.raw_slice_stride)

    def _stored(self, entry: _Entry) -> memoryview:
        return self._state.arenas[Tier.HOST].view(entry.copy.place, entry.copy.nbytes)

    def _encode(self, entry: _Entry) -> bool:
        """Copy one block under its codec. False if it has values that the codec can not hold: it is to stay raw."""
        if not self._take(entry):
            return True
        names = (entry.key, entry.parent)
        if copies.store_encoded(self._namespace, names, entry.codec, self._slices(entry), self._stored(entry)):
            entry.copied = True
            return True
        self._state.arenas[Tier.HOST].free(entry.copy.place, entry.copy.nbytes)
        # Raw it needs a larger range.
        entry.codec, entry.copy.place = Codec.RAW, NONE
        entry.copy.nbytes = self._namespace.layout.raw_stored_bytes
        return False

    def _take(self, entry: _Entry) -> bool:
        offset = self._movement.take(Tier.HOST, entry.copy.nbytes)
        if offset is None:
            # No refusal yet: the block may be resident elsewhere when it comes to publishing.
            with self._state.locked() as book:
                self._busy = self._movement.space.busy(book, Tier.HOST, entry.copy.nbytes)
            return False
        entry.copy.place = offset
        return True

    def publish(self, book: Book) -> bool:
        """Make the next blocks visible, or give their places back; True if something is left."""
        tokens = self._namespace.spec.block_tokens
        begin = self._published
        end = self._published = min(begin + SECTION, len(self._entries))
        part = self._entries[begin:end]
        slots: list[int] = []
        unwritten: list[int] = []
        residency = book.index.residency
        for i, entry in enumerate(part, begin):
            if entry.outcome is Outcome.PENDING:
                name = self._namespace.namespace_id, entry.key
                if self._tokens:
                    book.news.token_ids[name] = self._tokens[i * tokens : (i + 1) * tokens]
                if self._publish_one(book, entry):
                    slots.append(entry.slot)
                    if not residency[entry.slot] & _ON_SSD:
                        unwritten.append(entry.slot)
                if self._tokens and entry.reason is not Reason.NONE:
                    del book.news.token_ids[name]  # It was refused: no event will tell of it.
            self._give_back(book, entry)
            if self._lease is not None:
                self._pin(book, entry, self._lease)
        count_put(book.counters, self._namespace, part)
        self.slots += slots
        if self._queue is None:
            for slot in slots:
                book.ref(slot)
        elif self._namespace.policy.write is WritePolicy.THROUGH:
            self._queue(book, unwritten)
        if end < len(self._entries):
            self._keep_parents(book, part, end)
            return True
        if not self._used:
            book.use(self.slots)
            self._used = True
        for _ in range(min(SECTION, len(self._held))):
            book.unhold(self._held.pop())
        if self._held:
            return True
        self._tenancy.buffer_io_end(book, self._owner)
        return False

    def _keep_parents(self, book: Book, part: Sequence[_Entry], end: int) -> None:
        """Blocks that were published now stay for those of their children that come in a later section."""
        for entry in part:
            if entry.outcome is Outcome.HIT and self._last_child.get(entry.key, NONE) >= end:
                book.hold(entry.slot)
                self._held.append(entry.slot)

    def release(self) -> None:
        """Let go of the slots that were kept for the caller, who is done with them."""
        for part in parts(self.slots):
            with self._state.locked() as book:
                for slot in part:
                    book.unref(slot)

    def _publish_one(self, book: Book, entry: _Entry) -> bool:
        """True if the block is resident now."""
        parent = NONE if entry.parent == ROOT_PARENT else self._resident(book, entry.parent)
        if parent == NONE and entry.parent != ROOT_PARENT:
            entry.refuse(Reason.PARENT_MISSING)
            return False
        slot = self._resident(book, entry.key)
        entry.existed = slot != NONE
        ghost = NONE if entry.existed else self._slot_of(entry.key, NONE)
        if ghost != NONE and closes_circle(book.index, ghost, parent):
            entry.refuse(Reason.PARENT_MISSING)
            return False
        ready = entry.copied
        if not entry.existed:
            if not ready:
                # HOST had no room; or the block was resident when its copy was spared, and went meanwhile.
                full = self._busy is not None
                entry.refuse(Reason.NO_SPACE if full else Reason.EVICTED, Outcome.BUSY if full else Outcome.MISS)
                return False
            slot = book.block(entry.key, parent, self._namespace, entry.codec)
        entry.outcome, entry.slot = Outcome.HIT, slot
        tier, known = entry.copy.tier, book.codec(slot)
        # On DEVICE a block is raw, or as it is below.
        same_codec = entry.device_codec in (known, Codec.RAW) if tier is Tier.DEVICE else known is entry.codec
        absent = not book.index.residency[slot] >> (tier - 1) & 1 and slot << TIER_BITS | tier not in book.fills
        if ready and same_codec and absent:
            if tier is Tier.DEVICE:
                book.set_codecs(slot, known, entry.device_codec)
            book.set_ready(slot, entry.copy)
        return True

    def _give_back(self, book: Book, entry: _Entry) -> None:
        """Free what did not become a copy: the buffer's range always, the other one if it is not READY."""
        copy, reservation = entry.copy, entry.reservation
        ready = copy.state is CopyState.READY
        if copy.tier is Tier.DEVICE:
            if not ready:
                copy.advance(Event.ABORT)
            self._tenancy.free_device(book, reservation, kept=ready)
        elif not ready:
            copy.advance(Event.FAIL)
            if copy.place != NONE:
                self._state.arenas[Tier.HOST].free(copy.place, copy.nbytes)
        if reservation.area is Area.DEVICE:
            return
        reservation.copy.advance(Event.FAIL)
        if reservation.standing and not reservation.owner.ended:
            reservation.copy.advance(Event.RESERVE)
            self._state.owners.add_reservation(reservation)
        else:
            self._tenancy.free_buffer(book, reservation)

    def _pin(self, book: Book, entry: _Entry, lease: Lease) -> None:
        if entry.outcome is not Outcome.HIT or lease.ended:
            return
        tier = next((t for t in (Tier.DEVICE, Tier.HOST) if book.has(entry.slot, t)), None)
        if tier is None:
            return
        number = copy_number(entry.slot, tier)
        if number not in lease.pins:
            lease.pins[number] = None
            book.pin(entry.slot, tier)
        entry.place = place_of(book, entry.slot, tier)

    def result(self, failures: Mapping[int, Reason]) -> CommitResult:
        """The answer. A block in ``failures`` is in memory, but not durable as was asked: MISS with the reason."""
        for entry in self._entries:
            if entry.outcome is Outcome.HIT and entry.slot in failures:
                entry.refuse(failures[entry.slot])
        columns = tuple(zip(*map(_ANSWER, self._entries), strict=True)) or ((),) * 4
        outcomes, reasons, existed, places = columns
        busy = self._busy if Outcome.BUSY in outcomes else None
        return CommitResult(outcomes, reasons, existed, places if self._lease is not None else (), busy)
