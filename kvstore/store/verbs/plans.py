"""Reading plans: keys resolved once, slices read many times. The rights of a plan have one owner, and end here.

See ``kvstore.client.plan`` for what readers see, ``moves/reading.py`` for what reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvstore.cache import PlanKeys, PlanOpened, PlanPass
from kvstore.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from kvstore.core.namespace import PAGE_BITS, PAGE_BYTES, BlockLayout
from kvstore.core.types import Area, BlockKey, Codec, NamespaceId, Outcome, Place, PlanId, Reason
from kvstore.kernels.layout import align_up
from kvstore.kernels.plan_engine import CONTROL_BYTES, MISSING, SLOTS_MAX, Kind, PlanEnded, PlanFull, available
from kvstore.store.columns.index import NONE
from kvstore.store.moves.reading import Reading
from kvstore.store.tables import validate
from kvstore.store.tables.book import Book, copy_number
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.owners import Owner
from kvstore.store.tables.plans import PlanRight
from kvstore.store.tables.state import State, parts
from kvstore.store.tables.tenancy import Tenancy

IDLE_MS_MIN: Final = 1_000
PIECE_BYTES_MAX: Final = 1 << 30
PASSES_BLOCKS_MAX: Final = 1 << 20
"""Most blocks that one pass may name."""


class Plans:
    """The verbs of plans."""

    def __init__(self, state: State, tenancy: Tenancy, reading: Reading) -> None:
        self._state = state
        self._tenancy = tenancy
        self._reading = reading

    # -- the verbs -----------------------------------------------------------------------------------------------

    def open(  # noqa: PLR0913, PLR0917  the arguments of Cache.open_plan
        self,
        owner: Owner,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        layers: tuple[int, int] | None,
        piece_bytes: int,
        pieces: int,
        idle_ms: int,
    ) -> PlanOpened:
        """See ``Cache.open_plan``."""
        validate.check_keys(keys)
        _check_sizes(piece_bytes, pieces)
        longest = self._state.config.lease_ttl_ms_max
        if not IDLE_MS_MIN <= idle_ms <= longest:
            raise InvalidArgument("idle_ms", idle_ms, f"{IDLE_MS_MIN} to {longest}")
        if not available():
            raise Unavailable(MISSING)
        plan, kinds = self._claim(owner, namespace_id, layers, (piece_bytes, pieces), idle_ms / 1000)
        try:
            ring = self._ring(plan, kinds, pieces, piece_bytes)
            found = self._add(plan, keys)
        except BaseException:
            self.end(plan, Reason.NONE)
            raise
        finally:
            with self._state.locked() as book:
                self._tenancy.buffer_io_end(book, owner)
        return PlanOpened(plan.plan_id, ring, found)

    def extend(self, owner: Owner, plan_id: PlanId, keys: Sequence[BlockKey]) -> PlanKeys:
        """See ``Cache.extend_plan``."""
        validate.check_keys(keys)
        return self._add(self._touched(owner, plan_id), keys)

    def advance(
        self,
        owner: Owner,
        plan_id: PlanId,
        layers: tuple[int, int] | None,
        blocks: Sequence[int] | None,
        *,
        drop: bool,
    ) -> PlanPass:
        """See ``Cache.advance_plan``."""
        plan = self._touched(owner, plan_id)
        first, end = plan.layers
        begin, last = plan.layers if layers is None else layers
        if not first <= begin < last <= end:
            raise InvalidArgument("layers", f"{begin} to {last}", f"a range within {first} to {end}, the plan's")
        if blocks is not None:
            if len(blocks) > PASSES_BLOCKS_MAX:
                raise InvalidArgument("blocks", f"{len(blocks)} blocks", f"at most {PASSES_BLOCKS_MAX}")
            wrong = next((i for i, block in enumerate(blocks) if not plan.present(block)), None)
            if wrong is not None:
                raise InvalidArgument(f"blocks[{wrong}]", blocks[wrong], "the number of a key that was a HIT")
        engine = self._reading.engine
        try:
            if drop:
                engine.drop(plan.native)
            return PlanPass(*engine.begin(plan.native, (begin - first, last - first), blocks))
        except PlanFull as full:
            raise ResourceExhausted(
                f"passes of plan {plan_id} wait: {full}", field="passes", value="one more",
                expected="64 passes that wait, which name 1,048,576 blocks together; read some first",
            ) from full  # fmt: skip
        except PlanEnded:
            # Its reader finds why in the ring.
            return PlanPass(0, 0)

    def close(self, owner: Owner, plan_id: PlanId) -> bool:
        """See ``Cache.close_plan``."""
        with self._state.locked():
            owner.require_open()
            plan = self._state.owners.plans.get(plan_id)
        return plan is not None and plan.owner is owner and self.end(plan, Reason.NONE)

    def bell(self, owner: Owner) -> int:
        """See ``Cache.plan_bell``."""
        if not available():
            raise Unavailable(MISSING)
        with self._state.locked() as book:
            owner.require_open()
            return os.dup(_bell_of(book, owner))

    # -- ends ----------------------------------------------------------------------------------------------------

    def end(self, plan: PlanRight, reason: Reason) -> bool:
        """End a plan and give back all that it holds; False if another has done that."""
        state = self._state
        with state.locked():
            if plan.ended:
                return False
            plan.ended = True
            state.owners.take_plan(plan)
        if plan.native:
            self._reading.close(plan, reason)
        with state.locked() as book:
            if plan.owner.buffer is not None:
                plan.owner.buffer.free(*plan.ring)
            self._tenancy.buffer_io_end(book, plan.owner)
            book.counters.count("plans_ended")
        self._tenancy.end(plan.lease)
        return True

    def end_session(self, owner: Owner) -> None:
        """End the plans of a session that ends or has ended, and its bell."""
        with self._state.locked():
            plans = [self._state.owners.plans[number] for number in owner.plans]
        for plan in plans:
            self.end(plan, Reason.NONE)
        with self._state.locked():
            bell = owner.bell if owner.ended else -1
            if owner.ended:
                owner.bell = -1
        if bell >= 0:
            if owner.rings:
                self._reading.engine.remove_bell(bell)
            os.close(bell)

    def stop(self) -> None:
        """End all plans, and the threads that read for them."""
        with self._state.locked():
            plans = list(self._state.owners.plans.values())
        for plan in plans:
            self.end(plan, Reason.TIER_UNAVAILABLE)
        self._reading.stop()

    def tick(self) -> None:
        """End plans whose reader gave no sign for their time: a stopped process keeps no memory and no pins."""
        now = self._state.clock.now()
        with self._state.locked():
            plans = list(self._state.owners.plans.values())
        for plan in plans:
            if not plan.native:
                continue
            try:
                done = self._reading.engine.progress(plan.native)
            except PlanEnded:
                continue
            if done != plan.seen:
                plan.seen, plan.touched = done, now
            elif now - plan.touched >= plan.idle_s and self.end(plan, Reason.DEADLINE):
                with self._state.locked() as book:
                    book.counters.count("plans_expired")

    # -- inside --------------------------------------------------------------------------------------------------

    def _touched(self, owner: Owner, plan_id: PlanId) -> PlanRight:
        with self._state.locked():
            owner.require_open()
            plan = self._state.owners.plan(owner, plan_id)
            plan.touched = self._state.clock.now()
        return plan

    def _claim(
        self,
        owner: Owner,
        namespace_id: NamespaceId,
        layers: tuple[int, int] | None,
        sizes: tuple[int, int],
        idle_s: float,
    ) -> tuple[PlanRight, list[Kind]]:
        """A plan with its lease and its ring, which reads nothing yet, and how its blocks are cut."""
        state = self._state
        piece_bytes, pieces = sizes
        nbytes = CONTROL_BYTES + pieces * align_up(piece_bytes, PAGE_BYTES)
        with state.locked():
            namespace = owner.namespace(namespace_id)
            chosen = validate.check_layers(layers, namespace.layout.layers)
        kinds = _kinds(namespace, chosen)
        most = max(nbytes for kind in kinds for nbytes in kind.slice_bytes)
        if most > piece_bytes:
            raise InvalidArgument("piece_bytes", piece_bytes, f"at least {most}, the bytes of one slice")
        lease = self._tenancy.grant_untimed(owner, "reading plan")
        try:
            with state.locked() as book:
                state.owners.require_room("plans", owner.peer, state.config)
                if len(owner.plans) >= state.config.plans_a_session_max:
                    raise ResourceExhausted(
                        f"this session has {len(owner.plans)} plans open", field="plans", value=len(owner.plans) + 1,
                        expected=f"at most {state.config.plans_a_session_max}",
                    )  # fmt: skip
                ring = _allocate(book, owner, nbytes), nbytes
                number = PlanId(state.owners.next_id())
                plan = PlanRight(number, owner, namespace, lease, chosen, ring, idle_s, touched=state.clock.now())
                state.owners.add_plan(plan)
                # One for the plan and one for the call: the ring's memory stays though the session ends meanwhile.
                owner.buffer_io += 2
                book.counters.count("plans_opened")
        except BaseException:
            self._tenancy.end(lease)
            raise
        return plan, kinds

    def _ring(self, plan: PlanRight, kinds: list[Kind], pieces: int, piece_bytes: int) -> Place:
        owner, slot = plan.owner, align_up(piece_bytes, PAGE_BYTES)
        buffer = owner.buffer
        if buffer is None:
            raise Unavailable("the session has ended")
        engine = self._reading.engine
        with self._state.locked() as book:
            owner.require_open()
            if not owner.rings:
                engine.add_bell(_bell_of(book, owner))
                owner.rings = True
        offset = plan.ring[0]
        plan.native = engine.open(int(owner.session_id), buffer.view(*plan.ring), pieces, slot, kinds)
        self._reading.enter(plan)
        with self._state.locked():
            ended = plan.ended
        if ended:
            # Whoever ended it found no number to close.
            self._reading.close(plan, Reason.NONE)
            owner.require_open()
            raise Unavailable("the store is closing")
        return Place(Area.BUFFER, offset, slot, Codec.RAW, buffer.versions[offset >> PAGE_BITS])

    def _add(self, plan: PlanRight, keys: Sequence[BlockKey]) -> PlanKeys:
        """Pin keys and say where their blocks lie."""
        units = max(end - begin for begin, end in (plan.units_of(Codec.RAW), plan.units_of(plan.namespace.codec)))
        with plan.adding:
            return self._add_alone(plan, keys, units)

    def _add_alone(self, plan: PlanRight, keys: Sequence[BlockKey], units: int) -> PlanKeys:
        with self._state.locked():
            owners, config = self._state.owners, self._state.config
            owners.plan(plan.owner, plan.plan_id)
            owners.require_share("plan_units", plan.owner.peer, config, more=units * len(keys))
            present = sum(other.units for other in owners.plans.values())
            if present + units * len(keys) > config.plan_units_max:
                raise ResourceExhausted(
                    f"plans name {present} slices; the bound is store.plan_units_max", field="plan_units",
                    value=present + units * len(keys), expected=f"at most {config.plan_units_max}",
                )  # fmt: skip
            owners.count_units(plan, units * len(keys))
        first = plan.block_count()
        outcomes: list[Outcome] = []
        reasons: list[Reason] = []
        residency: list[int] = []
        for section in parts(keys):
            self._resolve(plan, section, (outcomes, reasons, residency))
        blocks = [first + i for i, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
        try:
            self._reading.engine.add_blocks(plan.native, len(keys))
            for block, reason in self._reading.locate(plan, blocks).items():
                outcomes[block - first], reasons[block - first] = Outcome.MISS, reason
                plan.slots[block] = NONE
        except PlanEnded:
            hits = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.HIT]
            for i in hits:
                outcomes[i], reasons[i] = Outcome.MISS, Reason.DROPPED
        return PlanKeys(tuple(outcomes), tuple(reasons), tuple(residency))

    def _resolve(
        self, plan: PlanRight, keys: Sequence[BlockKey], into: tuple[list[Outcome], list[Reason], list[int]]
    ) -> None:
        outcomes, reasons, residency = into
        state = self._state
        with state.locked() as book:
            index, pins = book.index, plan.lease.pins
            slot_of = index.slots(plan.namespace.number).get
            fresh: list[int] = []
            used: list[int] = []
            # What ends meanwhile gives pins back no more.
            over = plan.ended or plan.lease.ended
            for key in keys:
                slot = slot_of(key, NONE)
                bits = index.residency[slot] if slot >= 0 else 0
                tier = next((t for t in state.storages if bits & state.readable & t.bit), None)
                residency.append(bits)
                plan.slots.append(NONE if tier is None or over else slot)
                plan.tiers.append(0 if tier is None else int(tier))
                if tier is None or over:
                    outcomes.append(Outcome.MISS)
                    if bits:
                        reasons.append(Reason.TIER_UNAVAILABLE if bits & state.stored else Reason.NONE)
                    else:
                        reasons.append(state.why_absent(book, (plan.namespace.namespace_id, key)))
                    continue
                outcomes.append(Outcome.HIT)
                reasons.append(Reason.NONE)
                used.append(slot)
                number = copy_number(slot, tier)
                if number not in pins:
                    pins[number] = None
                    fresh.append(number)
            book.pin_all(fresh)
            book.use(used)
            book.counters.count("plan_blocks", len(used))


def _bell_of(_book: Book, owner: Owner) -> int:
    """The session's eventfd, made at the first call; it is closed when the session has ended."""
    if owner.bell < 0:
        owner.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    return owner.bell


