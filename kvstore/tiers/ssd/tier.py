"""The SSD tier itself: puts the verbs together and meets ``DiskTier``. Read ``format.py`` for what is on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import TierError, TierUnavailable
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.stop import Stop, never
from kvstore.core.types import BlockKey, BlockName, NamespaceId
from kvstore.tiers.base import (
    BlockRead,
    BlockWrite,
    DiskHandle,
    DiskState,
    DiskUsage,
    Located,
    ReadStatus,
    RecoveredBlock,
    RecoveryReport,
)
from kvstore.tiers.maintained import CompactReport, Maintained, QuarantineEntry, SegmentUsage
from kvstore.tiers.ssd.commit import Committer
from kvstore.tiers.ssd.config import SsdConfig
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.findings import Findings
from kvstore.tiers.ssd.format import LOCK_NAME
from kvstore.tiers.ssd.housekeeping import Housekeeper
from kvstore.tiers.ssd.journal import pack_drops
from kvstore.tiers.ssd.listing import missing_parents, recovered_blocks
from kvstore.tiers.ssd.locate import Locator
from kvstore.tiers.ssd.port import DiskPort, LinuxDisk
from kvstore.tiers.ssd.quarantine import DIRECTORY, Quarantine, keep_block
from kvstore.tiers.ssd.reader import Reader
from kvstore.tiers.ssd.reclaim import Reclaimer
from kvstore.tiers.ssd.recover import recover_tables, start_journal
from kvstore.tiers.ssd.spaces import CATALOG_FILES, put_space, write_catalog
from kvstore.tiers.ssd.usage import measure_segments, measure_usage, refresh_ledger
from kvstore.tiers.ssd.watch import watched
from kvstore.tiers.ssd.writer import Writer

DROP_MAX: Final = 512
"""Blocks dropped in one section under the lock."""


class SsdTier(Maintained):
    """Blocks in segments under ``directory``, which is made if missing and held alone until ``close``.

    ``capacity_bytes`` is what blocks can fill: the cap less the segment that rewriting needs and room for metadata.
    Raises TierUnavailable, naming the pid, if another process holds the directory.
    """

    def __init__(
        self, directory: str, config: SsdConfig, clock: Clock | None = None, port: DiskPort | None = None
    ) -> None:
        self._port = LinuxDisk(directory) if port is None else port
        self._port.mkdir("")
        self._lock_fd = self._port.lock(LOCK_NAME)
        self._core = Core(self._port, config, MonotonicClock() if clock is None else clock)
        self.capacity_bytes = max(0, self._core.room_bytes() - config.segment_size)
        self._committer = Committer(self._core)
        self._quarantine = Quarantine(self._core)
        self._writer = Writer(self._core, self._committer)
        self._reader = Reader(self._core)
        self._locator = Locator(self._core, self._reader)
        self._reclaimer = Reclaimer(self._core, self._committer, self._writer, self.read)
        self._report = RecoveryReport(mode=config.recovery)
        self._recovered = False
        self._failed = ""
        self._housekeeper = Housekeeper(self._core, self._committer, self._reclaimer, self._restore)

    def recover(self) -> Iterator[RecoveredBlock]:
        """See ``DiskTier.recover``."""
        core = self._core
        if self._recovered:
            raise TierUnavailable("recover was called before")
        self._recovered = True
        begin = core.clock.now()
        try:
            found, parents = watched(core, self._recover)
        except Exception as error:  # noqa: BLE001 - whatever it was, the store starts, without its disk
            if isinstance(error, TierUnavailable) and (core.config.recovery == "strict" or error.field == "version"):
                # The operator asked for it, or has to choose the build.
                raise
            if core.config.recovery == "strict":
                raise TierUnavailable(f"recovery of {core.port.directory}: {error!r}") from error
            if not isinstance(error, OSError):
                log.exception("recovery of %s", core.port.directory)
            why = error if isinstance(error, OSError) else repr(error)
            self._failed = f"recovery of {core.port.directory} failed, and a restart tries it again: {why}"
            core.forget_all()
            core.health.failed(self._failed)
            return
        live = sum(segment.live_bytes for segment in core.segments.values())
        self._report = RecoveryReport(
            core.table.blocks, live, core.clock.now() - begin, found.cut_bytes, found.quarantined,
            found.orphans_removed, core.config.recovery,
        )  # fmt: skip
        log.debug("recovered %s", self._report)
        try:
            core.look_at_room()
        except OSError as error:
            log.debug("free space is not known yet: %s", error)
        self._housekeeper.start()
        yield from recovered_blocks(core, parents)

    def _recover(self) -> tuple[Findings, dict[int, BlockKey]]:
        core = self._core
        self._quarantine.load()
        self._quarantine.fit()
        found, journal = recover_tables(core, self._quarantine)
        parents = missing_parents(core, found)
        start_journal(core, self._committer, journal, found)
        return found, parents

    @property
    def report(self) -> RecoveryReport:
        """See ``DiskTier.report``."""
        return self._report

    def self_test(self) -> None:
        """Write, sync and read back a little; a disk that fails at it degrades the tier. After the recovery."""
        self._housekeeper.self_test()

    @property
    def used_bytes(self) -> int:
        """See ``DiskTier.used_bytes``; spare segments, which the next writes fill, are not counted."""
        core = self._core
        with core.lock:
            return core.ledger.total_bytes - sum(segment.file_bytes for segment in core.spares)

    @property
    def backing(self) -> str:
        """For people: where the bytes lie, and how they get there."""
        direct = self._port.granule > 1
        return f"{self._port.directory}, {'direct I/O' if direct else 'through the page cache'}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know."""
        if self._port.granule > 1:
            return ()
        return (
            f"{self._port.directory} takes no direct I/O: blocks pass through the page cache; choose a directory on"
            " ext4, xfs or btrfs",
        )

    @property
    def state(self) -> DiskState:
        """See ``DiskTier.state``."""
        core = self._core
        with core.lock:
            counters = dict(core.counters) | {"coded_saved_bytes": core.saved_bytes}
        counters["degradations"] = core.health.degradations
        counters.update(core.health.errors)
        counters["reads_queued"], counters["writes_queued"] = core.reads.waiting, core.writes.waiting
        seen = core.free_seen
        room = None if seen is None else self.used_bytes + max(0, seen - core.config.free_floor_bytes)
        return DiskState(core.health.state, core.health.last_error, counters, room)

    @property
    def fragmentation(self) -> float:
        """See ``Maintained.fragmentation``."""
        return self._reclaimer.fragmentation()

    def namespaces(self) -> Sequence[tuple[NamespaceSpec, NamespacePolicy, str]]:
        """See ``DiskTier.namespaces``."""
        return [(space.spec, space.policy, space.name) for space in self._core.known_spaces()]

    def put_namespace(self, spec: NamespaceSpec, policy: NamespacePolicy, name: str) -> None:
        """See ``DiskTier.put_namespace``."""
        self._require_open()
        put_space(self._core, self._committer, spec, policy, name)

    def write(self, namespace_id: NamespaceId, blocks: Sequence[BlockWrite], *, durable: bool) -> list[DiskHandle]:
        """See ``DiskTier.write``."""
        self._require_open()
        return self._writer.write(namespace_id, blocks, durable=durable)

    def read(self, reads: Sequence[BlockRead]) -> list[ReadStatus]:
        """See ``DiskTier.read``."""
        status, causes = self._reader.read(reads)
        for index, cause in causes.items():
            self._condemn(reads[index], cause)
        self._core.counters.update(Counter(f"read_{outcome.value}" for outcome in status))
        return status

    def locate(self, blocks: Sequence[tuple[DiskHandle, BlockName]], units: tuple[int, int]) -> Located | None:
        """See ``DiskTier.locate``."""
        if not self._port.native:
            return None
        found, causes = self._locator.locate(blocks, units)
        for read, cause in causes:
            self._condemn(read, cause)
        return found

    def drop(self, handles: Sequence[DiskHandle], names: Sequence[BlockName] | None = None) -> None:
        """See ``DiskTier.drop``."""
        named = [None] * len(handles) if names is None else names
        for begin in range(0, len(handles), DROP_MAX):
            self._drop(handles[begin : begin + DROP_MAX], named[begin : begin + DROP_MAX])

    def _drop(self, handles: Sequence[DiskHandle], names: Sequence[BlockName | None]) -> None:
        """One section under the lock, for which reads and writes wait."""
        core = self._core
        with core.lock:
            dead = [
                core.drop_row(handle)
                for handle, name in zip(handles, names, strict=True)
                if (core.table.alive(handle) if name is None else core.holds(handle, name[1], name[0]))
            ]
            core.counters["blocks_dropped"] += len(dead)
            # Submitted under the lock, so that it stands in the journal behind the record of a row's next use.
            if dead:
                self._committer.submit(pack_drops(dead))

    def touch(self, handles: Sequence[DiskHandle]) -> None:
        """See ``DiskTier.touch``; an extent is as recent as the block of it that was used last."""
        core = self._core
        with core.lock:
            core.next_extent = core.table.touch(handles, core.next_extent)
            core.touched = True

    def lost(self) -> Sequence[tuple[DiskHandle, BlockName]]:
        """See ``DiskTier.lost``."""
        core = self._core
        if not core.lost:
            return ()
        with core.lock:
            lost, core.lost = core.lost, []
        return lost

    def reclaim(self, nbytes: int) -> int:
        """See ``Maintained.reclaim``."""
        self._require_open()
        return self._reclaimer.reclaim(nbytes)

    def compact(self, fragmentation: float, stop: Stop = never) -> CompactReport:
        """See ``Maintained.compact``."""
        self._require_open()
        return self._reclaimer.compact(fragmentation, lambda: self._core.closed or stop())

    def verify(self, handle: DiskHandle, name: BlockName) -> ReadStatus:
        """See ``DiskTier.verify``."""
        core, (namespace_id, key) = self._core, name
        with core.lock:
            if not core.holds(handle, key, namespace_id):
                return ReadStatus.GONE
            extent = core.table.extent(core.table.block_extent[handle])
            nbytes = core.spaces[extent.space].layout.of_codec(extent.codec)[2]
        return self.read([BlockRead(handle, key, memoryview(bytearray(nbytes)), None, namespace_id)])[0]

    def housekeeping(self) -> None:
        """One round of what goes on in the background: probe, lost files, dead segments, fragmentation."""
        self._housekeeper.round()

    def probe(self) -> bool:
        """Try a degraded tier at once; True if it is ready now."""
        return not self._failed and self._housekeeper.probe()

    def usage(self) -> DiskUsage:
        """See ``DiskTier.usage``."""
        return measure_usage(self._core, self._quarantine)

    def segments(self) -> Sequence[SegmentUsage]:
        """See ``Maintained.segments``."""
        return measure_segments(self._core)

    def flush(self) -> None:
        """See ``DiskTier.flush``."""
        self._require_open()
        self._core.health.require_writes()
        self._committer.flush()

    def quarantine(self) -> Sequence[QuarantineEntry]:
        """See ``Maintained.quarantine``."""
        return self._quarantine.entries()

    def empty_quarantine(self) -> None:
        """See ``Maintained.empty_quarantine``."""
        self._core.call("quarantine", self._quarantine.empty)

    def close(self) -> None:
        """See ``DiskTier.close``."""
        core = self._core
        with core.lock:
            if core.closed:
                return
            core.closed = True
        self._housekeeper.stop()
        self._remove_spares()
        self._committer.close()
        for pool in (core.reads, core.writes, core.calls):
            pool.close()
        with core.lock:
            segments = [*core.segments.values(), *core.spares]
            core.segments.clear()
            core.spares.clear()
            for segment in segments:
                segment.doomed = True
            idle = [segment for segment in segments if segment.users == 0]
        # One with an I/O under way is closed behind it: its number must not be given to another file before.
        for segment in idle:
            self._port.close(segment.fd)
        self._port.close(self._lock_fd)

    def _condemn(self, read: BlockRead, cause: str) -> None:
        """A block failed its check: it is gone, named in the log, and its bytes are set aside."""
        core = self._core
        with core.lock:
            if not core.holds(read.handle, read.key, read.namespace_id):
                return
            extent = core.table.extent(core.table.block_extent[read.handle])
            position = core.table.block_position[read.handle]
            segment = core.segments[extent.segment]
            core.use(segment)
            core.counters["corrupt"] += 1
            self.drop([read.handle])
        log.error("block %s is corrupt and is dropped: %s", read.key.hex(), cause)
        try:
            core.call("quarantine", lambda: keep_block(core, self._quarantine, (extent, position, read.key), cause))
        except TierUnavailable as error:
            log.warning("the bytes of %s are not kept: %s", read.key.hex(), error.message)
        finally:
            core.leave(segment)

    def _remove_spares(self) -> None:
        """A clean stop gives their space back; after a kill recovery does."""
        try:
            self._writer.spares.collect(keep=0)
        except TierUnavailable as error:
            log.warning("spare segments are left to the next start: %s", error.message)

    def _restore(self) -> None:
        """Make what others removed from under the tier: the directory, its lock, the namespaces."""
        core = self._core
        if self._port.fstat(self._lock_fd).links == 0:
            log.error("%s was removed from outside; it is made anew", core.port.directory)
            self._port.mkdir("")
            self._port.mkdir(DIRECTORY)
            held, self._lock_fd = self._lock_fd, self._port.lock(LOCK_NAME)
            self._port.close(held)
            refresh_ledger(core)
        if core.space_index and not set(CATALOG_FILES) <= set(self._port.listdir("")):
            with core.growth:
                write_catalog(core, core.known_spaces())

    def _require_open(self) -> None:
        if self._core.closed:
            raise TierUnavailable("the SSD tier is closed")
        if self._failed:
            raise TierUnavailable(self._failed)
        if not self._recovered:
            raise TierError("recover comes first")
