"""The checkpoint: the tables in columns, so that a million blocks load in well under a second.

::

    0   8   magic "KVCHECK1"
    8   4   version, 1; 2 where namespaces are more than 65,535
    12  4   generation: journals of this generation and later follow it
    16  8   next extent number
    24  4   next segment number
    28  4   namespaces
    32  8   extents
    40  8   blocks
    48  8   bytes of the columns
    56  4   CRC of the columns
    60  4   CRC of bytes 0..60
    64      columns, one after another: namespace ids (32 bytes each); of the extents number u64, age u64, offset
            u64, segment u32, blocks u16, space u16 (index in this file's list; u32 in
            version 2), codec u8 (128 is added where slices
            are coded), parent (32 bytes); of the blocks extent u32 (row in this file), position u16, key (32 bytes);
            pages u32 of the extents with coded slices

It is written as ``checkpoint-N.tmp``, synced, renamed, and the directory synced. The one with the largest
generation counts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from kvstore.core.errors import CorruptBlock
from kvstore.core.types import KEY_BYTES, NamespaceId
from kvstore.kernels import codecs
from kvstore.tiers.ssd.catalog import Space
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.format import COUNT_MAX, NUMBER_MAX, VERSION, refuse_version
from kvstore.tiers.ssd.table import NO_ROW, BlockTable

HEAD_BYTES: Final = 64
EXTENT_ROW_BYTES: Final = 33 + KEY_BYTES
BLOCK_ROW_BYTES: Final = 6 + KEY_BYTES
CODED_ROW_BYTES: Final = 4
_CODED: Final = 0x80

_MAGIC: Final = b"KVCHECK1"
_HEAD: Final = struct.Struct("<8sIIQIIQQQI")
_CRC: Final = struct.Struct("<I")
_EXTENT_COLUMNS: Final = {
    "number": "<u8", "age": "<u8", "offset": "<u8", "segment": "<u4", "blocks": "<u2", "space": "<u4", "codec": "u1",
}  # fmt: skip
_NARROW: Final = {"space": "<u2"}
"""What version 1 has instead."""
VERSION_WIDE: Final = 2
WIDE_BYTES: Final = 2
"""What an extent's row takes more in it."""
NARROW_MAX: Final = 0xFFFF
"""Most namespaces of a file of version 1, which older builds read, too."""


def checkpoint_name(generation: int) -> str:
    """File name of a checkpoint."""
    return f"checkpoint-{generation:08d}"


