"""When the checkpoint is lost: segments speak for themselves. Reads every byte of them, so it takes long.

Extents are found by their heads, page by page, and their blocks adopted when every slice's CRC agrees. Blocks that
were moved are found twice; the later extent counts. Blocks dropped before the lost checkpoint come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import BlockKey
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.core import Core, log
from kvstore.tiers.ssd.files import read_pages, read_range
from kvstore.tiers.ssd.format import (
    HEAD_BYTES_MAX,
    SEGMENT_HEAD_BYTES,
    CodedSlices,
    ExtentHead,
    ExtentShape,
    can_be,
    unpack_extent_head,
)
from kvstore.tiers.ssd.journal import ExtentRecord
from kvstore.tiers.ssd.transfer import Piece, deliver

STRIDE_BYTES: Final = 1 << 20
"""Bytes looked at for the next head at a time."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """An extent found in a segment, and which of its blocks are whole."""

    record: ExtentRecord
    whole: tuple[int, ...]


def find_extents(core: Core, number: int, fd: int, size: int) -> Iterator[Adopted]:
    """Every extent of a segment that this build can explain, in order of offset."""
    at = SEGMENT_HEAD_BYTES
    while at < size:
        head = _head_at(core, number, fd, at)
        if head is None:
            at = _next_head(core, fd, at + PAGE_BYTES, size)
            continue
        whole = tuple(position for position in range(head.shape.blocks) if _is_whole(core, fd, head, position))
        if whole:
            yield Adopted(
                ExtentRecord(
                    head.number, number, at, head.age, head.codec, head.namespace_id, head.parent, head.keys,
                    head.shape.pages,
                ),
                whole,
            )  # fmt: skip
        at += head.shape.total_bytes


def _head_at(core: Core, number: int, fd: int, at: int) -> ExtentHead | None:
    try:
        first = read_pages(core, fd, at, PAGE_BYTES)
        if first[:8] != b"KVXTENT1":
            return None
        head = unpack_extent_head(memoryview(read_pages(core, fd, at, HEAD_BYTES_MAX)))
    except CorruptBlock as error:
        log.warning("salvage: segment %d at %d: %s", number, at, error.message)
        return None
    index = core.space_index.get(head.namespace_id)
    if index is None or head.segment != number or head.offset != at or not can_be(head.number, head.age, number, at):
        return None
    expected = ExtentShape.of(core.spaces[index].layout, head.codec, head.shape.blocks, head.shape.pages)
    return head if expected == head.shape else None


def _next_head(core: Core, fd: int, begin: int, size: int) -> int:
    """The next page that begins like an extent, or ``size``."""
    for at in range(begin, size, STRIDE_BYTES):
        data = read_pages(core, fd, at, min(STRIDE_BYTES, size - at))
        for page in range(0, len(data), PAGE_BYTES):
            if data[page : page + 8] == b"KVXTENT1":
                return at + page
    return size


def _is_whole(core: Core, fd: int, head: ExtentHead, position: int) -> bool:
    shape = head.shape
    if head.coded is not None:
        return _is_whole_coded(core, fd, head, head.coded, position)
    for layer in range(shape.layers):
        offset = head.offset + shape.slice_offset(layer, position)
        begin = offset // PAGE_BYTES * PAGE_BYTES
        crc, at, left = 0, offset - begin, shape.slice_bytes
        while left:
            data = read_pages(core, fd, begin, min(STRIDE_BYTES, at + left))
            some = data[at : at + left]
            if not some:
                return False
            crc, left = crc32c(some, crc), left - len(some)
            begin, at = begin + len(data), 0
        if crc != int(head.crcs[position, layer]):
            return False
    return True


def _is_whole_coded(core: Core, fd: int, head: ExtentHead, coded: CodedSlices, position: int) -> bool:
    into = memoryview(bytearray(head.shape.slice_bytes))
    for layer, (offset, nbytes) in enumerate(coded.places(head.shape.head_bytes, position)):
        data = memoryview(read_range(core, fd, head.offset + offset, nbytes))
        piece = Piece(0, nbytes, into, 0, int(head.crcs[position, layer]), len(into), coded.planes)
        if len(data) != nbytes or not deliver(piece, data):
            return False
    return True


def later_copies(found: list[Adopted]) -> dict[tuple[bytes, BlockKey], int]:
    """The latest extent number that holds each block."""
    latest: dict[tuple[bytes, BlockKey], int] = {}
    for one in found:
        for position in one.whole:
            name = (one.record.namespace_id, one.record.key(position))
            latest[name] = max(latest.get(name, 0), one.record.number)
    return latest
