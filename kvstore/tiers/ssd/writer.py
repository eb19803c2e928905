"""Writing: plan a run into extents, find room within the cap, write, and hand the record to the committer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore.core.errors import InvalidArgument, TierFull, TierUnavailable
from kvstore.core.types import BlockKey, Codec, NamespaceId
from kvstore.kernels.layout import align_up
from kvstore.tiers.base import BlockWrite, DiskHandle
from kvstore.tiers.header import BlockHeader, unpack_header
from kvstore.tiers.ssd.catalog import Space
from kvstore.tiers.ssd.commit import Committer, Pending
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, HeadTables, Segment, log
from kvstore.tiers.ssd.format import (
    EXTENT_BLOCKS_MAX,
    HEAD_BYTES_MAX,
    SEGMENT_HEAD_BYTES,
    ExtentHead,
    ExtentShape,
    pack_extent_head,
    pack_segment_head,
    segment_name,
)
from kvstore.tiers.ssd.iopool import Gate
from kvstore.tiers.ssd.journal import ExtentRecord, pack_drops, pack_extent
from kvstore.tiers.ssd.port import DiskPort, write_full
from kvstore.tiers.ssd.table import Extent

COPY_WITH_NUMPY_BYTES: Final = 32768
"""From this size a numpy copy, which lets other threads run, beats a slice assignment, which does not."""


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that will be one extent, and what is known of it so far."""

    space: Space
    codec: Codec
    parent: BlockKey
    keys: list[BlockKey] = field(default_factory=list)
    stored: list[memoryview] = field(default_factory=list)
    crcs: list[tuple[int, ...]] = field(default_factory=list)
    age: int = 0
    number: int = 0
    segment: Segment | None = None
    offset: int = 0

    @property
    def shape(self) -> ExtentShape:
        """Lengths of the extent."""
        return ExtentShape.of(self.space.layout, self.codec, len(self.keys))

    def head(self) -> ExtentHead:
        """The extent's head, once it has a place."""
        segment = 0 if self.segment is None else self.segment.number
        return ExtentHead(
            self.shape, self.codec, self.space.spec.block_tokens, segment, self.number, self.offset, self.age,
            self.space.namespace_id, self.parent, b"".join(self.keys), np.array(self.crcs, dtype=np.uint32),
        )  # fmt: skip

    def record(self) -> ExtentRecord:
        """The journal's record of it."""
        segment = 0 if self.segment is None else self.segment.number
        return ExtentRecord(
            self.number, segment, self.offset, self.age, self.codec, self.space.namespace_id, self.parent,
            b"".join(self.keys),
        )  # fmt: skip


