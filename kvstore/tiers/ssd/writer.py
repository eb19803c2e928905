"""Writing: plan a run into extents, find room within the cap, write, and hand the record to the committer."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.core.errors import InvalidArgument, TierUnavailable
from kvstore.core.types import NamespaceId
from kvstore.tiers.base import BlockWrite, DiskHandle
from kvstore.tiers.header import BlockHeader, unpack_header
from kvstore.tiers.ssd.catalog import Space
from kvstore.tiers.ssd.commit import Committer, Pending
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.format import (
    EXTENT_BLOCKS_MAX,
    HEAD_BYTES_MAX,
    SEGMENT_HEAD_BYTES,
    ExtentShape,
)
from kvstore.tiers.ssd.journal import pack_drops, pack_extent
from kvstore.tiers.ssd.placement import Placer
from kvstore.tiers.ssd.runs import Run, add_run, chunks_of
from kvstore.tiers.ssd.spares import Spares


class Writer:
    """Takes runs of blocks to disk."""

    def __init__(self, core: Core, committer: Committer) -> None:
        self._core = core
        self.spares = Spares(core, committer)
        self.placer = Placer(core, self.spares)
        self._committer = committer

    def write(self, namespace_id: NamespaceId, blocks: Sequence[BlockWrite], *, durable: bool) -> list[DiskHandle]:
        """See ``DiskTier.write``."""
        if not blocks:
            return []
        core = self._core
        core.health.require_writes()
        with core.lock:
            index = core.space_index.get(namespace_id)
            if index is None:
                raise InvalidArgument("namespace_id", namespace_id.hex(), "one that put_namespace was told of")
            space = core.spaces[index]
            core.spaces_written.add(namespace_id)
            core.use_spaces([index])
        try:
            runs = self._plan(space, blocks)
            self.encode(runs)
            self.placer.place(runs)
            self.write_runs(runs)
            handles = self._publish(runs)
        finally:
            core.leave_spaces([index])
        self.placer.release(runs)
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
        expected = (space.layout.units_of(block.codec), slice_bytes, stride, space.layout.header_bytes)
        if found != (block.key, block.parent, block.codec, space.namespace_id) or lengths != expected:
            raise InvalidArgument("stored", f"the header of {header.key.hex()[:16]}, {lengths}", f"{expected}")
        if len(block.stored) < header.stored_bytes:
            raise InvalidArgument("stored", f"{len(block.stored)} bytes", f"at least {stored_bytes}")
        return header

    def encode(self, runs: Sequence[Run]) -> None:
        """Code slices where the namespace wants it and it pays."""
        coded = sum([run.encode() for run in runs])
        with self._core.lock:
            self._core.counters["coded_extents"] += coded

    def write_runs(self, runs: Sequence[Run]) -> None:
        """Write every placed run's bytes; raises TierUnavailable, and lets the places go to waste, on an error."""
        core = self._core
        chunks = [chunk for run in runs for chunk in chunks_of(core.port, run, core.config.io_bytes)]
        errors = [error for error in core.writes.run(chunks, core.config.io_deadline_s) if error is not None]
        with core.lock:
            core.counters["write_ios"] += len(chunks)
            core.counters["written_bytes"] += sum(chunk.nbytes for chunk in chunks)
        if errors:
            self.placer.release(runs)
            core.health.write_failed("write", errors[0])
            raise TierUnavailable(f"write: {errors[0]}") from errors[0]

    def _publish(self, runs: Sequence[Run]) -> list[list[DiskHandle]]:
        handles: list[list[DiskHandle]] = []
        core = self._core
        with core.lock:
            for run in runs:
                row = add_run(core, run)
                handles.append([DiskHandle(core.table.add_block(row, at, key)) for at, key in enumerate(run.keys)])
                core.account(row, len(run.keys))
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
                        core.lose_row(handle)
        if not good:
            log.error("%d blocks were not committed and are dropped", sum(len(run.keys) for run in runs))

    def _withdraw(self, runs: Sequence[Run], handles: Sequence[Sequence[DiskHandle]]) -> None:
        """The caller is told that its write failed: should the record still reach the disk, a drop follows it."""
        core = self._core
        dead: list[tuple[int, int]] = []
        with core.lock:
            for run, some in zip(runs, handles, strict=True):
                for position, handle in enumerate(some):
                    # Nobody else knows the handle yet, but the block may have been moved.
                    ours = core.table.alive(handle) and core.table.key(handle) == run.keys[position]
                    dead.append(core.drop_row(handle) if ours else (run.number, position))
            # Under the lock, so that nobody takes a segment for dead whose drops are not queued yet.
            self._committer.submit(pack_drops(dead))


def _fits_another(run: Run, limit: int) -> bool:
    if len(run.keys) >= EXTENT_BLOCKS_MAX:
        return False
    shape = ExtentShape.of(run.space.layout, run.codec, len(run.keys) + 1)
    return shape.total_bytes <= limit and shape.head_bytes <= HEAD_BYTES_MAX
