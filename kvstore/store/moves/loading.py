"""What a job of fetch or prefetch does: move blocks chunk by chunk, pin each chunk at once, answer for each key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.cache import FetchResult
from kvstore.core.namespace import PAGE_BITS
from kvstore.core.transfers import BUFFER, edge
from kvstore.core.types import Area, BlockKey, Busy, Codec, JobId, Outcome, Place, Reason, Target, Tier
from kvstore.store.moves import copies
from kvstore.store.moves.move import Failures
from kvstore.store.moves.promote import Promoter
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.owners import Lease, Owner
from kvstore.store.tables.places import place_of
from kvstore.store.tables.state import State, parts
from kvstore.tiers.base import Arena, BlockRead, DiskHandle, ReadStatus

CHUNK_BLOCKS: Final = 64
"""Blocks moved together and then pinned, before later ones can push them out."""

TRIES_MAX: Final = 3

NO_JOB: Final = JobId(0)


class Load:
    """One call of fetch or prefetch: its keys and, for each, the answer so far. Without a lease nothing is pinned."""

    def __init__(
        self,
        owner: Owner,
        namespace: Namespace,
        keys: tuple[BlockKey, ...],
        target: Target,
        lease: Lease | None,
        layers: tuple[int, int],
    ) -> None:
        self.owner = owner
        self.namespace = namespace
        self.keys = keys
        self.target = target
        self.lease = lease
        self.layers = layers
        self.slots = [-1] * len(keys)
        self.moving: list[int] = []
        """Positions whose bytes have to move."""
        self.begun = self.over = False
        """Whether a mover has begun with it, and whether its answer is final."""
        self.busy: Busy | None = None
        self._outcomes = [Outcome.PENDING] * len(keys)
        self._reasons = [Reason.NONE] * len(keys)
        self._places: list[Place | None] = [None] * len(keys)

    def settle(self, position: int, outcome: Outcome, reason: Reason = Reason.NONE, place: Place | None = None) -> None:
        """Set the answer of one key."""
        self._outcomes[position], self._reasons[position], self._places[position] = outcome, reason, place

    def settle_hits(self, positions: list[int], places: list[Place]) -> None:
        """Set the answer of many keys to HIT, with their places; none for those of a load without a lease."""
        if len(positions) == len(self.keys):
            self._outcomes = [Outcome.HIT] * len(positions)
            self._places[: len(places)] = places
            return
        for position in positions:
            self._outcomes[position] = Outcome.HIT
        for position, place in zip(positions, places, strict=False):
            self._places[position] = place

    def pending(self, position: int) -> bool:
        """Whether the key has no final answer yet."""
        return self._outcomes[position] is Outcome.PENDING

    def result(self, job_id: JobId = NO_JOB) -> FetchResult:
        """The answer so far."""
        return FetchResult(tuple(self._outcomes), tuple(self._reasons), tuple(self._places), job_id, self.busy)


class Loading:
    """Runs loads."""

    def __init__(self, state: State, promoter: Promoter) -> None:
        self._state = state
        self._promoter = promoter
        # A GPU's memory has no bytes for the CPU: its blocks go to HOST first.
        on_gpu = promoter.device is not None and promoter.device.kind != "memfd"
        memory = (Tier.HOST,) if on_gpu else (Tier.HOST, Tier.DEVICE)
        self._sources = (*memory, *state.storages)

    def pin(self, book: Book, load: Load, position: int) -> bool:
        """Pin a block where the target allows it to lie; False if bytes have to move first."""
        slot, lease = load.slots[position], load.lease
        residency = book.index.residency[slot]
        for tier in _WANTED[load.target]:
            if residency & tier.bit:
                break
        else:
            return False
        if lease is None:
            load.settle(position, Outcome.HIT)
            return True
        number = copy_number(slot, tier)
        if number not in lease.pins:
            lease.pins[number] = None
            book.pin(slot, tier)
        load.settle(position, Outcome.HIT, Reason.NONE, place_of(book, slot, tier, load.layers[0]))
        return True

    def task(self, load: Load, finish: Callable[[Book], None]) -> Callable[[], None]:
        """The work of a load for a mover. ``finish`` is called once at its end, lock held, whatever happens."""

        def run() -> None:
            with self._state.locked():
                if load.over:
                    return
                load.begun = True
            try:
                for begin in range(0, len(load.moving), CHUNK_BLOCKS):
                    if not self._abandoned(load):
                        self._move(load, load.moving[begin : begin + CHUNK_BLOCKS])
            finally:
                self._end(load, finish)

        return run

    def cancel(self, load: Load, finish: Callable[[Book], None]) -> None:
        """End a load that nobody can use any more, if it has not begun: else it ends after its next step. Called with
        the lock held; what the load holds is given back after the section."""
        if not load.begun and not load.over:
            load.over = True
            self._state.afterwards(lambda: self._end(load, finish))

    def _end(self, load: Load, finish: Callable[[Book], None]) -> None:
        """Settle what is pending and let go of the blocks that were held, in sections that others can come between."""
        load.over = True
        for part in parts(load.moving):
            with self._state.locked() as book:
                for position in part:
                    if load.pending(position):
                        load.settle(position, Outcome.MISS, Reason.DROPPED)
                    book.unhold(load.slots[position])
        with self._state.locked() as book:
            finish(book)

    def _abandoned(self, load: Load) -> bool:
        """Whether nobody can use the rest: the session or the lease has ended."""
        return load.owner.ended or (load.lease is not None and load.lease.ended)

    def _move(self, load: Load, positions: list[int]) -> None:
        if load.target is Target.BUFFER:
            self._to_buffer(load, positions)
            return
        left = positions
        failures: Failures = {}
        # A copy may be dropped for space between its making and its pinning: then it is made again.
        for _ in range(TRIES_MAX):
            slots = [load.slots[p] for p in left]
            to_tier = self._promoter.to_device if load.target is Target.DEVICE else self._promoter.to_host
            failures = to_tier(slots)
            with self._state.locked() as book:
                if self._abandoned(load):
                    return
                left = [p for p in left if load.slots[p] not in failures and not self.pin(book, load, p)] + [
                    p for p in left if load.slots[p] in failures
                ]
                self._settle_failures(book, load, left, failures)
                left = [p for p in left if load.pending(p)]
            if not left:
                return
        with self._state.locked() as book:
            self._settle_failures(book, load, left, dict.fromkeys((load.slots[p] for p in left), Reason.NO_SPACE))

    def _settle_failures(self, book: Book, load: Load, positions: list[int], failures: Failures) -> None:
        tier = Tier.DEVICE if load.target is Target.DEVICE else Tier.HOST
        for position in positions:
            reason = failures.get(load.slots[position])
            if reason is Reason.NO_SPACE:
                nbytes = book.nbytes(load.slots[position], tier)
                arena = self._state.arenas[tier]
                evictable = max(book.bytes[tier] - book.pinned_bytes(tier), 0)
                load.busy = Busy(tier, nbytes, arena.capacity_bytes - arena.used_bytes, evictable)
                load.settle(position, Outcome.BUSY, reason)
            elif reason is not None:
                load.settle(position, Outcome.MISS, reason)

    # -- into the session's buffer -------------------------------------------------------------------------------

    def _to_buffer(self, load: Load, positions: list[int]) -> None:
        """Copy slices into the session's buffer. The ranges belong to this job until it hands them to the lease."""
        landing: list[_Landing] = []
        if Tier.DEVICE not in self._sources:
            self._promoter.to_host(self._only_on_device(load, positions))
        try:
            with self._state.locked() as book:
                for position in positions:
                    self._claim_landing(book, load, position, landing)
            self._copy_landings(load, landing)
            for tier in self._state.storages:
                self._read_landings(load, tier, [one for one in landing if one.source is tier])
        finally:
            with self._state.locked() as book:
                for one in landing:
                    self._end_landing(book, load, one)
                self._state.changed.notify_all()

    def _only_on_device(self, load: Load, positions: list[int]) -> list[int]:
        with self._state.locked() as book:
            slots = [load.slots[position] for position in positions]
            return [slot for slot in slots if book.index.residency[slot] == Tier.DEVICE.bit]

    def _claim_landing(self, book: Book, load: Load, position: int, landing: list[_Landing]) -> None:
        slot = load.slots[position]
        usable = book.index.residency[slot] & self._state.readable
        source = next((t for t in self._sources if usable & t.bit), None)
        if source is None:
            resident = book.index.residency[slot]
            gone = Reason.TIER_UNAVAILABLE if resident else book.tombstones.reason(book.name(slot))
            load.settle(position, Outcome.MISS, gone)
            return
        codec = book.device_codec(slot) if source is Tier.DEVICE else book.codec(slot)
        size, stride, _ = load.namespace.layout.of_codec(codec)
        units = load.namespace.layout.unit_range(codec, load.layers)
        nbytes = (units[1] - units[0]) * stride
        buffer = load.owner.buffer
        offset = buffer.allocate(nbytes) if buffer is not None else None
        if offset is None or buffer is None:
            free = buffer.capacity_bytes - buffer.used_bytes if buffer is not None else 0
            load.busy = Busy(Tier.HOST, nbytes, free, 0)
            load.settle(position, Outcome.BUSY, Reason.NO_SPACE)
            return
        place = book.index.offset(slot, source) if source in self._state.arenas else book.index.place[source][slot]
        book.io_begin(slot, source)
        landing.append(_Landing(position, source, place, codec, (size, stride), units, buffer, (offset, nbytes)))

    def _copy_landings(self, load: Load, landing: list[_Landing]) -> None:
        layout = load.namespace.layout
        for one in landing:
            if one.source in self._state.storages:
                continue
            (size, stride), (first, end) = one.lengths, one.units
            head = layout.header_bytes if one.source is Tier.HOST else 0
            began = self._state.transfers.now()
            source = self._state.arenas[one.source].view(one.place + head + first * stride, (end - first) * stride)
            copies.copy_slices(source, one.buffer.view(*one.range), end - first, size, (stride, stride))
            one.well = True
            self._state.transfers.count(edge(one.source, BUFFER), began, 1, one.range[1])

    def _read_landings(self, load: Load, tier: Tier, landing: list[_Landing]) -> None:
        if not landing:
            return
        disk = self._state.storages[tier]
        reads = [
            BlockRead(
                DiskHandle(one.place), load.keys[one.position], one.buffer.view(*one.range), one.units,
                load.namespace.namespace_id,
            )
            for one in landing
        ]  # fmt: skip
        ready, began = disk.state.ready, self._state.transfers.now()
        for one, status in zip(landing, disk.read(reads), strict=True):
            if status is ReadStatus.OK:
                one.well = True
            else:
                slot = load.slots[one.position]
                one.reason = self._promoter.failed_read(slot, (tier, one.place), status, ready=ready)
        arrived = [one.range[1] for one in landing if one.well]
        failed = len(landing) - len(arrived)
        self._state.transfers.count(edge(tier, BUFFER), began, len(arrived), sum(arrived), failed)

    def _end_landing(self, book: Book, load: Load, one: _Landing) -> None:
        """The I/O has ended: the range goes to the lease, or back if there is no use for it."""
        slot, lease = load.slots[one.position], load.lease
        book.io_end(slot, one.source)
        if not one.well or lease is None or lease.ended:
            one.buffer.free(*one.range)
            if not one.well:
                load.settle(one.position, Outcome.MISS, one.reason)
            return
        name = load.namespace.namespace_id, load.keys[one.position]
        lease.buffers.setdefault(name, []).append(one.range)
        begin = one.range[0]
        place = Place(Area.BUFFER, begin, one.lengths[1], one.codec, one.buffer.versions[begin >> PAGE_BITS])
        load.settle(one.position, Outcome.HIT, Reason.NONE, place)


@dataclass(slots=True)
class _Landing:
    """One block on its way into a buffer. ``lengths`` are unit bytes and stride, ``range`` offset and bytes."""

    position: int
    source: Tier
    place: int
    codec: Codec
    lengths: tuple[int, int]
    units: tuple[int, int]
    buffer: Arena
    range: tuple[int, int]
    well: bool = False
    reason: Reason = Reason.DROPPED


_WANTED: Final[dict[Target, tuple[Tier, ...]]] = {
    Target.IN_PLACE: (Tier.DEVICE, Tier.HOST),
    Target.DEVICE: (Tier.DEVICE,),
    Target.HOST: (Tier.HOST,),
    Target.BUFFER: (),
}
