"""Giving space back: dead segments are unlinked, and segments with little live data are rewritten first.

A segment is unlinked only when the frames that dropped or moved its blocks are synced. Rewriting reads live blocks
(checked), writes them as new extents, and commits one frame that names the new places and drops the old ones; a
block's handle stays. What it costs is counted in ``rewritten_bytes``.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass
from typing import Final

from kvstore.core.errors import TierFull, TierUnavailable
from kvstore.core.stop import Stop, never
from kvstore.core.types import BlockKey
from kvstore.tiers.base import BlockRead, DiskHandle, ReadStatus
from kvstore.tiers.header import unpack_header
from kvstore.tiers.maintained import CompactReport
from kvstore.tiers.ssd.commit import Committer
from kvstore.tiers.ssd.core import Core, Segment, log
from kvstore.tiers.ssd.journal import pack_extent, pack_moves
from kvstore.tiers.ssd.placement import close_segment, trim_segments
from kvstore.tiers.ssd.reader import CheckedReader
from kvstore.tiers.ssd.runs import Run, add_run
from kvstore.tiers.ssd.table import Extent
from kvstore.tiers.ssd.writer import Writer

READ_BYTES: Final = 8 << 20
"""Bytes read at a time: what another read may find before it in the queue (some 5 ms)."""

BATCH_BYTES: Final = 64 << 20
"""Memory that rewriting takes. A larger extent is cut at this: 64 blocks of 8 MiB become eight extents of eight, and
one layer of them eight reads of 2 MiB instead of four of 4 MiB."""

DEAD_SHARE_MIN: Final = 0.1
"""On demand, a segment with less dead than this is not rewritten: it would cost ten bytes written for one gained."""


@dataclass(frozen=True, slots=True)
class Moving:
    """One block on its way: handle, and where it lay."""

    handle: DiskHandle
    key: BlockKey
    number: int
    position: int


class Reclaimer:
    """One reclaim at a time; the lock is held over its I/O, and nothing else takes it."""

    def __init__(self, core: Core, committer: Committer, writer: Writer, reader: CheckedReader) -> None:
        self._core = core
        self._committer = committer
        self._writer = writer
        self._placer = writer.placer
        self.spares = writer.spares
        self._reader = reader
        self._lock = threading.Lock()

    def reclaim(self, nbytes: int) -> int:
        """See ``Maintained.reclaim``; 0 with less than a tenth of every segment dead: the caller drops more then."""
        with self._lock:
            freed, newest = 0, self._core.next_segment
            while True:
                freed += self.spares.collect()
                if self.fits(nbytes):
                    return freed
                victim = self._victim(DEAD_SHARE_MIN, newest)
                if victim is None or not self._rewrite(victim):
                    return freed

    def compact(self, fragmentation: float, stop: Stop = never) -> CompactReport:
        """See ``Maintained.compact``; spares are given up too."""
        report = self.tidy(fragmentation, stop)
        loose = self.trim()
        with self._lock:
            spare = sum(segment.file_bytes for segment in self._core.spares)
            freed = self.spares.collect(keep=0)
        return CompactReport(report.segments, report.bytes_rewritten, report.bytes_freed + loose + spare + freed)

    def tidy(self, fragmentation: float, stop: Stop = never) -> CompactReport:
        """Rewrite segments with a larger dead share; dead ones become spares, of which a few are kept."""
        before, was, segments = self._core.counters["rewritten_bytes"], self._allocated(), 0
        newest = self._core.next_segment
        while not stop():
            # The lock is let go between segments: a write that needs room does not wait for all of them.
            with self._lock:
                self.spares.collect()
                victim = self._victim(fragmentation, newest, seal=False)
                if victim is None or not self._rewrite(victim, stop):
                    break
                segments += 1
        rewritten = self._core.counters["rewritten_bytes"] - before
        return CompactReport(segments, rewritten, max(0, was - self._allocated()))

    def trim(self) -> int:
        """Give back what closed segments have behind their last extents; returns the bytes."""
        core = self._core
        with core.lock:
            before = core.loose_bytes()
        with core.growth:
            core.call("trim", lambda: trim_segments(core))
        with core.lock:
            return max(0, before - core.loose_bytes())

    def _allocated(self) -> int:
        with self._core.lock:
            return self._core.ledger.segments_bytes

    def fits(self, nbytes: int) -> bool:
        """Whether a write of that many bytes would find room now."""
        core = self._core
        with core.lock:
            segment = core.open_segment
            if segment is not None and segment.open and segment.file_bytes - segment.used_bytes >= nbytes:
                return True
            size = max(core.config.segment_size, nbytes)
            loose = core.loose_bytes()
            if core.room_bytes() + loose - core.config.segment_size < size:
                return False
            if core.spares:
                return True
        return core.call("statvfs", core.port.free_bytes) + loose - size >= core.config.free_floor_bytes

    def has_loose(self) -> bool:
        """Whether a closed segment has space to give back and nothing is under way in it."""
        with self._core.lock:
            return any(one.loose_bytes and not one.open and not one.users for one in self._core.segments.values())

    def has_dead(self) -> bool:
        """Whether a segment waits to be freed."""
        with self._core.lock:
            return bool(self.spares.dead())

    def fragmentation(self) -> float:
        """Dead share of all sealed segments."""
        with self._core.lock:
            sealed = [segment for segment in self._core.segments.values() if not segment.open]
            size = sum(segment.used_bytes for segment in sealed)
            return sum(segment.dead_share * segment.used_bytes for segment in sealed) / size if size else 0.0

    def _victim(self, dead_share: float, newest: int, *, seal: bool = True) -> Segment | None:
        """The segment before number ``newest`` with the largest dead share, if that is above ``dead_share``.

        Callers pass the number that the next segment had when they began, so that what they write themselves is no
        victim of theirs, and they end.
        """
        core = self._core
        with core.lock:
            sealed = [one for one in core.segments.values() if not one.open and one.users == 0 and one.number < newest]
            best = max(sealed, key=lambda one: one.dead_share, default=None)
            if best is not None and best.dead_share > dead_share:
                return best
            last = core.open_segment
            if not seal or last is None or last.users or last.number >= newest or last.dead_share <= dead_share:
                return None
        with core.growth:
            core.call("seal", lambda: close_segment(core, last))
        return last

    def _rewrite(self, segment: Segment, stop: Stop = never) -> bool:
        """Move everything that lives in a segment elsewhere; False if that was not possible, or ``stop()`` came."""
        core = self._core
        while True:
            with core.lock:
                batch = self._next_batch(segment)
            if not batch:
                return segment.blocks == 0
            if stop():
                return False
            try:
                if not self._move(batch):
                    return False
            except (TierFull, TierUnavailable) as error:
                log.warning("%s is not rewritten: %s", segment.name, error)
                return False

    def _next_batch(self, segment: Segment) -> list[Moving]:
        """The first live blocks of a segment, in order, up to the batch's bytes."""
        core, table = self._core, self._core.table
        rows = [row for row in table.extents_of_segment(segment.number) if table.extent_live[row]]
        batch: list[Moving] = []
        size = 0
        blocks = table.blocks_of_extents(rows)
        for row in rows:
            share, _ = core.shares(row)
            for position, handle in blocks[row]:
                if batch and size + share > BATCH_BYTES:
                    return batch
                batch.append(Moving(DiskHandle(handle), table.key(handle), table.extent_number[row], position))
                size += share
            if size >= READ_BYTES:
                break
        return batch

    def _move(self, batch: list[Moving]) -> bool:
        core = self._core
        found: list[tuple[Moving, int]] = []
        used: set[int] = set()
        with core.lock:
            for moving in batch:
                if core.table.alive(moving.handle) and core.table.key(moving.handle) == moving.key:
                    extent = core.table.extent(core.table.block_extent[moving.handle])
                    found.append((moving, core.spaces[extent.space].layout.of_codec(extent.codec)[2]))
                    used.add(extent.space)
            core.use_spaces(used)
        try:
            return self._move_found(found)
        finally:
            core.leave_spaces(used)

    def _move_found(self, found: list[tuple[Moving, int]]) -> bool:
        """Read blocks of so many bytes, and write them elsewhere."""
        if not found:
            return True
        # Page-aligned, and stored blocks are whole pages: they are written from where they were read to.
        memory = memoryview(mmap.mmap(-1, sum(nbytes for _, nbytes in found)))
        pairs: list[tuple[Moving, memoryview]] = []
        for moving, nbytes in found:
            pairs.append((moving, memory[:nbytes]))
            memory = memory[nbytes:]
        status: list[ReadStatus] = []
        while len(status) < len(pairs):
            group: list[BlockRead] = []
            for moving, data in pairs[len(status) :]:
                if group and sum(len(one.into) for one in group) + len(data) > READ_BYTES:
                    break
                group.append(BlockRead(moving.handle, moving.key, data))
            status += self._reader(group)
        if ReadStatus.UNAVAILABLE in status:
            return False
        good = [pair for pair, outcome in zip(pairs, status, strict=True) if outcome is ReadStatus.OK]
        runs, moves = self._plan(good)
        if runs:
            self._writer.encode(runs)
            self._placer.place(runs, reserve_bytes=0)
            self._writer.write_runs(runs)
            self._commit(runs, moves)
        return True

    def _plan(self, good: list[tuple[Moving, memoryview]]) -> tuple[list[Run], list[list[Moving]]]:
        """Blocks that follow one another in chain and codec become one run again."""
        core = self._core
        runs: list[Run] = []
        moves: list[list[Moving]] = []
        with core.lock:
            numbers = {one.number for one, _ in good}
            rows = {
                core.table.extent_number[row]: core.table.extent(row)
                for row in {core.table.block_extent[one.handle] for one, _ in good if core.table.alive(one.handle)}
            }
        for moving, data in good:
            extent = rows.get(moving.number)
            if extent is None or moving.number not in numbers:
                continue
            self._add_to_run(runs, moves, (moving, data), extent)
        return runs, moves

    def _add_to_run(
        self, runs: list[Run], moves: list[list[Moving]], pair: tuple[Moving, memoryview], extent: Extent
    ) -> None:
        moving, data = pair
        header = unpack_header(data)
        run = runs[-1] if runs else None
        follows = run is not None and run.keys[-1] == header.parent and moves[-1][-1].number == moving.number
        if run is None or not follows:
            run = Run(self._core.spaces[extent.space], extent.codec, header.parent, age=extent.age)
            runs.append(run)
            moves.append([])
        run.keys.append(moving.key)
        run.stored.append(data)
        run.crcs.append(header.slice_crcs)
        moves[-1].append(moving)

    def _commit(self, runs: list[Run], moves: list[list[Moving]]) -> None:
        core = self._core
        with core.lock:
            rows = [add_run(core, run) for run in runs]
        records = b"".join(pack_extent(run.record()) for run in runs)
        records += pack_moves(
            [
                (one.number, one.position, run.number, position)
                for run, some in zip(runs, moves, strict=True)
                for position, one in enumerate(some)
            ]
        )
        segments = tuple(dict.fromkeys(run.segment for run in runs if run.segment is not None))
        pending = self._committer.submit(records, segments, lambda good: self._applied(runs, rows, moves, good))
        try:
            self._committer.wait(pending)
        finally:
            self._placer.release(runs)

    def _applied(self, runs: list[Run], rows: list[int], moves: list[list[Moving]], good: bool) -> None:
        """The frame is synced: blocks that still live now lie at the new place. The drop of another names its old
        place, and whether it stands before or behind this frame, recovery takes it for the new one."""
        core, table = self._core, self._core.table
        with core.lock:
            for row, some in zip(rows, moves, strict=True):
                table.extent_committed[row] = int(good)
                for position, moving in enumerate(some if good else []):
                    if not self._still_there(moving):
                        continue
                    old = table.block_extent[moving.handle]
                    core.account(old, -1)
                    table.move_block(moving.handle, row, position)
                    core.account(row, +1)
                    core.free_if_empty(old)
                core.free_if_empty(row)
            if good:
                core.counters["rewritten_bytes"] += sum(run.shape.total_bytes for run in runs)

    def _still_there(self, moving: Moving) -> bool:
        table = self._core.table
        if not table.alive(moving.handle) or table.key(moving.handle) != moving.key:
            return False
        row = table.block_extent[moving.handle]
        return table.extent_number[row] == moving.number and table.block_position[moving.handle] == moving.position
