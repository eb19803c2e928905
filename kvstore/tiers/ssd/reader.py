"""Reading: look handles up, learn the checksums, plan few large reads, check every slice, copy it to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.kernels.layout import align_up
from kvstore.tiers.base import BlockRead, ReadStatus
from kvstore.tiers.header import BlockHeader, pack_header
from kvstore.tiers.ssd.catalog import Space
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, HeadTables, Segment
from kvstore.tiers.ssd.files import PageChunk
from kvstore.tiers.ssd.format import CodedSlices, ExtentShape, unpack_extent_head
from kvstore.tiers.ssd.port import DiskPort
from kvstore.tiers.ssd.table import Extent
from kvstore.tiers.ssd.transfer import Piece, ReadChunk

GAP_BYTES_MAX: Final = 65536
"""Bytes nobody asked for that are read rather than skipped: a read of 64 KiB costs about as much as another I/O."""


CheckedReader = Callable[[Sequence[BlockRead]], list[ReadStatus]]
"""Reads, and sets aside what is corrupt."""


@dataclass(slots=True)
class Wanted:
    """What one call wants of one extent."""

    extent: Extent
    segment: Segment
    space: Space
    shape: ExtentShape
    tables: HeadTables | None
    blocks: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of position in the extent and index in the call."""


class Reader:
    """Brings blocks and slices from disk."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def read(self, reads: Sequence[BlockRead]) -> tuple[list[ReadStatus], dict[int, str]]:
        """See ``DiskTier.read``; corrupt blocks are reported, with what is wrong by index, not yet quarantined."""
        core = self._core
        status = [ReadStatus.OK] * len(reads)
        causes: dict[int, str] = {}
        if not core.health.reads_ok or core.closed:
            return [ReadStatus.UNAVAILABLE] * len(reads), causes
        wanted = self.look_up(reads, status)
        try:
            self.learn(reads, wanted, status, causes)
            self._check_room(reads, wanted)
            self._read_slices(reads, wanted, status)
        finally:
            for want in wanted:
                core.leave(want.segment)
        self._write_headers(reads, wanted, status)
        for index, outcome in enumerate(status):
            if outcome is ReadStatus.CORRUPT:
                causes.setdefault(index, "a slice fails its checksum")
        return status, causes

    def look_up(self, reads: Sequence[BlockRead], status: list[ReadStatus]) -> list[Wanted]:
        """What is wanted, by extent; each segment is in use until the caller leaves it."""
        core = self._core
        found: dict[int, Wanted] = {}
        with core.lock:
            table = core.table
            for index, read in enumerate(reads):
                if not core.holds(read.handle, read.key, read.namespace_id):
                    status[index] = ReadStatus.GONE
                    continue
                row = table.block_extent[read.handle]
                want = found.get(row)
                if want is None:
                    extent = table.extent(row)
                    segment = core.segments[extent.segment]
                    core.use(segment)
                    want = found[row] = Wanted(
                        extent, segment, core.spaces[extent.space], core.shape(extent), core.headers.get(extent.number)
                    )
                want.blocks.append((table.block_position[read.handle], index))
        return list(found.values())

    def learn(
        self, reads: Sequence[BlockRead], wanted: Sequence[Wanted], status: list[ReadStatus], causes: dict[int, str]
    ) -> None:
        """Have the tables of every extent, from memory or its head, and compare the keys there with those asked for."""
        self._learn_checksums(reads, wanted, status, causes)
        _check_keys(reads, wanted, status, causes)

    def _learn_checksums(
        self, reads: Sequence[BlockRead], wanted: Sequence[Wanted], status: list[ReadStatus], causes: dict[int, str]
    ) -> None:
        core = self._core
        unknown = [want for want in wanted if want.tables is None]
        if not unknown:
            return
        chunks = [PageChunk(core.port, want.segment.fd, want.extent.offset, want.shape.head_bytes) for want in unknown]
        errors = core.reads.run(chunks, core.config.io_deadline_s)
        for want, chunk, error in zip(unknown, chunks, errors, strict=True):
            if error is not None:
                self._fail(want, status, error)
                continue
            try:
                want.tables = self._checked_head(want, chunk.data)
            except CorruptBlock as damage:
                for _, index in want.blocks:
                    status[index] = ReadStatus.CORRUPT
                    causes[index] = damage.message
                continue
            with core.lock:
                core.headers.put(want.extent.number, want.tables)
        core.counters["read_ios"] += len(chunks)
        core.counters["head_ios"] += len(chunks)

    def _checked_head(self, want: Wanted, data: bytes) -> HeadTables:
        head = unpack_extent_head(memoryview(data))
        extent = want.extent
        found = (head.shape, head.codec, head.segment, head.number, head.offset, head.namespace_id, head.parent)
        expected = (
            want.shape, extent.codec, extent.segment, extent.number, extent.offset, want.space.namespace_id,
            extent.parent,
        )  # fmt: skip
        if found != expected:
            raise CorruptBlock(f"extent {extent.number} is headed by another", field="number")
        return HeadTables(head.keys, head.crcs, head.coded)

    def _check_room(self, reads: Sequence[BlockRead], wanted: Sequence[Wanted]) -> None:
        for want in wanted:
            for _, index in want.blocks:
                read, shape = reads[index], want.shape
                if read.layers is None:
                    needed = shape.block_header_bytes + shape.layers * shape.slice_stride
                else:
                    begin, end = read.layers
                    if not 0 <= begin < end <= shape.layers:
                        raise InvalidArgument("layers", read.layers, f"0 <= begin < end <= {shape.layers}")
                    needed = (end - begin - 1) * shape.slice_stride + shape.slice_bytes
                if len(read.into) < needed:
                    raise InvalidArgument("into", f"{len(read.into)} bytes", f"at least {needed}")

    def _read_slices(self, reads: Sequence[BlockRead], wanted: Sequence[Wanted], status: list[ReadStatus]) -> None:
        core = self._core
        chunks: list[tuple[Wanted, ReadChunk]] = []
        for want in wanted:
            if want.tables is not None:
                pieces = sorted(pieces_of(reads, want, core.config.io_bytes), key=lambda piece: piece.offset)
                chunks += [
                    (want, chunk) for chunk in chunks_of(core.port, want.segment.fd, pieces, core.config.io_bytes)
                ]
        errors = core.reads.run([chunk for _, chunk in chunks], core.config.io_deadline_s)
        for (_, chunk), error in zip(chunks, errors, strict=True):
            if error is not None:
                core.health.read_failed("read", error)
                for piece in chunk.pieces:
                    status[piece.index] = ReadStatus.UNAVAILABLE
        for _, chunk in chunks:
            for index in chunk.corrupt:
                status[index] = ReadStatus.CORRUPT
        if chunks and not any(errors):
            core.health.read_succeeded()
        self._check_large(reads, wanted, status)
        core.counters["read_ios"] += len(chunks)
        core.counters["read_bytes"] += sum(chunk.nbytes for _, chunk in chunks)

    def _check_large(self, reads: Sequence[BlockRead], wanted: Sequence[Wanted], status: list[ReadStatus]) -> None:
        """Slices too large for one read are checked where they arrived."""
        for want in wanted:
            shape, tables = want.shape, want.tables
            if tables is None or shape.pages or shape.slice_stride <= self._core.config.io_bytes - PAGE_BYTES:
                continue
            for position, index in want.blocks:
                begin, end, at = _layers(reads[index], shape)
                for layer in range(begin, end):
                    data = reads[index].into[at : at + shape.slice_bytes]
                    if status[index] is ReadStatus.OK and crc32c(data) != int(tables.crcs[position, layer]):
                        status[index] = ReadStatus.CORRUPT
                    at += shape.slice_stride

    def _fail(self, want: Wanted, status: list[ReadStatus], error: BaseException) -> None:
        self._core.health.read_failed("read of an extent's head", error)
        for _, index in want.blocks:
            status[index] = ReadStatus.UNAVAILABLE

    def _write_headers(self, reads: Sequence[BlockRead], wanted: Sequence[Wanted], status: list[ReadStatus]) -> None:
        for want in wanted:
            for position, index in want.blocks:
                read = reads[index]
                if read.layers is not None or status[index] is not ReadStatus.OK or want.tables is None:
                    continue
                shape = want.shape
                parent = want.tables.key(position - 1) if position else want.extent.parent
                header = BlockHeader(
                    want.extent.codec, shape.layers, shape.slice_bytes, shape.slice_stride, shape.block_header_bytes,
                    want.space.spec.block_tokens, want.space.namespace_id, read.key,
                    parent, tuple(want.tables.crcs[position].tolist()),
                )  # fmt: skip
                pack_header(header, read.into)
                end = shape.block_header_bytes + shape.layers * shape.slice_stride
                stored = align_up(end, PAGE_BYTES)
                read.into[end:stored] = bytes(len(read.into[end:stored]))


def pieces_of(reads: Sequence[BlockRead], want: Wanted, io_bytes: int) -> Iterator[Piece]:
    """Every slice that a call wants of an extent; slices that may not fit one read come in parts, unchecked."""
    shape, tables = want.shape, want.tables
    if tables is None:
        return
    if tables.coded is not None:
        yield from _coded_pieces(reads, want, tables.coded)
        return
    limit = io_bytes - PAGE_BYTES
    for position, index in want.blocks:
        begin, end, at = _layers(reads[index], shape)
        row = tables.crcs[position].tolist()
        into = reads[index].into
        for layer in range(begin, end):
            offset = want.extent.offset + shape.slice_offset(layer, position)
            if shape.slice_stride <= limit:
                yield Piece(offset, shape.slice_stride, into[at : at + shape.slice_stride], index, row[layer],
                            shape.slice_bytes)  # fmt: skip
            else:
                for part in range(0, shape.slice_bytes, limit):
                    size = min(limit, shape.slice_bytes - part)
                    yield Piece(offset + part, size, into[at + part : at + part + size], index, None, 0)
            at += shape.slice_stride


def _coded_pieces(reads: Sequence[BlockRead], want: Wanted, coded: CodedSlices) -> Iterator[Piece]:
    shape, tables = want.shape, want.tables
    if tables is None:
        return
    starts = coded.offsets(want.extent.offset + shape.head_bytes)
    for position, index in want.blocks:
        begin, end, at = _layers(reads[index], shape)
        into = reads[index].into
        columns = (starts[:, position], coded.lengths[:, position], tables.crcs[position])
        for start, nbytes, crc in zip(*(column[begin:end].tolist() for column in columns), strict=True):
            target = into[at : at + shape.slice_stride]
            yield Piece(start, nbytes, target, index, crc, shape.slice_bytes, coded.planes)
            at += shape.slice_stride


def chunks_of(port: DiskPort, fd: int, pieces: Sequence[Piece], io_bytes: int) -> Iterator[ReadChunk]:
    """Join pieces, sorted by offset, into reads of whole pages."""
    held: list[Piece] = []
    begin = end = 0
    for piece in pieces:
        piece_end = align_up(piece.offset + piece.nbytes, PAGE_BYTES)
        if held and piece.offset - end <= GAP_BYTES_MAX and piece_end - begin <= io_bytes:
            held.append(piece)
            end = max(end, piece_end)
            continue
        if held:
            yield ReadChunk(port, fd, begin, end - begin, held)
        held, begin, end = [piece], piece.offset // PAGE_BYTES * PAGE_BYTES, piece_end
    if held:
        yield ReadChunk(port, fd, begin, end - begin, held)


def _layers(read: BlockRead, shape: ExtentShape) -> tuple[int, int, int]:
    """First and last layer of a read, and where its first slice goes."""
    if read.layers is None:
        return 0, shape.layers, shape.block_header_bytes
    return *read.layers, 0


def _check_keys(
    reads: Sequence[BlockRead], wanted: Sequence[Wanted], status: list[ReadStatus], causes: dict[int, str]
) -> None:
    """Compare what an extent's head says with what is asked for, also where the head was known before."""
    for want in wanted:
        for position, index in want.blocks if want.tables is not None else ():
            if want.tables is not None and want.tables.key(position) != reads[index].key:
                status[index] = ReadStatus.CORRUPT
                causes[index] = "the extent holds another key there"
