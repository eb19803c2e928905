"""What lies where in a directory of the SSD tier, version 1. All integers little-endian; CRC is CRC-32C.

::

    LOCK                    flock of the daemon that holds the directory, and its pid as text
    namespaces              specs and policies (catalog.py)
    checkpoint-GGGGGGGG     every block that lived when journal G began (checkpoint.py)
    journal-GGGGGGGG        what was committed and dropped since (journal.py)
    segment-SSSSSSSS        the bytes of blocks
    quarantine/             bytes set aside, one file each (quarantine.py)
    *.tmp                   half-made files; removed at start

A segment is one page of head and then extents, each at a page boundary; pages between extents that no record
names have no meaning. Segments are only ever appended to, numbers of segments and extents are never used again.

Segment head, 4,096 bytes::

    offset  size  field
    0       8     magic "KVSEGMT1"
    8       4     version, 1
    12      4     segment number
    16      4     CRC of bytes 0..16
    20      4076  0

An extent is a run of ``blocks`` consecutive blocks of one chain under one codec, laid out layer by layer::

    head        head_bytes, a multiple of 4,096 (below)
    layer 0     slice of block 0, slice of block 1, ... each slice_stride bytes
    layer 1     ...
    padding     0 up to a page boundary

so slice (layer l, block b) starts at ``head_bytes + (l * blocks + b) * slice_stride`` of the extent, and any run of
blocks of one layer, or of layers of the whole extent, is one contiguous read. Under coding 1 (``lossless.py``) the
slices are coded, each by itself, and follow one another in the same order without gaps; where each lies follows from
the table of their lengths. Extent head::

    offset  size  field
    0       8     magic "KVXTENT1"
    8       4     version, 1
    12      1     codec (types.Codec)
    13      1     coding, 0: slices as they are, 1: coded one by one
    14      2     0
    16      4     blocks, 1 to 65,535
    20      4     layers
    24      4     block_tokens
    28      4     segment number
    32      8     extent number
    40      8     offset of the extent in the segment
    48      8     age, grows with recency of writing (and of use: the checkpoint has the latest)
    56      8     slice_bytes
    64      8     slice_stride
    72      4     header_bytes of a stored block
    76      4     head_bytes
    80      32    namespace id
    112     32    parent key of block 0; block b > 0 has the key of block b - 1 as its parent
    144     4     coding 1: pages of the extent, else 0
    148     1     coding 1: byte planes that slices were split into (1, 2 or 4), else 0
    149     99    0
    248     4     CRC of the tables
    252     4     CRC of bytes 0..252
    256     32*n  keys of the blocks
    ...     4*n*L CRC of each slice's slice_bytes (decoded), block by block
    ...     4*n*L coding 1: coded length of each slice, layer by layer; slice_bytes: it is not coded
    ...           0 up to head_bytes

A block is valid if and only if a checkpoint or journal names its extent and position, the extent head's CRCs agree,
the head's numbers, key and lengths equal those of the name, and the CRC of every slice asked for agrees.

Order: (1) segment data, head and slices in any order; (2) fdatasync of the segment, and of the directory when the
segment is new; (3) one frame in the journal; (4) fdatasync of the journal; (5) the commit is acknowledged. So (2)
orders data before its name, and (4) the name before the acknowledgement. A segment is unlinked only after the frames
that drop or move its blocks are synced.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from kvstore.core.errors import CorruptBlock, TierUnavailable
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import KEY_BYTES, BlockKey, Codec, NamespaceId
from kvstore.kernels.layout import align_up
from kvstore.tiers.lossless import CODED_SLICE_BYTES_MAX, PLANES

VERSION: Final = 1
LOCK_NAME: Final = "LOCK"
PAGE_BYTES: Final = 4096
SEGMENT_HEAD_BYTES: Final = PAGE_BYTES
EXTENT_BLOCKS_MAX: Final = 65535
HEAD_BYTES_MAX: Final = 1 << 20
"""No extent is made that needs a larger head: heads are read in one piece."""
CODING_PLAIN: Final = 0
CODING_LZ4: Final = 1

_SEGMENT_MAGIC: Final = b"KVSEGMT1"
_EXTENT_MAGIC: Final = b"KVXTENT1"
_SEGMENT: Final = struct.Struct("<8sII")
_EXTENT: Final = struct.Struct("<8sIBB2xIIIIQQQQQII32s32sIB99x")
_CRC: Final = struct.Struct("<I")
EXTENT_FIXED_BYTES: Final = _EXTENT.size + 8


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"segment-{number:08d}"


NUMBER_MAX: Final = (1 << 32) - (1 << 20)
"""Most that the number of a journal, checkpoint or segment can be: what is said to have a larger one is not believed,
since the numbers that follow would not fit."""
COUNT_MAX: Final = 1 << 62
"""The same for extents and ages."""


def can_be(number: int, age: int, segment: int, offset: int) -> bool:
    """Whether an extent can have such numbers: that a checksum is right says nothing of who made it."""
    place = SEGMENT_HEAD_BYTES <= offset < PAGE_BYTES << 32 and offset % PAGE_BYTES == 0
    return place and 0 < number <= COUNT_MAX and age <= COUNT_MAX and 0 < segment <= NUMBER_MAX


def file_number(name: str, kind: str) -> int | None:
    """The number in the name of a file of a kind ("journal", "segment"); None if it is no such name."""
    head, _, digits = name.partition("-")
    if head != kind or not digits.isascii() or not digits.isdigit() or len(digits) > 10:
        return None
    number = int(digits)
    return number if number <= NUMBER_MAX and digits == f"{number:08d}" else None


def refuse_version(what: str, found: int) -> TierUnavailable:
    """The error for a file of a format that this build does not read."""
    return TierUnavailable(
        f"{what} has format version {found}; this build reads version {VERSION}. Nothing was changed: start the build"
        " that wrote it, or give this one an empty directory",
        field="version",
        value=found,
        expected=str(VERSION),
    )


@dataclass(frozen=True, slots=True)
class ExtentShape:
    """The lengths of an extent; every offset is from its first byte.

    ``pages`` is 0 where slices lie as they are, and the length of an extent with coded slices.
    """

    blocks: int
    layers: int
    slice_bytes: int
    slice_stride: int
    block_header_bytes: int
    pages: int = 0

    @classmethod
    def of(cls, layout: BlockLayout, codec: Codec, blocks: int, pages: int = 0) -> ExtentShape:
        """The shape of ``blocks`` blocks of a layout under a codec."""
        slice_bytes, stride, _ = layout.of_codec(codec)
        return cls(blocks, layout.units_of(codec), slice_bytes, stride, layout.header_bytes, pages)

    @property
    def tables_bytes(self) -> int:
        """Bytes of keys, checksums and coded lengths."""
        return self.blocks * (KEY_BYTES + (8 if self.pages else 4) * self.layers)

    @property
    def head_bytes(self) -> int:
        """Bytes before the first slice."""
        return align_up(EXTENT_FIXED_BYTES + self.tables_bytes, PAGE_BYTES)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of all blocks."""
        return self.blocks * self.slice_stride

    @property
    def total_bytes(self) -> int:
        """Bytes of the extent, a multiple of the page."""
        if self.pages:
            return self.pages * PAGE_BYTES
        return align_up(self.head_bytes + self.layers * self.layer_bytes, PAGE_BYTES)

    def slice_offset(self, layer: int, position: int) -> int:
        """Where a slice starts that is not coded."""
        return self.head_bytes + (layer * self.blocks + position) * self.slice_stride


