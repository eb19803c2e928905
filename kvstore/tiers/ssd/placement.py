"""Room for runs: a place in the open segment, or a new segment within the cap and above the floor of free space."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from kvstore.core.errors import TierFull, TierUnavailable
from kvstore.tiers.ssd.core import Core, Segment
from kvstore.tiers.ssd.format import SEGMENT_HEAD_BYTES, pack_segment_head, segment_name
from kvstore.tiers.ssd.runs import Run
from kvstore.tiers.ssd.spares import Spares
from kvstore.tiers.ssd.transfer import WriteChunk


class Placer:
    """Hands out places. A placed run holds its segment until it is released."""

    def __init__(self, core: Core, spares: Spares) -> None:
        self._core = core
        self._spares = spares

    def place(self, runs: Sequence[Run], *, reserve_bytes: int | None = None) -> None:
        """Give every run a number and a place in a segment; raises TierFull with nothing changed but the open segment.

        ``reserve_bytes`` are kept free within the cap, by default one segment, which rewriting may use.
        """
        core = self._core
        reserve = core.config.segment_size if reserve_bytes is None else reserve_bytes
        blocks = sum(len(run.keys) for run in runs)
        with core.lock:
            if core.room_bytes(blocks, len(runs)) < reserve:
                core.counters["refused_full"] += 1
                raise TierFull(f"no room for the index of {blocks} more blocks within {core.config.capacity_bytes}")
        self._spares.shed(0, blocks, len(runs))
        for done, run in enumerate(runs):
            try:
                self._place_one(run, reserve)
            except (TierFull, TierUnavailable):
                self.release(runs[:done])
                raise

    def _place_one(self, run: Run, reserve: int) -> None:
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
                    core.call("new segment", lambda: self._grow(total, reserve))
            finally:
                core.growth.release()

    def _grow(self, total: int, reserve: int) -> None:
        """Make the open segment longer, or close it and open one with room for ``total`` bytes. On a pool thread."""
        core = self._core
        size = max(core.config.segment_size, SEGMENT_HEAD_BYTES + total)
        with core.lock:
            old = core.open_segment
        if old is not None and old.used_bytes + total <= core.config.segment_size and old.open:
            more = core.config.segment_size - old.file_bytes
            self._check_room(more, 0, reserve)
            self._spares.shed(more)
            self._extend(old, core.config.segment_size)
            return
        with core.lock:
            loose = core.loose_bytes()
        fits = self._check_room(size, loose, reserve)
        if old is not None:
            close_segment(core, old)
        if not fits:
            trim_segments(core)
        spare = self._take_spare()
        if spare is None:
            self._open_new(size)
        else:
            self._reuse(spare, size)

    def _take_spare(self) -> Segment | None:
        """A spare; only if there is none are dead segments waited for, whose drops a commit must make durable."""
        with self._core.lock:
            spare = self._spares.take()
        if spare is None:
            self._spares.collect()
            with self._core.lock:
                spare = self._spares.take()
        return spare

    def _check_room(self, nbytes: int, loose: int, reserve: int) -> bool:
        """Whether ``nbytes`` find room as it is; raises TierFull if not even with ``loose`` bytes given back."""
        core = self._core
        with core.lock:
            room = core.room_bytes() - reserve
            spare = sum(one.file_bytes for one in core.spares)
            if room + loose < nbytes:
                core.counters["refused_full"] += 1
                raise TierFull(f"a segment needs {nbytes} bytes; {max(room + loose, 0)} are free within the cap")
        floor = core.config.free_floor_bytes
        now = core.port.free_bytes()
        free = now + spare
        if free + loose - nbytes < floor:
            core.counters["refused_floor"] += 1
            words = f"a segment needs {nbytes} bytes; {free + loose} are free on the filesystem, {floor} are kept free"
            core.health.note("new segment", words)
            # We never go below the floor, so it was others that did.
            raise TierFull(words, others=now < floor)
        return room >= nbytes and free - nbytes >= floor

    def _extend(self, segment: Segment, size: int) -> None:
        core = self._core
        _allocate(core, segment.fd, size)
        allocated = core.port.fstat(segment.fd).allocated
        with core.lock:
            segment.file_bytes = size
            core.ledger.set_segment(segment.number, allocated)

    def _open_new(self, size: int) -> None:
        core = self._core
        number = self._next_number()
        fd = core.port.open(segment_name(number), create=True, direct=True)
        self._begin(Segment(number, fd, 0, SEGMENT_HEAD_BYTES, open=True, name_synced=False), size)

    def _reuse(self, spare: Segment, size: int) -> None:
        core = self._core
        number = self._next_number()
        core.port.rename(spare.name, segment_name(number))
        with core.lock:
            core.ledger.remove_segment(spare.number)
            core.ledger.set_segment(number, spare.file_bytes)
        # The spare may be small, and the others take what it lacks.
        self._spares.shed(max(0, size - spare.file_bytes))
        self._begin(Segment(number, spare.fd, spare.file_bytes, SEGMENT_HEAD_BYTES, open=True, name_synced=False), size)

    def _next_number(self) -> int:
        with self._core.lock:
            number, self._core.next_segment = self._core.next_segment, self._core.next_segment + 1
        return number

    def _begin(self, segment: Segment, size: int) -> None:
        """Reserve the space, write the head, and take runs in; a failure removes the file."""
        core = self._core
        try:
            if segment.file_bytes < size:
                _allocate(core, segment.fd, size)
            head = WriteChunk(
                core.port, segment.fd, 0, [memoryview(pack_segment_head(segment.number))], SEGMENT_HEAD_BYTES
            )
            core.writes.do(head, core.config.io_deadline_s)
            allocated = core.port.fstat(segment.fd).allocated
        except BaseException:
            core.port.close(segment.fd)
            core.port.unlink(segment.name)
            with core.lock:
                core.ledger.remove_segment(segment.number)
            raise
        with core.lock:
            segment.file_bytes = max(size, segment.file_bytes)
            core.segments[segment.number] = segment
            core.ledger.set_segment(segment.number, allocated)
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


def close_segment(core: Core, segment: Segment) -> None:
    """Nothing more goes into a segment. The lock ``growth`` is held.

    The space behind its last extent is given back at once if no I/O is under way; otherwise ``trim_segments`` does,
    later: cutting a file waits for all its direct I/O, and those who want the next segment would wait with it.
    """
    with core.lock:
        segment.open = False
        if core.open_segment is segment:
            core.open_segment = None
        idle = segment.users == 0
    if idle:
        _trim(core, segment)


def trim_segments(core: Core) -> None:
    """Give back the space behind the last extents of closed segments. The lock ``growth`` is held."""
    with core.lock:
        loose = [one for one in core.segments.values() if one.loose_bytes and not one.open]
    for segment in loose:
        _trim(core, segment)


def _trim(core: Core, segment: Segment) -> None:
    with core.lock:
        # A dead one is for the spares, which are used whole.
        if core.segments.get(segment.number) is not segment or segment.doomed:
            return
        core.use(segment)
        used = segment.used_bytes
    try:
        core.port.truncate(segment.fd, used)
        allocated = core.port.fstat(segment.fd).allocated
        with core.lock:
            segment.file_bytes = used
            core.ledger.set_segment(segment.number, allocated)
    finally:
        core.leave(segment)