def checkpoint_bytes(extents: int, blocks: int, spaces: int, coded: int) -> int:
    """Size of a checkpoint of so many rows, ``coded`` of the extents with coded slices."""
    fixed = HEAD_BYTES + spaces * KEY_BYTES + (extents * WIDE_BYTES if spaces > NARROW_MAX else 0)
    return fixed + extents * EXTENT_ROW_BYTES + blocks * BLOCK_ROW_BYTES + coded * CODED_ROW_BYTES


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds; ``extents`` has a column "pages", 0 where slices are not coded."""

    generation: int
    next_extent: int
    next_segment: int
    namespaces: tuple[NamespaceId, ...]
    extents: dict[str, NDArray[np.generic]]
    parents: NDArray[np.uint8]
    block_extent: NDArray[np.uint32]
    block_position: NDArray[np.uint16]
    block_keys: NDArray[np.uint8]


def snapshot(table: BlockTable, spaces: Sequence[Space], head: tuple[int, int, int]) -> Checkpoint:
    """The committed rows of a copy of the tables, and the namespaces that they are of.

    ``head`` is generation, next extent, next segment; ``spaces`` are those of the tables' indices.
    """
    committed = np.frombuffer(table.extent_committed, dtype=np.uint8) != 0
    used = np.frombuffer(table.extent_segment, dtype=np.uint32) != NO_ROW
    rows = np.flatnonzero(committed & used & (np.frombuffer(table.extent_live, dtype=np.uint16) != 0))
    new_row = np.full(len(committed) + 1, NO_ROW, dtype=np.uint32)
    new_row[rows] = np.arange(len(rows), dtype=np.uint32)
    column = np.frombuffer(table.block_extent, dtype=np.uint32)
    # The last entry of new_row stands for "no extent": free rows of blocks point at it.
    block_extent = new_row[np.minimum(column, len(committed))]
    blocks = np.flatnonzero(block_extent != NO_ROW)
    extents: dict[str, NDArray[np.generic]] = {
        name: np.frombuffer(getattr(table, f"extent_{name}"), dtype=kind)[rows]
        for name, kind in (_EXTENT_COLUMNS | {"pages": "<u4"}).items()
        if name != "offset"
    }
    used, extents["space"] = np.unique(extents["space"].view(np.uint32), return_inverse=True)
    extents["offset"] = np.frombuffer(table.extent_page, dtype=np.uint32)[rows].astype("<u8") * PAGE_BYTES
    return Checkpoint(
        *head,
        tuple(spaces[index].namespace_id for index in used.tolist()),
        extents,
        table.extent_parent.rows(rows),
        block_extent[blocks],
        np.frombuffer(table.block_position, dtype=np.uint16)[blocks],
        table.block_key.rows(blocks),
    )


def pack_checkpoint(found: Checkpoint) -> list[bytes]:
    """The file, in parts: the head first, then the columns."""
    parts = [b"".join(found.namespaces)]
    pages = found.extents["pages"].astype("<u4")
    codecs = np.where(pages > 0, found.extents["codec"].astype(np.uint8) | _CODED, found.extents["codec"])
    columns = found.extents | {"codec": codecs.astype(np.uint8)}
    version, kinds = _form(len(found.namespaces))
    parts += [columns[name].astype(kind, copy=False).tobytes() for name, kind in kinds.items()]
    parts.append(found.parents.tobytes())
    parts += [found.block_extent.tobytes(), found.block_position.tobytes(), found.block_keys.tobytes()]
    parts.append(pages[pages > 0].tobytes())
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    fixed = _HEAD.pack(
        _MAGIC, version, found.generation, found.next_extent, found.next_segment, len(found.namespaces),
        len(found.parents), len(found.block_extent), sum(map(len, parts)), crc,
    )  # fmt: skip
    return [fixed + _CRC.pack(crc32c(fixed)), *parts]


def _form(spaces: int) -> tuple[int, dict[str, str]]:
    """Version of a file of so many namespaces, and the kinds of its columns of extents."""
    return (VERSION_WIDE, _EXTENT_COLUMNS) if spaces > NARROW_MAX else (VERSION, _EXTENT_COLUMNS | _NARROW)


def unpack_checkpoint(data: memoryview, generation: int) -> Checkpoint:
    """Read and check a checkpoint; raises CorruptBlock, or TierUnavailable for a version not known."""
    name = checkpoint_name(generation)
    if len(data) < HEAD_BYTES:
        raise CorruptBlock(f"{name} holds {len(data)} bytes", field="length")
    magic, version, found, next_extent, next_segment, spaces, extents, blocks, length, columns_crc = _HEAD.unpack_from(
        data
    )
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    if magic != _MAGIC or crc != crc32c(data[: _HEAD.size]):
        raise CorruptBlock(f"the head of {name} is damaged", field="crc")
    known, kinds = _form(spaces)
    if version not in (known, VERSION):
        raise refuse_version(name, version)
    if version != known:
        raise CorruptBlock(f"{name} has version {version} and {spaces} namespaces", field="namespaces")
    coded = (len(data) - checkpoint_bytes(extents, blocks, spaces, 0)) // CODED_ROW_BYTES
    whole = len(data) == checkpoint_bytes(extents, blocks, spaces, coded) and 0 <= coded <= extents
    if found != generation or HEAD_BYTES + length != len(data) or not whole:
        raise CorruptBlock(f"{name} holds {len(data)} bytes of generation {found}", field="length")
    if columns_crc != crc32c(data[HEAD_BYTES:]):
        raise CorruptBlock(f"the columns of {name} are damaged", field="columns")
    reader = _Columns(data)
    ids = reader.take("u1", spaces * KEY_BYTES).tobytes()
    namespaces = tuple(NamespaceId(ids[at : at + KEY_BYTES]) for at in range(0, len(ids), KEY_BYTES))
    columns = {column: reader.take(kind, extents) for column, kind in kinds.items()}
    parents = reader.take("u1", extents * KEY_BYTES).view(np.uint8).reshape(-1, KEY_BYTES)
    block_extent = reader.take("<u4", blocks).view(np.uint32)
    block_position = reader.take("<u2", blocks).view(np.uint16)
    keys = reader.take("u1", blocks * KEY_BYTES).view(np.uint8).reshape(-1, KEY_BYTES)
    codecs = columns["codec"].view(np.uint8)
    if int((codecs >= _CODED).sum()) != coded:
        raise CorruptBlock(f"{name} has {coded} rows of coded extents", field="pages")
    columns["pages"] = np.zeros(extents, dtype=np.uint32)
    columns["pages"][codecs >= _CODED] = reader.take("<u4", coded)
    columns["codec"] = codecs & (_CODED - 1)
    made = Checkpoint(
        generation, next_extent, next_segment, namespaces, columns, parents, block_extent, block_position, keys
    )
    _check_rows(name, made)
    return made


def _check_rows(name: str, found: Checkpoint) -> None:
    """Raise CorruptBlock unless every number is one that this build can have written: checksums tell nothing of who
    wrote them, and the tables are filled from the columns as they are."""
    extents = found.extents
    numbers, offsets = extents["number"].astype(np.uint64), extents["offset"].astype(np.uint64)
    blocks, rows = extents["blocks"].astype(np.uint32), found.block_extent
    places = (rows.astype(np.uint64) << np.uint64(16)) | found.block_position
    right = (
        0 < found.next_extent <= 2 * COUNT_MAX
        and 0 < found.next_segment <= NUMBER_MAX
        and bool(((numbers > 0) & (numbers < found.next_extent)).all())
        and len(np.unique(numbers)) == len(numbers)
        and bool((extents["age"].astype(np.uint64) < found.next_extent).all())
        and bool((extents["segment"].astype(np.uint32) < found.next_segment).all())
        and bool(((offsets >= PAGE_BYTES) & (offsets < PAGE_BYTES << 32) & (offsets % PAGE_BYTES == 0)).all())
        and bool((blocks > 0).all())
        and all(codecs.known(int(codec)) for codec in np.unique(extents["codec"]))
        and bool((rows < len(numbers)).all())
        and bool((found.block_position < blocks[rows]).all())
        and len(np.unique(places)) == len(places)
    )
    if not right:
        raise CorruptBlock(f"{name} has numbers that nobody can have written", field="columns")


class _Columns:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = HEAD_BYTES

    def take(self, kind: str, count: int) -> NDArray[np.generic]:
        column = np.frombuffer(self._data, dtype=kind, count=count, offset=self._at)
        self._at += column.nbytes
        return column
