"""The tables in memory: which blocks live, in which extent, and where the extents lie. Columns, not objects.

A block takes 38 bytes (extent row, position, key), an extent 72. A handle is a block's row; rows are used again
after a drop, and the key kept beside them tells an old handle from a new one. Not thread-safe: the tier's lock
guards it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.types import KEY_BYTES, BlockKey, Codec

NO_ROW: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Extent:
    """One row of the extent table. ``space`` is the namespace's index in the catalog; ``pages`` as in ExtentShape."""

    number: int
    segment: int
    offset: int
    age: int
    blocks: int
    codec: Codec
    space: int
    parent: BlockKey
    pages: int = 0


class BlockTable:
    """Rows of extents and of blocks."""

    def __init__(self) -> None:
        self.extent_number = array("Q")
        self.extent_age = array("Q")
        self.extent_offset = array("Q")
        self.extent_segment = array("I")
        self.extent_pages = array("I")
        self.extent_blocks = array("H")
        self.extent_live = array("H")
        self.extent_space = array("H")
        self.extent_codec = array("B")
        self.extent_committed = array("B")
        self.extent_parent = bytearray()
        self.block_extent = array("I")
        self.block_position = array("H")
        self.block_key = bytearray()
        self._free_extents = array("I")
        self._free_blocks = array("I")
        self.blocks = 0
        self.extents = 0

    def add_extent(self, extent: Extent, *, committed: bool) -> int:
        """Put an extent without live blocks in; returns its row."""
        self.extents += 1
        parent = extent.parent
        if self._free_extents:
            row = self._free_extents.pop()
            self.extent_number[row] = extent.number
            self.extent_age[row] = extent.age
            self.extent_offset[row] = extent.offset
            self.extent_segment[row] = extent.segment
            self.extent_pages[row] = extent.pages
            self.extent_blocks[row] = extent.blocks
            self.extent_live[row] = 0
            self.extent_space[row] = extent.space
            self.extent_codec[row] = extent.codec
            self.extent_committed[row] = committed
            self.extent_parent[row * KEY_BYTES : (row + 1) * KEY_BYTES] = parent
            return row
        self.extent_number.append(extent.number)
        self.extent_age.append(extent.age)
        self.extent_offset.append(extent.offset)
        self.extent_segment.append(extent.segment)
        self.extent_pages.append(extent.pages)
        self.extent_blocks.append(extent.blocks)
        self.extent_live.append(0)
        self.extent_space.append(extent.space)
        self.extent_codec.append(extent.codec)
        self.extent_committed.append(committed)
        self.extent_parent += parent
        return len(self.extent_number) - 1

    def add_block(self, extent_row: int, position: int, key: BlockKey) -> int:
        """Put a live block in; returns its row, the handle."""
        self.extent_live[extent_row] += 1
        self.blocks += 1
        if self._free_blocks:
            row = self._free_blocks.pop()
            self.block_extent[row] = extent_row
            self.block_position[row] = position
            self.block_key[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
            return row
        self.block_extent.append(extent_row)
        self.block_position.append(position)
        self.block_key += key
        return len(self.block_extent) - 1

    def alive(self, row: int) -> bool:
        """Whether a handle names a live block."""
        return 0 <= row < len(self.block_extent) and self.block_extent[row] != NO_ROW

    def key(self, row: int) -> BlockKey:
        """Key of a live block."""
        return BlockKey(bytes(self.block_key[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def extent(self, row: int) -> Extent:
        """One extent's values."""
        return Extent(
            self.extent_number[row],
            self.extent_segment[row],
            self.extent_offset[row],
            self.extent_age[row],
            self.extent_blocks[row],
            Codec(self.extent_codec[row]),
            self.extent_space[row],
            BlockKey(bytes(self.extent_parent[row * KEY_BYTES : (row + 1) * KEY_BYTES])),
            self.extent_pages[row],
        )

    def drop_block(self, row: int) -> int:
        """Take a live block out and return its extent's row, which the caller frees when nothing in it lives."""
        extent_row = self.block_extent[row]
        self.block_extent[row] = NO_ROW
        self.extent_live[extent_row] -= 1
        self._free_blocks.append(row)
        self.blocks -= 1
        return extent_row

    def move_block(self, row: int, extent_row: int, position: int) -> int:
        """Point a live block at another extent; returns the old extent's row."""
        old = self.block_extent[row]
        self.extent_live[old] -= 1
        self.extent_live[extent_row] += 1
        self.block_extent[row] = extent_row
        self.block_position[row] = position
        return old

    def free_extent(self, row: int) -> None:
        """Forget an extent in which nothing lives."""
        self.extent_number[row] = 0
        self.extent_segment[row] = NO_ROW
        self._free_extents.append(row)
        self.extents -= 1

    def extents_of_segment(self, segment: int) -> list[int]:
        """Rows of the extents of a segment, in order of offset."""
        rows = np.flatnonzero(np.frombuffer(self.extent_segment, dtype=np.uint32) == segment)
        offsets = np.frombuffer(self.extent_offset, dtype=np.uint64)[rows]
        return [int(row) for row in rows[np.argsort(offsets)]]

    def blocks_of_extents(self, extent_rows: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
        """Live (position, handle) of each extent, in order of position. One pass over the table."""
        wanted = np.fromiter(extent_rows, dtype=np.uint32)
        column = np.frombuffer(self.block_extent, dtype=np.uint32)
        handles = np.flatnonzero(np.isin(column, wanted))
        found: dict[int, list[tuple[int, int]]] = {int(row): [] for row in wanted}
        for handle in handles.tolist():
            found[self.block_extent[handle]].append((self.block_position[handle], handle))
        for pairs in found.values():
            pairs.sort()
        return found

    def load_extents(self, columns: dict[str, NDArray[np.generic]], parents: bytes) -> None:
        """Fill the empty extent table from columns of a checkpoint."""
        for name in ("number", "age", "offset", "segment", "pages", "blocks", "space", "codec"):
            column: array[int] = getattr(self, f"extent_{name}")
            column.frombytes(columns[name].tobytes())
        count = len(self.extent_number)
        self.extent_live.frombytes(bytes(2 * count))
        self.extent_committed.frombytes(b"\x01" * count)
        self.extent_parent += parents
        self.extents = count

    def load_blocks(self, extent: NDArray[np.uint32], position: NDArray[np.uint16], keys: bytes) -> None:
        """Fill the empty block table; extents are loaded before."""
        self.block_extent.frombytes(extent.tobytes())
        self.block_position.frombytes(position.tobytes())
        self.block_key += keys
        self.blocks = len(self.block_extent)
        live = np.bincount(extent, minlength=len(self.extent_number)).astype(np.uint16)
        self.extent_live = array("H", live.tobytes())

    def memory_bytes(self) -> int:
        """Bytes of all columns, spare room at their ends included."""
        columns: Sequence[array[int]] = (
            self.extent_number, self.extent_age, self.extent_offset, self.extent_segment, self.extent_pages,
            self.extent_blocks, self.extent_live, self.extent_space, self.extent_codec, self.extent_committed,
            self.block_extent, self.block_position, self._free_extents, self._free_blocks,
        )  # fmt: skip
        return (
            sum(column.__sizeof__() for column in columns)
            + self.block_key.__sizeof__()
            + (self.extent_parent.__sizeof__())
        )
