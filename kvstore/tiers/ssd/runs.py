"""Runs of blocks that become extents: their bytes, in the order of the disk, and the writes that carry them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from kvstore.core.types import BlockKey, Codec
from kvstore.kernels.layout import align_up
from kvstore.tiers.lossless import CODED_SLICE_BYTES_MAX, SAVING_MIN, encode_blocks, planes_of
from kvstore.tiers.ssd.catalog import Space
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, HeadTables, Segment
from kvstore.tiers.ssd.format import HEAD_BYTES_MAX, CodedSlices, ExtentHead, ExtentShape, pack_extent_head
from kvstore.tiers.ssd.journal import ExtentRecord
from kvstore.tiers.ssd.port import DiskPort
from kvstore.tiers.ssd.table import Extent
from kvstore.tiers.ssd.transfer import WriteChunk, address


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that will be one extent, and what is known of it so far. ``slices`` are coded ones, by layer and block."""

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
    slices: list[list[bytes | memoryview]] = field(default_factory=list)
    pages: int = 0

    @property
    def shape(self) -> ExtentShape:
        """Lengths of the extent."""
        return ExtentShape.of(self.space.layout, self.codec, len(self.keys), self.pages)

    @property
    def planes(self) -> int:
        """Byte planes that coded slices are split into."""
        return planes_of(self.space.spec, self.codec, self.shape.slice_bytes)

    def encode(self) -> bool:
        """Code the slices, if the namespace wants that and it pays; returns whether they are.

        Decided slice by slice, and then for the extent, whose head grows by the table of lengths.
        """
        plain = self.shape
        if not self.space.policy.lossless or plain.slice_bytes > CODED_SLICE_BYTES_MAX:
            return False
        blocks = [stored[plain.block_header_bytes :] for stored in self.stored]
        slices = encode_blocks(blocks, self.planes, (plain.layers, plain.slice_bytes, plain.slice_stride))
        nbytes = sum(len(one) for layer in slices for one in layer)
        coded = replace(plain, pages=1)
        pages = align_up(coded.head_bytes + nbytes, PAGE_BYTES) // PAGE_BYTES
        saved = plain.total_bytes - pages * PAGE_BYTES
        if saved < SAVING_MIN * plain.total_bytes or coded.head_bytes > HEAD_BYTES_MAX:
            return False
        self.slices, self.pages = slices, pages
        return True

    def is_aligned(self, granule: int) -> bool:
        """Whether every slice lies where direct I/O can take it from."""
        shape = self.shape
        if self.pages:
            return False
        lengths = (shape.block_header_bytes, shape.slice_stride)
        return not any(value % granule for value in (*lengths, *map(address, self.stored)))

    def head(self) -> ExtentHead:
        """The extent's head, once it has a place."""
        segment = 0 if self.segment is None else self.segment.number
        return ExtentHead(
            self.shape, self.codec, self.space.spec.block_tokens, segment, self.number, self.offset, self.age,
            self.space.namespace_id, self.parent, b"".join(self.keys), np.array(self.crcs, dtype=np.uint32),
            self.coded(),
        )  # fmt: skip

    def coded(self) -> CodedSlices | None:
        """The table of coded slices, if they are."""
        if not self.pages:
            return None
        return CodedSlices(self.planes, np.array([[*map(len, layer)] for layer in self.slices], dtype=np.uint32))

    def record(self) -> ExtentRecord:
        """The journal's record of it."""
        segment = 0 if self.segment is None else self.segment.number
        return ExtentRecord(
            self.number, segment, self.offset, self.age, self.codec, self.space.namespace_id, self.parent,
            b"".join(self.keys), self.pages,
        )  # fmt: skip


def add_run(core: Core, run: Run) -> int:
    """Put a written run's extent into the table, without blocks; returns its row. The lock is held."""
    segment = 0 if run.segment is None else run.segment.number
    extent = Extent(
        run.number, segment, run.offset, run.age, len(run.keys), run.codec, run.space.index, run.parent, run.pages
    )
    row = core.table.add_extent(extent, committed=False)
    core.headers.put(run.number, HeadTables(b"".join(run.keys), np.array(run.crcs, dtype=np.uint32), run.coded()))
    return row


def chunks_of(port: DiskPort, run: Run, io_bytes: int) -> Iterator[WriteChunk]:
    """Cut a placed run into writes, in order of offset."""
    if run.segment is None:
        return
    aligned = run.is_aligned(port.granule)
    parts: list[memoryview] = []
    size, at = 0, run.offset
    # The head goes with the first slices, so that a run of io_bytes is one write.
    limit = io_bytes + run.shape.head_bytes
    if run.shape.total_bytes <= limit:
        yield WriteChunk(port, run.segment.fd, at, list(pieces_of(run)), run.shape.total_bytes, aligned)
        return
    for piece in pieces_of(run):
        rest = piece
        while size + len(rest) >= limit:
            parts.append(rest[: limit - size])
            rest = rest[limit - size :]
            yield WriteChunk(port, run.segment.fd, at, parts, limit, aligned)
            parts, size, at, limit = [], 0, at + limit, io_bytes
        if rest:
            parts.append(rest)
            size += len(rest)
    if size:
        yield WriteChunk(port, run.segment.fd, at, parts, align_up(size, PAGE_BYTES), aligned)


def pieces_of(run: Run) -> Iterator[memoryview]:
    """The bytes of an extent: head, then layer by layer the slice of each block."""
    yield memoryview(pack_extent_head(run.head()))
    shape = run.shape
    if run.pages:
        for some in run.slices:
            yield from (memoryview(one) for one in some)
        return
    if shape.blocks == 1:
        # The slices of one block follow one another in memory as they do on disk.
        yield run.stored[0][shape.block_header_bytes :][: shape.layers * shape.slice_stride]
        return
    for layer in range(shape.layers):
        begin = shape.block_header_bytes + layer * shape.slice_stride
        for stored in run.stored:
            yield stored[begin : begin + shape.slice_stride]