@dataclass(frozen=True, slots=True)
class CodedSlices:
    """The table of an extent under coding 1: ``lengths`` is uint32 [layers, blocks]."""

    planes: int
    lengths: NDArray[np.uint32]

    def offsets(self, head_bytes: int) -> NDArray[np.int64]:
        """Where each slice starts, from the extent's first byte, [layers, blocks]."""
        ends = np.cumsum(self.lengths.reshape(-1), dtype=np.int64).reshape(self.lengths.shape)
        return ends - self.lengths + head_bytes

    def places(self, head_bytes: int, position: int) -> list[tuple[int, int]]:
        """Start and length of each slice of one block, by layer."""
        starts = self.offsets(head_bytes)[:, position].tolist()
        return list(zip(starts, self.lengths[:, position].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class ExtentHead:
    """What an extent says of itself. ``keys`` is 32 bytes a block, ``crcs`` is uint32 [blocks, layers]."""

    shape: ExtentShape
    codec: Codec
    block_tokens: int
    segment: int
    number: int
    offset: int
    age: int
    namespace_id: NamespaceId
    parent: BlockKey
    keys: bytes
    crcs: NDArray[np.uint32]
    coded: CodedSlices | None = None


def pack_segment_head(number: int) -> bytes:
    """The first page of a segment."""
    fixed = _SEGMENT.pack(_SEGMENT_MAGIC, VERSION, number)
    return (fixed + _CRC.pack(crc32c(fixed))).ljust(SEGMENT_HEAD_BYTES, b"\0")


def check_segment_head(data: memoryview, number: int) -> None:
    """Raise CorruptBlock unless ``data`` heads this segment, TierUnavailable for a version not known."""
    if len(data) < _SEGMENT.size + 4:
        raise CorruptBlock(f"{segment_name(number)} holds {len(data)} bytes; expected a head", field="length")
    magic, version, found = _SEGMENT.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _SEGMENT.size)
    if magic != _SEGMENT_MAGIC or crc != crc32c(data[: _SEGMENT.size]):
        raise CorruptBlock(f"the head of {segment_name(number)} is damaged", field="crc")
    if version != VERSION:
        raise refuse_version(segment_name(number), version)
    if found != number:
        raise CorruptBlock(f"{segment_name(number)} says it is number {found}", field="segment")


def pack_extent_head(head: ExtentHead) -> bytes:
    """The first ``head_bytes`` of an extent."""
    shape = head.shape
    tables = head.keys + np.ascontiguousarray(head.crcs, dtype="<u4").tobytes()
    coding, planes = CODING_PLAIN, 0
    if head.coded is not None:
        coding, planes = CODING_LZ4, head.coded.planes
        tables += np.ascontiguousarray(head.coded.lengths, dtype="<u4").tobytes()
    fixed = _EXTENT.pack(
        _EXTENT_MAGIC, VERSION, head.codec, coding, shape.blocks, shape.layers, head.block_tokens, head.segment,
        head.number, head.offset, head.age, shape.slice_bytes, shape.slice_stride, shape.block_header_bytes,
        shape.head_bytes, head.namespace_id, head.parent, shape.pages, planes,
    )  # fmt: skip
    fixed += _CRC.pack(crc32c(tables))
    return (fixed + _CRC.pack(crc32c(fixed)) + tables).ljust(shape.head_bytes, b"\0")


def unpack_extent_head(data: memoryview) -> ExtentHead:
    """Read and check an extent head; raises CorruptBlock saying what is wrong. ``data`` may be longer than the head."""
    if len(data) < EXTENT_FIXED_BYTES:
        raise CorruptBlock(f"an extent head of {len(data)} bytes", field="length")
    (
        magic, version, codec, coding, blocks, layers, tokens, segment, number, offset, age, slice_bytes, slice_stride,
        block_header_bytes, head_bytes, namespace_id, parent, pages, planes,
    ) = _EXTENT.unpack_from(data)  # fmt: skip
    tables_crc, crc = struct.unpack_from("<II", data, _EXTENT.size)
    if magic != _EXTENT_MAGIC:
        raise CorruptBlock(f"the magic of an extent is {magic!r}", field="magic")
    if crc != crc32c(data[: _EXTENT.size + 4]):
        raise CorruptBlock("the CRC of an extent head differs", field="crc")
    if version != VERSION:
        raise CorruptBlock(f"an extent of format version {version}", field="version")
    shape = ExtentShape(blocks, layers, slice_bytes, slice_stride, block_header_bytes, pages)
    end = EXTENT_FIXED_BYTES + shape.tables_bytes
    known = coding == CODING_LZ4 if pages else coding == CODING_PLAIN
    if head_bytes != shape.head_bytes or end > len(data) or codec not in set(Codec) or not known:
        raise CorruptBlock(f"an extent head of {head_bytes} bytes, codec {codec}, coding {coding}", field="lengths")
    tables = data[EXTENT_FIXED_BYTES:end]
    if tables_crc != crc32c(tables):
        raise CorruptBlock("the CRC of an extent's tables differs", field="tables")
    keys = bytes(tables[: blocks * KEY_BYTES])
    numbers = np.frombuffer(tables, dtype="<u4", offset=blocks * KEY_BYTES).astype(np.uint32)
    crcs = numbers[: blocks * layers].reshape(blocks, layers)
    coded = CodedSlices(planes, numbers[blocks * layers :].reshape(layers, blocks)) if pages else None
    if coded is not None:
        _check_coded(shape, coded)
    return ExtentHead(
        shape, Codec(codec), tokens, segment, number, offset, age, NamespaceId(namespace_id), BlockKey(parent), keys,
        crcs, coded,
    )  # fmt: skip


def _check_coded(shape: ExtentShape, coded: CodedSlices) -> None:
    """Raise CorruptBlock unless every coded slice lies within the extent and is no longer than a slice."""
    lengths = coded.lengths
    end = shape.head_bytes + int(lengths.sum(dtype=np.uint64))
    if (
        coded.planes not in PLANES
        or shape.slice_bytes % coded.planes
        or shape.slice_bytes > CODED_SLICE_BYTES_MAX
        or not int(lengths.min(initial=1))
        or int(lengths.max(initial=0)) > shape.slice_bytes
        or align_up(end, PAGE_BYTES) != shape.total_bytes
    ):
        raise CorruptBlock(
            f"coded slices end at {end} of {shape.total_bytes}, {coded.planes} planes, slices of {shape.slice_bytes}",
            field="coding",
        )


def extent_segment(page: bytes) -> int | None:
    """The segment that a page names if an extent may begin there; its checks come later."""
    if len(page) < EXTENT_FIXED_BYTES or page[:8] != _EXTENT_MAGIC:
        return None
    return int(_EXTENT.unpack_from(page)[7])


def split_keys(packed: bytes) -> Sequence[BlockKey]:
    """The keys of a packed list."""
    return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]
