"""What reads for plans: the native engine, and a thread that settles what native code can not.

That thread sleeps but for these: a file was given to others (its blocks are located again), a read failed (the disk is
asked what is wrong, which sets a corrupt block aside, and the plan ends with the block named), a tier has no files (its
slices are read with ``DiskTier.read``). Nothing here is done for a block while a plan advances.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.types import Codec, Reason, Tier
from kvstore.kernels.plan_engine import NO_BLOCK, Columns, Event, EventKind, PlanEnded, PlanEngine
from kvstore.store.columns.index import NONE
from kvstore.store.tables.plans import PlanRight
from kvstore.store.tables.state import State, parts
from kvstore.tiers.base import BlockRead, DiskHandle, HeldFile, Located, ReadStatus

if TYPE_CHECKING:
    from kvstore.store.moves.promote import Promoter

log = logging.getLogger(__name__)

TRIES_MAX: Final = 3
"""Times that a block's read may fail natively though the disk finds nothing wrong, before its plan ends."""
FILL_BLOCKS: Final = 64
"""Slices that are read from a tier without files in one call."""
JOIN_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 1.0
"""How often is looked for files that were given up, while there are plans."""

Misses = dict[int, Reason]
"""Blocks of a plan that can not be read, and why."""


class Reading:
    """The engine of one store, made when the first plan is opened. ``_lock`` guards its making and ``_by_native``."""

    def __init__(self, state: State, promoter: Promoter) -> None:
        self._promoter = promoter
        self._state = state
        self._lock = threading.Lock()
        self._made: PlanEngine | None = None
        self._thread: threading.Thread | None = None
        self._by_native: dict[int, PlanRight] = {}
        self._stopping = threading.Event()

    @property
    def engine(self) -> PlanEngine:
        """The engine; its threads begin with the first that asks."""
        with self._lock:
            if self._made is None:
                config = self._state.config
                self._made = PlanEngine(config.plan_threads, config.plan_io_bytes)
                self._thread = threading.Thread(target=self._run, name="kvstore-plans", daemon=True)
                self._thread.start()
                # A process may end without closing its store: no thread is in native code then.
                weakref.finalize(self, _stop, self._made, self._thread, self._stopping)
            return self._made

    def enter(self, plan: PlanRight) -> None:
        """A plan has its number in native code."""
        with self._lock:
            self._by_native[plan.native] = plan

    def close(self, plan: PlanRight, reason: Reason) -> None:
        """End it natively: its ring is not written when this returns. Files stay until no read is under way."""
        try:
            drained = self.engine.close(plan.native, int(reason))
        except PlanEnded:
            drained = True
        if drained:
            self._drained(plan)

    def _drained(self, plan: PlanRight) -> None:
        with self._lock:
            self._by_native.pop(plan.native, None)
            files, plan.files, plan.drained = plan.files, [], True
        for file in files:
            file.release()
        plan.retired.clear()

    def _keep(self, plan: PlanRight, files: list[HeldFile]) -> None:
        """They are the plan's to release; at once if it is over."""
        with self._lock:
            if not plan.drained:
                plan.files += files
                return
        for file in files:
            file.release()

    def stop(self) -> None:
        """End the threads, and with them whatever plans there are. Idempotent."""
        with self._lock:
            engine, thread = self._made, self._thread
        if engine is not None and thread is not None:
            _stop(engine, thread, self._stopping)

    # -- where blocks lie ----------------------------------------------------------------------------------------

    def locate(self, plan: PlanRight, blocks: Sequence[int]) -> Misses:
        """Tell native code where blocks of a plan lie, for the first time or anew; those that are no more there."""
        misses: Misses = {}
        known = []
        for section in parts(blocks):
            with self._state.locked() as book:
                for block in section:
                    slot, tier = plan.slots[block], plan.tier(block)
                    if slot == NONE or not book.has(slot, tier):
                        misses[block] = Reason.DROPPED if slot == NONE else Reason.EVICTED
                        continue
                    codec = book.codec(slot)
                    known.append((tier, codec, block, DiskHandle(book.index.place[tier][slot]), book.name(slot)))
        known.sort(key=lambda one: one[:2])
        for (tier, codec), group in groupby(known, key=lambda one: one[:2]):
            rows = list(group)
            numbers = [block for _, _, block, _, _ in rows]
            found = self._state.storages[tier].locate([(h, name) for *_, h, name in rows], plan.units_of(codec))
            try:
                if found is not None:
                    misses |= self._missing(plan, tier, rows, found.status)
                self._set(plan, numbers, plan.kind_of(codec), found, misses)
            finally:
                if found is not None:
                    self._keep(plan, found.files)
        return misses

    def _missing(
        self,
        plan: PlanRight,
        tier: Tier,
        rows: Sequence[tuple[object, object, int, DiskHandle, object]],
        status: Sequence[ReadStatus],
    ) -> Misses:
        ready = self._state.storages[tier].state.ready
        return {
            block: self._promoter.failed_read(plan.slots[block], (tier, handle), outcome, ready=ready)
            for (_, _, block, handle, _), outcome in zip(rows, status, strict=True)
            if outcome is not ReadStatus.OK
        }

    def _set(self, plan: PlanRight, numbers: Sequence[int], kind: int, found: Located | None, misses: Misses) -> None:
        blocks = np.array(numbers, np.uint32)
        if found is None:
            count = len(blocks)
            none = np.zeros((count, 0), np.uint32)
            files, file, planes = (), np.full(count, -1, np.int32), np.zeros(count, np.uint8)
            columns = Columns(blocks, kind, files, file, planes, none.astype(np.uint64), none, none)
        else:
            good: NDArray[np.intp] = np.flatnonzero([number not in misses for number in numbers])
            named = [(file.fd, file.version, file.seen) for file in found.files]
            columns = Columns(
                blocks[good], kind, named, found.file[good], found.planes[good], found.offsets[good],
                found.lengths[good], found.crcs[good],
            )  # fmt: skip
        if len(columns.blocks):
            self.engine.set_blocks(plan.native, columns)

    def relocate(self, plan: PlanRight, blocks: Iterable[int]) -> Misses:
        """Locate blocks again, and let go of the files that they moved out of."""
        misses = self.locate(plan, list(blocks))
        with self._lock:
            stale = [file for file in plan.files if file.stale]
            plan.files = [file for file in plan.files if not file.stale]
        for file in stale:
            file.release()
        plan.retired += stale
        return misses

    def _end_if(self, plan: PlanRight, misses: Misses) -> bool:
        for block, reason in misses.items():
            self.fail(plan, reason, block)
            return True
        return False

    def fail(self, plan: PlanRight, reason: Reason, block: int = NO_BLOCK) -> None:
        """Tell the reader that its plan is over, and why; its rights are given back when it closes it, or in time."""
        key = ""
        if block != NO_BLOCK and plan.present(block):
            with self._state.locked() as book:
                key = book.index.key_of(plan.slots[block]).hex()[:16]
                book.counters.count("plans_failed")
        log.warning("plan %d of session %s ends at block %s: %s", plan.plan_id, plan.owner.name, key, reason.name)
        self.engine.fail(plan.native, int(reason), block)

    # -- what native code can not settle -------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._made
        while engine is not None and not self._stopping.is_set():
            for event in engine.events(LOOK_SECONDS):
                with self._lock:
                    plan = self._by_native.get(event.plan)
                if plan is not None:
                    self._guarded(plan, event)
            with self._lock:
                moved = [plan for plan in self._by_native.values() if any(file.stale for file in plan.files)]
            for plan in moved:
                self._guarded(plan, None)

    def _guarded(self, plan: PlanRight, event: Event | None) -> None:
        try:
            if event is None:
                # A plan that rests keeps no file which the tier has given up.
                self._end_if(plan, self.relocate(plan, self.engine.stale_blocks(plan.native)))
            else:
                self._settle(plan, event)
        except PlanEnded as error:
            log.debug("plan %d has ended: %s", plan.plan_id, error)
        except Exception:  # noqa: BLE001  the thread outlives whatever one plan does to it
            log.exception("plan %d ends, since its reading failed", plan.plan_id)
            self.engine.fail(plan.native, int(Reason.TIER_UNAVAILABLE), NO_BLOCK)

    def _settle(self, plan: PlanRight, event: Event) -> None:
        if event.kind is EventKind.DRAINED:
            self._drained(plan)
        elif event.kind is EventKind.FILL:
            self._fill(plan, event.sequence)
        elif event.stale:
            if not self._end_if(plan, self.relocate(plan, self.engine.stale_blocks(plan.native))):
                self.engine.retry(plan.native)
        else:
            self._judge(plan, event.block)

    def _judge(self, plan: PlanRight, block: int) -> None:
        """A slice failed: the tier reads the block again, and sets it aside if it is corrupt."""
        if not plan.present(block):
            return
        reason = self._read(plan, [(block, plan.layers, None)])[0]
        if reason is None:
            plan.tries[block] += 1
            if plan.tries[block] <= TRIES_MAX:
                if not self._end_if(plan, self.relocate(plan, [block])):
                    self.engine.retry(plan.native)
                return
            reason = Reason.TIER_UNAVAILABLE
        self.fail(plan, reason, block)

    def _fill(self, plan: PlanRight, sequence: int) -> None:
        """Slices of a tier that has no files go through memory of ours into the ring."""
        wanted = self.engine.fills(plan.native, sequence)
        for begin in range(0, len(wanted), FILL_BLOCKS):
            some = wanted[begin : begin + FILL_BLOCKS]
            first = plan.layers[0]
            asked = [(one.block, (first + one.layer, first + one.layer + 1), (sequence, one.to)) for one in some]
            for one, reason in zip(some, self._read(plan, asked), strict=True):
                if reason is not None:
                    self.fail(plan, reason, one.block)
                    return
        self.engine.filled(plan.native, sequence)

    def _read(
        self, plan: PlanRight, asked: Sequence[tuple[int, tuple[int, int], tuple[int, int] | None]]
    ) -> list[Reason | None]:
        """Read layers of blocks with the tier's own read, into the ring or only for its checks; why each failed."""
        layout = plan.namespace.layout
        reads: list[BlockRead] = []
        tiers: list[Tier] = []
        sizes: list[int] = []
        with self._state.locked() as book:
            for block, layers, _ in asked:
                slot, tier = plan.slots[block], plan.tier(block)
                codec = book.codec(slot)
                begin, end = layout.unit_range(codec, layers)
                stride = layout.of_codec(codec)[1]
                into = memoryview(bytearray((end - begin) * stride))
                namespace_id, key = book.name(slot)
                handle = DiskHandle(book.index.place[tier][slot])
                reads.append(BlockRead(handle, key, into, (begin, end), namespace_id))
                tiers.append(tier)
                raw = layout.layer_codec(codec, layers[0]) is Codec.RAW
                sizes.append(layout.raw_slice_bytes if raw else layout.slice_bytes)
        outcomes: list[Reason | None] = [None] * len(asked)
        for tier in set(tiers):
            mine = [index for index, one in enumerate(tiers) if one is tier]
            storage = self._state.storages[tier]
            ready = storage.state.ready
            for index, status in zip(mine, storage.read([reads[index] for index in mine]), strict=True):
                block, _, to = asked[index]
                if status is not ReadStatus.OK:
                    at = tier, int(reads[index].handle)
                    outcomes[index] = self._promoter.failed_read(plan.slots[block], at, status, ready=ready)
                elif to is not None:
                    self.engine.fill(plan.native, to[0], to[1], reads[index].into[: sizes[index]])
        return outcomes


def _stop(engine: PlanEngine, thread: threading.Thread, stopping: threading.Event) -> None:
    """End the threads of an engine, and the one that settles for it."""
    stopping.set()
    engine.stop(JOIN_SECONDS)
    thread.join(JOIN_SECONDS)