@dataclass(slots=True)
class WriteChunk:
    """One write of at most io_bytes, gathered from the caller's blocks."""

    port: DiskPort
    fd: int
    offset: int
    parts: list[memoryview]
    nbytes: int

    def run(self, buffer: memoryview, gate: Gate) -> None:
        """Copy the parts together, zeros behind them, and write."""
        if not gate.enter_copy():
            return
        try:
            at = 0
            for part in self.parts:
                copy_bytes(buffer[at : at + len(part)], part)
                at += len(part)
        finally:
            gate.leave_copy()
        if at < self.nbytes:
            buffer[at : self.nbytes] = bytes(self.nbytes - at)
        write_full(self.port, self.fd, buffer[: self.nbytes], self.offset)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equal lengths; large ones without holding other threads up."""
    if len(source) >= COPY_WITH_NUMPY_BYTES:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
    else:
        target[:] = source


class Writer:
    """Takes runs of blocks to disk."""

    def __init__(self, core: Core, committer: Committer) -> None:
        self._core = core
        self._committer = committer

    def write(self, namespace_id: NamespaceId, blocks: Sequence[BlockWrite], *, durable: bool) -> list[DiskHandle]:
        """See ``DiskTier.write``."""
        if not blocks:
            return []
        core = self._core
        core.health.require_writes()
        with core.lock:
            index = core.space_index.get(namespace_id)
            space = core.spaces[index] if index is not None else None
        if space is None:
            raise InvalidArgument("namespace_id", namespace_id.hex(), "one that put_namespace was told of")
        runs = self._plan(space, blocks)
        self.place(runs)
        self.write_runs(runs)
        handles = self._publish(runs)
        self.release(runs)
        pending = self._submit(runs, handles)
        if durable:
            try:
                self._committer.wait(pending)
            except TierUnavailable:
                self._withdraw(runs, handles)
                raise
        return [handle for some in handles for handle in some]

    def _plan(self, space: Space, blocks: Sequence[BlockWrite]) -> list[Run]:
        runs: list[Run] = []
        limit = self._core.config.segment_size - SEGMENT_HEAD_BYTES
        for block in blocks:
            header = self._checked_header(space, block)
            run = runs[-1] if runs else None
            if (
                run is None
                or run.codec is not block.codec
                or run.keys[-1] != block.parent
                or not _fits_another(run, limit)
            ):
                run = Run(space, block.codec, block.parent)
                runs.append(run)
            run.keys.append(block.key)
            run.stored.append(block.stored)
            run.crcs.append(header.slice_crcs)
        return runs

    def _checked_header(self, space: Space, block: BlockWrite) -> BlockHeader:
        header = unpack_header(block.stored)
        slice_bytes, stride, stored_bytes = space.layout.of_codec(block.codec)
        found = (header.key, header.parent, header.codec, header.namespace_id)
        lengths = (header.layers, header.slice_bytes, header.slice_stride, header.header_bytes)
        expected = (space.layout.layers, slice_bytes, stride, space.layout.header_bytes)
        if found != (block.key, block.parent, block.codec, space.namespace_id) or lengths != expected:
            raise InvalidArgument("stored", f"the header of {header.key.hex()[:16]}, {lengths}", f"{expected}")
        if len(block.stored) < header.stored_bytes:
            raise InvalidArgument("stored", f"{len(block.stored)} bytes", f"at least {stored_bytes}")
        return header

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
            core.port.fallocate(fd, size)
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

    def write_runs(self, runs: Sequence[Run]) -> None:
        """Write every placed run's bytes; raises TierUnavailable, and lets the places go to waste, on an error."""
        core = self._core
        chunks = [chunk for run in runs for chunk in chunks_of(core.port, run, core.config.io_bytes)]
        errors = [error for error in core.writes.run(chunks, core.config.io_deadline_s) if error is not None]
        with core.lock:
            core.counters["write_ios"] += len(chunks)
            core.counters["written_bytes"] += sum(chunk.nbytes for chunk in chunks)
        if errors:
            self.release(runs)
            core.health.write_failed("write", errors[0])
            raise TierUnavailable(f"write: {errors[0]}") from errors[0]

    def release(self, runs: Sequence[Run]) -> None:
        """The segments of placed runs may go again: what they hold is in the table, or given up."""
        for run in runs:
            if run.segment is not None:
                self._core.leave(run.segment)

    def _publish(self, runs: Sequence[Run]) -> list[list[DiskHandle]]:
        handles: list[list[DiskHandle]] = []
        core = self._core
        with core.lock:
            for run in runs:
                row = add_run(core, run)
                extent = core.table.extent(row)
                handles.append([])
                for position, key in enumerate(run.keys):
                    handles[-1].append(DiskHandle(core.table.add_block(row, position, key)))
                    core.account_block(extent, +1)
            core.counters["user_bytes"] += sum(run.shape.total_bytes for run in runs)
            core.counters["blocks_written"] += sum(len(run.keys) for run in runs)
        return handles

    def _submit(self, runs: Sequence[Run], handles: Sequence[Sequence[DiskHandle]]) -> Pending:
        segments = tuple(dict.fromkeys(run.segment for run in runs if run.segment is not None))
        records = b"".join(pack_extent(run.record()) for run in runs)
        return self._committer.submit(records, segments, lambda good: self._applied(runs, handles, good))

    def _applied(self, runs: Sequence[Run], handles: Sequence[Sequence[DiskHandle]], good: bool) -> None:
        core = self._core
        with core.lock:
            for run, some in zip(runs, handles, strict=True):
                for handle, key in zip(some, run.keys, strict=True):
                    row = core.table.block_extent[handle] if core.table.alive(handle) else None
                    if row is None or core.table.extent_number[row] != run.number or core.table.key(handle) != key:
                        continue
                    if good:
                        core.table.extent_committed[row] = 1
                    else:
                        core.drop_row(handle)
                        core.counters["blocks_lost"] += 1
        if not good:
            log.error("%d blocks were not committed and are dropped", sum(len(run.keys) for run in runs))

    def _withdraw(self, runs: Sequence[Run], handles: Sequence[Sequence[DiskHandle]]) -> None:
        """The caller is told that its write failed: should the record still reach the disk, a drop follows it."""
        core = self._core
        dead: list[tuple[int, int]] = []
        with core.lock:
            for run, some in zip(runs, handles, strict=True):
                for position, handle in enumerate(some):
                    dead.append((run.number, position))
                    if core.table.alive(handle) and core.table.key(handle) == run.keys[position]:
                        row = core.table.block_extent[handle]
                        if core.table.extent_number[row] == run.number:
                            core.drop_row(handle)
        self._committer.submit(pack_drops(dead))


def add_run(core: Core, run: Run) -> int:
    """Put a written run's extent into the table, without blocks; returns its row. The lock is held."""
    segment = 0 if run.segment is None else run.segment.number
    extent = Extent(run.number, segment, run.offset, run.age, len(run.keys), run.codec, run.space.index, run.parent)
    row = core.table.add_extent(extent, committed=False)
    core.headers.put(run.number, HeadTables(b"".join(run.keys), np.array(run.crcs, dtype=np.uint32)))
    return row


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


def chunks_of(port: DiskPort, run: Run, io_bytes: int) -> Iterator[WriteChunk]:
    """Cut a placed run into writes, in order of offset."""
    if run.segment is None:
        return
    parts: list[memoryview] = []
    size, at = 0, run.offset
    # The head goes with the first slices, so that a run of io_bytes is one write.
    limit = io_bytes + run.shape.head_bytes
    for piece in pieces_of(run):
        taken = 0
        while taken < len(piece):
            some = piece[taken : taken + limit - size]
            parts.append(some)
            size += len(some)
            taken += len(some)
            if size == limit:
                yield WriteChunk(port, run.segment.fd, at, parts, size)
                parts, size, at, limit = [], 0, at + size, io_bytes
    if size:
        yield WriteChunk(port, run.segment.fd, at, parts, align_up(size, PAGE_BYTES))


def pieces_of(run: Run) -> Iterator[memoryview]:
    """The bytes of an extent: head, then layer by layer the slice of each block."""
    yield memoryview(pack_extent_head(run.head()))
    shape = run.shape
    for layer in range(shape.layers):
        begin = shape.block_header_bytes + layer * shape.slice_stride
        for stored in run.stored:
            yield stored[begin : begin + shape.slice_stride]


def _fits_another(run: Run, limit: int) -> bool:
    if len(run.keys) >= EXTENT_BLOCKS_MAX:
        return False
    shape = ExtentShape.of(run.space.layout, run.codec, len(run.keys) + 1)
    return shape.total_bytes <= limit and shape.head_bytes <= HEAD_BYTES_MAX
