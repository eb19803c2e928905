"""What goes on beside calls: the probe that brings a degraded tier back, files removed from outside, fragmentation.

One thread does a round every ``compact_interval_s``; an error in a round is logged, counted, and the next round goes
on. ``Housekeeper.round`` is public, so that tests need no thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import TierError
from kvstore.tiers.ssd.commit import Committer
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, Segment, log
from kvstore.tiers.ssd.files import remove_file
from kvstore.tiers.ssd.iopool import Gate
from kvstore.tiers.ssd.journal import pack_drops
from kvstore.tiers.ssd.port import DiskPort, read_full, write_full
from kvstore.tiers.ssd.reclaim import Reclaimer

PROBE_NAME: Final = "probe.tmp"


@dataclass(slots=True)
class ProbeChunk:
    """One page written, synced and read back through the same path as blocks."""

    port: DiskPort
    fd: int
    nbytes: int = PAGE_BYTES

    def run(self, buffer: memoryview, gate: Gate) -> None:
        """Raises OSError when what comes back is not what went out."""
        del gate
        buffer[:] = b"probe!!!" * (len(buffer) // 8)
        write_full(self.port, self.fd, buffer, 0)
        self.port.fdatasync(self.fd)
        expected = bytes(buffer)
        buffer[:8] = bytes(8)
        if read_full(self.port, self.fd, buffer, 0) != len(buffer) or bytes(buffer) != expected:
            raise OSError("the probe did not read back what it wrote")


class Housekeeper:
    """The thread and its rounds."""

    def __init__(self, core: Core, committer: Committer, reclaimer: Reclaimer, restore: Callable[[], None]) -> None:
        self._core = core
        self._committer = committer
        self._reclaimer = reclaimer
        self._spares = reclaimer.spares
        self._restore = restore
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin rounds, unless the configuration leaves them to others."""
        interval = self._core.config.compact_interval_s
        if interval is not None:
            self._thread = threading.Thread(target=self._work, args=(interval,), name="ssd-housekeeper", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End after the round under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * self._core.config.io_deadline_s)

    def round(self) -> None:
        """Probe if degraded; otherwise look for lost files, free dead segments, and rewrite fragmented ones."""
        health = self._core.health
        if health.state == "degraded":
            if health.probe_due():
                self.probe()
            return
        self._core.attempt(self._restore)
        self._core.look_at_room()
        self._core.attempt(self._committer.check_journal)
        self.drop_lost_segments()
        if self._core.spares and self._core.attempt(self._core.port.free_bytes) < self._core.config.free_floor_bytes:
            self._spares.collect(keep=0)
        if self._reclaimer.has_loose():
            self._reclaimer.trim()
        threshold = self._core.config.fragmentation
        if self._reclaimer.has_dead() or self._reclaimer.fragmentation() > threshold:
            self._reclaimer.tidy(threshold, self._stop.is_set)

    def probe(self) -> bool:
        """Try a small write, sync and read, then a commit; success makes the tier ready again."""
        core = self._core
        try:
            core.attempt(self._restore)
            self._write_probe()
            core.attempt(self._committer.check_journal)
            self.drop_lost_segments()
            self._committer.settle()
        except (OSError, TierError) as error:
            log.info("the SSD tier stays degraded: the probe says %s", error)
            return False
        core.health.recovered()
        return True

    def self_test(self) -> None:
        """Write, sync and read a little before anybody is served: a disk that fails at it degrades the tier now."""
        if self._core.health.state != "ready":
            return
        try:
            self._write_probe()
        except (OSError, TierError) as error:
            self._core.health.write_failed("self test", error)

    def _write_probe(self) -> None:
        core = self._core
        fd = core.attempt(self._open_probe)
        try:
            core.writes.do(ProbeChunk(core.port, fd), core.config.io_deadline_s)
        finally:
            core.attempt(lambda: self._remove_probe(fd))

    def drop_lost_segments(self) -> None:
        """Forget blocks of segments whose file was removed from outside: they would not outlive a restart."""
        core = self._core
        with core.lock:
            segments = [*core.segments.values(), *core.spares]
            for segment in segments:
                core.use(segment)
        try:
            links = core.attempt(lambda: [core.port.fstat(segment.fd).links for segment in segments])
        finally:
            for segment in segments:
                core.leave(segment)
        for segment in [one for one, count in zip(segments, links, strict=True) if count == 0]:
            self._drop_lost(segment)

    def _drop_lost(self, segment: Segment) -> None:
        core = self._core
        with core.lock:
            if segment in core.spares:
                core.spares.remove(segment)
            elif segment.number not in core.segments:
                return
            segment.open = False
            if core.open_segment is segment:
                core.open_segment = None
            rows = core.table.extents_of_segment(segment.number)
            handles = [handle for pairs in core.table.blocks_of_extents(rows).values() for _, handle in pairs]
            dead = [core.lose_row(handle) for handle in handles]
            if dead:
                self._committer.submit(pack_drops(dead))
        log.error("%s was removed from outside: %d blocks are lost", segment.name, len(dead))
        with core.lock:
            core.segments.pop(segment.number, None)
        self._spares.remove(segment)

    def _open_probe(self) -> int:
        remove_file(self._core, PROBE_NAME)
        return self._core.port.open(PROBE_NAME, create=True, direct=True)

    def _remove_probe(self, fd: int) -> None:
        self._core.port.close(fd)
        remove_file(self._core, PROBE_NAME)

    def _work(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            try:
                self.round()
            except Exception:  # noqa: BLE001 - logged and counted
                # Whatever it was, the next round must come: a dead housekeeper would leave the tier degraded.
                self._core.counters["housekeeping_errors"] += 1
                log.exception("a round of housekeeping failed")
