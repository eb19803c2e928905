"""Room for runs: a place in the open segment, or a new segment within the cap and above the floor of free space."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvstore.core.errors import TierFull, TierUnavailable
from kvstore.tiers.ssd.core import Core, Segment
from kvstore.tiers.ssd.format import SEGMENT_HEAD_BYTES, pack_segment_head, segment_name
from kvstore.tiers.ssd.runs import Run, WriteChunk


class Placer:
    """Hands out places. A placed run holds its segment until it is released."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def place(self, runs: Sequence[Run], *, spare_bytes: int | None = None) -> None:
        """Give every run a number and a place in a segment; raises TierFull with nothing changed but the open segment.

        ``spare_bytes`` are kept free within the cap, by default one segment, which rewriting may use.
        """
        core = self._core
        spare = core.config.segment_size if spare_bytes is None else spare_bytes
        blocks = sum(len(run.keys) for run in runs)
        with core.lock:
            if core.room_bytes(blocks, len(runs)) < 0:
                core.counters["refused_full"] += 1
                raise TierFull(f"no room for the index of {blocks} more blocks within {core.config.capacity_bytes}")
        for done, run in enumerate(runs):
            try:
                self._place_one(run, spare)
            except (TierFull, TierUnavailable):
                self.release(runs[:done])
                raise

    def _place_one(self, run: Run, spare: int) -> None:
        core = self._core
        total = run.shape.total_bytes
        while True:
            with core.lock:
                segment = core.open_segment
                if segment is not None and segment.open and segment.file_bytes - segment.used_bytes >= total:
                    run.segment, run.offset = segment, segment.used_bytes
                    run.number, core.next_extent = core.next_extent, core.next_extent + 1
                    run.age = run.age or run.number
                    segment.used_bytes += total
                    core.use(segment)
                    return
            if not core.growth.acquire(timeout=core.config.io_deadline_s):
                raise TierUnavailable("a new segment is not ready in time")
            try:
                with core.lock:
                    again = core.open_segment is not segment
                if not again:
                    core.call("new segment", lambda: self._grow(total, spare))
            finally:
                core.growth.release()

    def _grow(self, total: int, spare: int) -> None:
        """Close the open segment and open one with room for ``total`` bytes. Runs on a pool thread."""
        core = self._core
        size = max(core.config.segment_size, SEGMENT_HEAD_BYTES + total)
        with core.lock:
            old = core.open_segment
            gained = max(0, old.file_bytes - old.used_bytes) if old is not None else 0
            room = core.room_bytes() + gained - spare
            if room < size:
                core.counters["refused_full"] += 1
                raise TierFull(f"a segment of {size} bytes; {max(room, 0)} are free within the cap")
        floor = core.config.free_floor_bytes
        free = core.port.free_bytes()
        if free - size < floor:
            core.counters["refused_floor"] += 1
            raise TierFull(f"a segment of {size} bytes; {free} are free on the filesystem and {floor} are kept free")
        if old is not None:
            seal_segment(core, old)
        self._open_new(size)

    def _open_new(self, size: int) -> None:
        core = self._core
        with core.lock:
            number, core.next_segment = core.next_segment, core.next_segment + 1
        name = segment_name(number)
        fd = core.port.open(name, create=True, direct=True)
        try:
            _allocate(core, fd, size)
            head = WriteChunk(core.port, fd, 0, [memoryview(pack_segment_head(number))], SEGMENT_HEAD_BYTES)
            (error,) = core.writes.run([head], core.config.io_deadline_s)
            if error is not None:
                raise error
            allocated = core.port.fstat(fd).allocated
        except BaseException:
            core.port.close(fd)
            core.port.unlink(name)
            raise
        with core.lock:
            segment = Segment(number, fd, size, SEGMENT_HEAD_BYTES, open=True, name_synced=False)
            core.segments[number] = segment
            core.ledger.set_segment(number, allocated)
            core.open_segment = segment

    def release(self, runs: Sequence[Run]) -> None:
        """The segments of placed runs may go again: what they hold is in the table, or given up."""
        for run in runs:
            if run.segment is not None:
                self._core.leave(run.segment)


def _allocate(core: Core, fd: int, size: int) -> None:
    """Reserve a segment's space; a filesystem that others have filled is a full tier, not a broken one."""
    try:
        core.port.fallocate(fd, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        core.counters["refused_nospace"] += 1
        core.health.note("new segment", error)
        raise TierFull(f"a segment of {size} bytes: {error}") from error


def seal_segment(core: Core, segment: Segment) -> None:
    """Nothing more goes into a segment: give back the space behind its last extent."""
    with core.lock:
        segment.open = False
        if core.open_segment is segment:
            core.open_segment = None
        used = segment.used_bytes
    core.port.truncate(segment.fd, used)
    stat = core.port.fstat(segment.fd)
    with core.lock:
        segment.file_bytes = used
        core.ledger.set_segment(segment.number, stat.allocated)