def _kinds(namespace: Namespace, layers: tuple[int, int]) -> list[Kind]:
    """How blocks are cut, by ``PlanRight.kind_of``."""
    return [_kind(namespace.layout, layers, codec) for codec in (Codec.RAW, namespace.codec)]


def _kind(layout: BlockLayout, layers: tuple[int, int], codec: Codec) -> Kind:
    """How blocks under a codec are cut, for native code."""
    first, end = layers
    unit_bytes, stride, _ = layout.of_codec(codec)
    base = layout.units_before(codec, first)
    units = [layout.units_before(codec, layer) - base for layer in range(first, end + 1)]
    codecs = [layout.layer_codec(codec, layer) for layer in range(first, end)]
    whole = [layout.raw_slice_bytes if one is Codec.RAW else layout.slice_bytes for one in codecs]
    return Kind(units, whole, list(map(int, codecs)), unit_bytes, stride)


def _allocate(_book: Book, owner: Owner, nbytes: int) -> int:
    """The offset of a ring in the session's buffer."""
    buffer = owner.buffer
    if buffer is None:
        raise InvalidArgument("session", "without a buffer", "one on this host with a buffer, where pieces can land")
    offset = buffer.allocate(nbytes)
    if offset is None:
        free = buffer.capacity_bytes - buffer.used_bytes
        raise ResourceExhausted(
            f"a ring of {nbytes} bytes does not fit: {free} of the buffer's {buffer.capacity_bytes} bytes are free",
            field="piece_bytes",
            value=nbytes,
            expected=f"at most {free} in one range now",
        )
    return offset


def _check_sizes(piece_bytes: int, pieces: int) -> None:
    if not 1 <= pieces <= SLOTS_MAX:
        raise InvalidArgument("pieces", pieces, f"1 to {SLOTS_MAX}")
    if not PAGE_BYTES <= piece_bytes <= PIECE_BYTES_MAX:
        raise InvalidArgument("piece_bytes", piece_bytes, f"{PAGE_BYTES} to {PIECE_BYTES_MAX}")
