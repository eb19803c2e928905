"""What operators do that takes time: verify, drain, flush, compact; and the disk's ledger."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvstore.core.errors import CorruptBlock, InvalidArgument, Unavailable
from kvstore.core.stop import Stop, never
from kvstore.core.types import BlockKey, BlockName, NamespaceId, Reason, Tier
from kvstore.store.columns.index import NONE
from kvstore.store.moves import copies
from kvstore.store.moves.durable import Durably
from kvstore.store.moves.promote import Promoter
from kvstore.store.report import DrainReport, FlushReport, VerifyReport
from kvstore.store.tables import validate
from kvstore.store.tables.state import State
from kvstore.tiers.base import DiskHandle, DiskTier, DiskUsage, ReadStatus
from kvstore.tiers.maintained import CompactReport, Maintained, QuarantineEntry, SegmentUsage

log = logging.getLogger(__name__)

STOP_SECONDS = 0.1
"""How often a wait looks whether its caller has gone."""


class Maintenance:
    """The verbs that check and clean."""

    def __init__(self, state: State, promoter: Promoter, durably: Durably) -> None:
        self._state = state
        self._promoter = promoter
        self._durably = durably
        self._pause = threading.Event()

    def stop(self) -> None:
        """End a verify or a compaction that is under way."""
        self._pause.set()

    def verify(
        self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey], bytes_per_second: int, stop: Stop = never
    ) -> VerifyReport:
        """See ``Store.verify``. Every stored copy (HOST and SSD) is checked; DEVICE copies have no checksums."""
        validate.check_keys(keys)
        if bytes_per_second < 0:
            raise InvalidArgument("bytes_per_second", bytes_per_second, "0 (no limit) or more")
        if keys and namespace_id is None:
            raise InvalidArgument("namespace_id", "empty", "the namespace of the keys")
        begin = self._state.clock.now()
        blocks = nbytes = 0
        bad: dict[BlockKey, None] = {}
        for name in self._chosen(namespace_id, keys):
            size, well = self._verify_one(name)
            blocks += size > 0
            nbytes += size
            if not well:
                bad[name[1]] = None
            ahead = nbytes / bytes_per_second - (self._state.clock.now() - begin) if bytes_per_second else 0.0
            if self._pause.is_set() or stop() or (ahead > 0 and self._rest(ahead, stop)):
                break
        return VerifyReport(blocks, nbytes, len(bad), tuple(bad), self._state.clock.now() - begin)

    def _rest(self, seconds: float, stop: Stop) -> bool:
        """Wait so long, in steps; True if it is to end instead."""
        until = self._state.clock.now() + seconds
        while (left := until - self._state.clock.now()) > 0:
            if self._pause.wait(min(left, STOP_SECONDS)) or stop():
                return True
        return False

    def _chosen(self, namespace_id: NamespaceId | None, keys: Sequence[BlockKey]) -> list[BlockName]:
        with self._state.locked() as book:
            if namespace_id is None:
                entries = self._state.namespaces.entries
                return [(entries[number].namespace_id, key) for number, key, _ in book.index.blocks()]
            namespace = self._state.namespaces.get(namespace_id)
            candidates = keys or book.index.slots(namespace.number)
            return [(namespace_id, key) for key in candidates if book.resident(key, namespace) != NONE]

    def _verify_one(self, name: BlockName) -> tuple[int, bool]:
        """Bytes read and whether all were right; a bad copy is dropped."""
        size, well = 0, True
        with self._state.locked() as book:
            slot = book.find(name)
            checked, readable = (Tier.HOST, *self._state.storages), self._state.readable
            tiers = [t for t in checked if slot != NONE and book.has(slot, t) and readable & t.bit]
            for tier in tiers:
                book.io_begin(slot, tier)
        try:
            for tier in tiers:
                nbytes, right = self._verify_copy(slot, name, tier)
                size += nbytes
                well = well and right
        finally:
            with self._state.locked() as book:
                for tier in tiers:
                    book.io_end(slot, tier)
                self._state.changed.notify_all()
        return size, well

    def _verify_copy(self, slot: int, name: BlockName, tier: Tier) -> tuple[int, bool]:
        with self._state.locked() as book:
            if not book.has(slot, tier):
                return 0, True
            namespace, codec, nbytes = book.namespace(slot), book.codec(slot), book.nbytes(slot, tier)
            place = book.index.offset(slot, tier) if tier in self._state.arenas else book.index.place[tier][slot]
        disk = self._state.storages.get(tier)
        if disk is not None:
            ready = disk.state.ready
            status = disk.verify(DiskHandle(place), name)
            if status is not ReadStatus.OK:
                self._promoter.failed_read(slot, (tier, place), status, ready=ready)
            return nbytes, status is not ReadStatus.CORRUPT
        try:
            copies.check_stored(namespace, name[1], codec, self._state.arenas[tier].view(place, nbytes), slices=True)
        except CorruptBlock as error:
            log.error("block %s in HOST is not what was written: %s", name[1].hex(), error)
            with self._state.locked() as book:
                book.counters.count("corrupt_blocks")
                if book.has(slot, tier):
                    book.drop(slot, tier, Reason.QUARANTINED)
            return nbytes, False
        return nbytes, True

    def flush(self, timeout_ms: int, stop: Stop = never) -> FlushReport:
        """See ``Store.flush``."""
        validate.check_wait("timeout_ms", timeout_ms)
        if self._state.disk is None:
            return FlushReport(0, 0)
        report = self._durably.flush(timeout_ms / 1000, stop)
        if report.failure:
            log.warning("a flush was not complete: %s", report.failure)
        return report

    def drain(self, resume: bool, timeout_ms: int, stop: Stop = never) -> DrainReport:
        """See ``Store.drain``."""
        validate.check_wait("timeout_ms", timeout_ms)
        with self._state.locked():
            self._state.draining = not resume
        flushed = FlushReport(0, 0) if resume else self.flush(timeout_ms, stop)
        return DrainReport(not resume, flushed.blocks, self._durably.unflushed())

    def compact(self, fragmentation: float, stop: Stop = never) -> CompactReport:
        """See ``Store.compact``."""
        if not 0.0 <= fragmentation <= 1.0:
            raise InvalidArgument("fragmentation", fragmentation, "0 to 1")
        return self._maintained().compact(fragmentation, lambda: self._pause.is_set() or stop())

    def disk_usage(self) -> DiskUsage:
        """See ``Store.disk_usage``."""
        return self._disk().usage()

    def segments(self) -> tuple[SegmentUsage, ...]:
        """See ``Store.segments``."""
        disk = self._disk()
        return tuple(disk.segments()) if isinstance(disk, Maintained) else ()

    def quarantine(self, empty: bool) -> tuple[QuarantineEntry, ...]:
        """See ``Store.quarantine``."""
        disk = self._maintained()
        entries = tuple(disk.quarantine())
        if empty:
            disk.empty_quarantine()
        return entries

    def _disk(self) -> DiskTier:
        if self._state.disk is None:
            raise Unavailable("this store has no SSD tier")
        return self._state.disk

    def _maintained(self) -> Maintained:
        disk = self._disk()
        if not isinstance(disk, Maintained):
            raise Unavailable("this storage keeps itself: it has nothing to compact or to set aside")
        return disk
