"""The index journal: frames of records, each frame written and synced before the next.

::

    file head, 512 bytes: magic "KVJRNAL1", u32 version 1, u32 generation, u32 CRC of the 16 bytes before; zeros
    frame head, 32 bytes at a multiple of 512:
        0   4   magic "KVJF"
        4   4   generation
        8   8   frame number, from 0
        16  4   payload bytes
        20  4   records
        24  4   CRC of the payload
        28  4   CRC of bytes 0..28
    payload: records, then zeros up to a multiple of 512

    record: u8 type, u8 0, u16 count, u32 body bytes, body
    type 1, an extent became live: u64 extent, u64 offset, u64 age, u32 segment, u8 codec, u8 coding, u16 0,
            32 bytes namespace, 32 bytes parent of block 0, u32 pages if coding is 1, count keys of 32 bytes
    type 2, blocks died: count times (u64 extent, u16 position); unknown ones mean nothing
    type 3, blocks moved: count times (u64 extent, u16 position, u64 new extent, u16 new position), behind the type 1
            of the new extent. One that is dead at its old place is dead at the new one; a later type 2 that names
            the old place means the new one.

A frame is valid if and only if both CRCs agree, its generation is the file's, and its number follows the frame
before. All records of a frame count, or none: that makes a run of blocks, or a move (type 1 with type 3), atomic.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import KEY_BYTES, BlockKey, Codec, NamespaceId
from kvstore.kernels import codecs
from kvstore.kernels.layout import align_up
from kvstore.tiers.ssd.format import (
    CODING_LZ4,
    CODING_PLAIN,
    VERSION,
    can_be,
    refuse_version,
)

SECTOR_BYTES: Final = 512
FRAME_HEAD_BYTES: Final = 32

_FILE: Final = struct.Struct("<8sII")
_FILE_MAGIC: Final = b"KVJRNAL1"
_FRAME: Final = struct.Struct("<4sIQIII")
_FRAME_MAGIC: Final = b"KVJF"
_CRC: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<BxHI")
_EXTENT: Final = struct.Struct("<QQQIBB2x32s32s")
_PAGES: Final = struct.Struct("<I")
_DEAD: Final = struct.Struct("<QH")
_MOVED: Final = struct.Struct("<QHQH")
_TYPE_EXTENT: Final = 1
_TYPE_DROP: Final = 2
_TYPE_MOVE: Final = 3
_DROPS_MAX: Final = 4096


def journal_name(generation: int) -> str:
    """File name of a journal."""
    return f"journal-{generation:08d}"


@dataclass(frozen=True, slots=True)
class ExtentRecord:
    """An extent became live; ``keys`` is 32 bytes a block, ``pages`` as in ExtentShape."""

    number: int
    segment: int
    offset: int
    age: int
    codec: Codec
    namespace_id: NamespaceId
    parent: BlockKey
    keys: bytes
    pages: int = 0

    @property
    def blocks(self) -> int:
        """Blocks of the extent."""
        return len(self.keys) // KEY_BYTES

    def key(self, position: int) -> BlockKey:
        """Key of one block."""
        return BlockKey(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])


@dataclass(frozen=True, slots=True)
class DropRecord:
    """Blocks died: pairs of extent number and position."""

    dead: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """Blocks moved: old extent and position, new extent and position."""

    moved: tuple[tuple[int, int, int, int], ...]


Record = ExtentRecord | DropRecord | MoveRecord


def pack_extent(record: ExtentRecord) -> bytes:
    """The bytes of one record."""
    coding = CODING_LZ4 if record.pages else CODING_PLAIN
    body = _EXTENT.pack(
        record.number, record.offset, record.age, record.segment, record.codec, coding, record.namespace_id,
        record.parent,
    )  # fmt: skip
    body += (_PAGES.pack(record.pages) if record.pages else b"") + record.keys
    return _RECORD.pack(_TYPE_EXTENT, record.blocks, len(body)) + body


def pack_drops(dead: Sequence[tuple[int, int]]) -> bytes:
    """The bytes of as many drop records as ``dead`` needs."""
    return _pack_pairs(_TYPE_DROP, _DEAD, dead)


def pack_moves(moved: Sequence[tuple[int, int, int, int]]) -> bytes:
    """The bytes of as many move records as ``moved`` needs."""
    return _pack_pairs(_TYPE_MOVE, _MOVED, moved)


def _pack_pairs(kind: int, entry: struct.Struct, values: Sequence[tuple[int, ...]]) -> bytes:
    parts: list[bytes] = []
    for begin in range(0, len(values), _DROPS_MAX):
        some = values[begin : begin + _DROPS_MAX]
        body = b"".join(entry.pack(*value) for value in some)
        parts.append(_RECORD.pack(kind, len(some), len(body)) + body)
    return b"".join(parts)


def pack_file_head(generation: int) -> bytes:
    """The first sector of a journal."""
    fixed = _FILE.pack(_FILE_MAGIC, VERSION, generation)
    return (fixed + _CRC.pack(crc32c(fixed))).ljust(SECTOR_BYTES, b"\0")


def check_file_head(data: memoryview, generation: int) -> None:
    """Raise CorruptBlock unless ``data`` heads this journal, TierUnavailable for a version not known."""
    name = journal_name(generation)
    if len(data) < SECTOR_BYTES:
        raise CorruptBlock(f"{name} holds {len(data)} bytes; expected a head", field="length")
    magic, version, found = _FILE.unpack_from(data)
    (crc,) = _CRC.unpack_from(data, _FILE.size)
    if magic != _FILE_MAGIC or crc != crc32c(data[: _FILE.size]):
        raise CorruptBlock(f"the head of {name} is damaged", field="crc")
    if version != VERSION:
        raise refuse_version(name, version)
    if found != generation:
        raise CorruptBlock(f"{name} says it is generation {found}", field="generation")


def pack_frame(generation: int, number: int, records: Sequence[bytes]) -> bytes:
    """One frame, padded to the sector."""
    payload = b"".join(records)
    fixed = _FRAME.pack(_FRAME_MAGIC, generation, number, len(payload), len(records), crc32c(payload))
    frame = fixed + _CRC.pack(crc32c(fixed)) + payload
    return frame.ljust(align_up(len(frame), SECTOR_BYTES), b"\0")


@dataclass(frozen=True, slots=True)
class Frame:
    """One valid frame: where it ends in the file, its number and its records."""

    end: int
    number: int
    records: tuple[Record, ...]


def read_frame(data: memoryview, at: int, generation: int) -> Frame | None:
    """The valid frame at an offset, or None."""
    if at + FRAME_HEAD_BYTES > len(data):
        return None
    magic, found, number, length, _, payload_crc = _FRAME.unpack_from(data, at)
    (crc,) = _CRC.unpack_from(data, at + _FRAME.size)
    begin = at + FRAME_HEAD_BYTES
    if magic != _FRAME_MAGIC or crc != crc32c(data[at : at + _FRAME.size]) or found != generation:
        return None
    if begin + length > len(data) or payload_crc != crc32c(data[begin : begin + length]):
        return None
    try:
        records = tuple(_records(data[begin : begin + length]))
    except (CorruptBlock, struct.error):
        return None
    return Frame(align_up(begin + length, SECTOR_BYTES), number, records)


def _records(payload: memoryview) -> Iterator[Record]:
    at = 0
    while at < len(payload):
        kind, count, length = _RECORD.unpack_from(payload, at)
        body = payload[at + _RECORD.size : at + _RECORD.size + length]
        at += _RECORD.size + length
        if kind == _TYPE_EXTENT and length == len(body) >= _EXTENT.size:
            yield _extent(body, count)
        elif kind == _TYPE_DROP and length == count * _DEAD.size == len(body):
            yield DropRecord(tuple((number, position) for number, position in _DEAD.iter_unpack(body)))
        elif kind == _TYPE_MOVE and length == count * _MOVED.size == len(body):
            yield MoveRecord(tuple((old, at, new, to) for old, at, new, to in _MOVED.iter_unpack(body)))
        else:
            raise CorruptBlock(f"a record of type {kind}, {count} entries, {length} bytes", field="record")


def _extent(body: memoryview, count: int) -> ExtentRecord:
    number, offset, age, segment, codec, coding, namespace_id, parent = _EXTENT.unpack_from(body)
    rest, pages = body[_EXTENT.size :], 0
    if coding == CODING_LZ4:
        (pages,) = _PAGES.unpack_from(rest)
        rest = rest[_PAGES.size :]
    known = pages > 0 if coding == CODING_LZ4 else coding == CODING_PLAIN
    believed = can_be(number, age, segment, offset)
    if not codecs.known(codec) or not known or not believed or not count or len(rest) != count * KEY_BYTES:
        raise CorruptBlock(f"an extent of codec {codec}, coding {coding}, {pages} pages", field="codec")
    return ExtentRecord(
        number, segment, offset, age, Codec(codec), NamespaceId(namespace_id), BlockKey(parent), bytes(rest), pages
    )
