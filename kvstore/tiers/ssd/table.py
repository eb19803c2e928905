"""The tables in memory: which blocks live, in which extent, and where the extents lie. Columns, not objects.

A block takes 38 bytes (extent row, position, key), an extent 70. A handle is a block's row; rows are used again after a
drop, and the key kept beside them tells an old handle from a new one. Not thread-safe: the tier's lock guards it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.types import ROOT_PARENT, BlockKey, Codec
from kvstore.tiers.ssd.config import PAGE_BYTES
from kvstore.tiers.ssd.key_column import KeyColumn

NO_ROW: Final = 0xFFFFFFFF
NO_SPACE: Final = 0xFFFFFFFF
"""Index of a namespace that the catalog does not hold."""
NO_KEY: Final = ROOT_PARENT
"""In rows that are free."""


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
        self.extent_page = array("I")
        self.extent_segment = array("I")
        self.extent_pages = array("I")
        self.extent_blocks = array("H")
        self.extent_live = array("H")
        self.extent_space = array("I")
        self.extent_codec = array("B")
        self.extent_committed = array("B")
        self.extent_parent = KeyColumn()
        self.block_extent = array("I")
        self.block_position = array("H")
        self.block_key = KeyColumn()
        self._free_extents = array("I")
        self._free_blocks = array("I")
        self.blocks = 0
        self.extents = 0

    def add_extent(self, extent: Extent, *, committed: bool) -> int:
        """Put an extent without live blocks in; returns its row."""
        self.extents += 1
        if self._free_extents:
            row = self._free_extents.pop()
            self.extent_number[row] = extent.number
            self.extent_age[row] = extent.age
            self.extent_page[row] = extent.offset // PAGE_BYTES
            self.extent_segment[row] = extent.segment
            self.extent_pages[row] = extent.pages
            self.extent_blocks[row] = extent.blocks
            self.extent_live[row] = 0
            self.extent_space[row] = extent.space
            self.extent_codec[row] = extent.codec
            self.extent_committed[row] = committed
            self.extent_parent[row] = extent.parent
            return row
        self.extent_number.append(extent.number)
        self.extent_age.append(extent.age)
        self.extent_page.append(extent.offset // PAGE_BYTES)
        self.extent_segment.append(extent.segment)
        self.extent_pages.append(extent.pages)
        self.extent_blocks.append(extent.blocks)
        self.extent_live.append(0)
        self.extent_space.append(extent.space)
        self.extent_codec.append(extent.codec)
        self.extent_committed.append(committed)
        self.extent_parent.append(extent.parent)
        return len(self.extent_number) - 1

    def add_block(self, extent_row: int, position: int, key: BlockKey) -> int:
        """Put a live block in; returns its row, the handle."""
        self.extent_live[extent_row] += 1
        self.blocks += 1
        if self._free_blocks:
            row = self._free_blocks.pop()
            self.block_extent[row] = extent_row
            self.block_position[row] = position
            self.block_key[row] = key
            return row
        self.block_extent.append(extent_row)
        self.block_position.append(position)
        self.block_key.append(key)
        return len(self.block_extent) - 1

    def append_blocks(self, extent_row: int, keys: Sequence[BlockKey]) -> int:
        """Put all blocks of an extent in at the end of the table; returns the row of the first, the others follow."""
        first, count = len(self.block_extent), len(keys)
        self.block_extent.extend([extent_row] * count)
        self.block_position.extend(range(count))
        self.block_key.extend(keys)
        self.extent_live[extent_row] += count
        self.blocks += count
        return first

    def alive(self, row: int) -> bool:
        """Whether a handle names a live block."""
        return 0 <= row < len(self.block_extent) and self.block_extent[row] != NO_ROW

    def key(self, row: int) -> BlockKey:
        """Key of a live block."""
        return self.block_key[row]

    def extent(self, row: int) -> Extent:
        """One extent's values."""
        return Extent(
            self.extent_number[row],
            self.extent_segment[row],
            self.extent_page[row] * PAGE_BYTES,
            self.extent_age[row],
            self.extent_blocks[row],
            Codec(self.extent_codec[row]),
            self.extent_space[row],
            self.extent_parent[row],
            self.extent_pages[row],
        )

    def touch(self, handles: Sequence[int], age: int) -> int:
        """Give the extents of blocks ages from ``age`` on, in order of their last naming; returns the next age."""
        named = np.array([handle for handle in handles if self.alive(handle)], dtype=np.intp)
        if not len(named):
            return age
        rows = np.frombuffer(self.block_extent, dtype=np.uint32)[named]
        extents, backwards = np.unique(rows[::-1], return_index=True)
        ages = np.frombuffer(self.extent_age, dtype=np.uint64)
        ages[extents[np.argsort(-backwards)]] = np.arange(age, age + len(extents), dtype=np.uint64)
        return age + len(extents)

    def drop_block(self, row: int) -> int:
        """Take a live block out and return its extent's row, which the caller frees when nothing in it lives."""
        extent_row = self.block_extent[row]
        self.block_extent[row] = NO_ROW
        self.block_key[row] = NO_KEY
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
        self.extent_parent[row] = NO_KEY
        self._free_extents.append(row)
        self.extents -= 1

    def extents_of_segment(self, segment: int) -> list[int]:
        """Rows of the extents of a segment, in order of offset."""
        rows = np.flatnonzero(np.frombuffer(self.extent_segment, dtype=np.uint32) == segment)
        pages = np.frombuffer(self.extent_page, dtype=np.uint32)[rows]
        return [int(row) for row in rows[np.argsort(pages)]]

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

    def load_blocks(self, extent: NDArray[np.uint32], position: NDArray[np.uint16], keys: NDArray[np.uint8]) -> None:
        """Fill the empty block table. ``keys`` is uint8 [blocks, 32].

        It comes before ``load_extents``, which counts what lives.
        """
        self.block_extent.frombytes(extent.tobytes())
        self.block_position.frombytes(position.tobytes())
        self.block_key.load(keys)
        self.blocks = len(self.block_extent)

    def load_extents(self, columns: dict[str, NDArray[np.generic]], parents: NDArray[np.uint8]) -> None:
        """Fill the empty extent table from columns of a checkpoint; ``parents`` is uint8 [extents, 32]."""
        for name in ("number", "age", "segment", "pages", "blocks", "space", "codec"):
            column: array[int] = getattr(self, f"extent_{name}")
            column.frombytes(columns[name].tobytes())
        self.extent_page.frombytes((columns["offset"].astype(np.uint64) // PAGE_BYTES).astype(np.uint32).tobytes())
        self.extents = count = len(self.extent_number)
        live = np.bincount(np.array(self.block_extent, dtype=np.intp), minlength=count)
        self.extent_live.frombytes(live.astype(np.uint16).tobytes())
        self.extent_committed.frombytes(b"\x01" * count)
        self.extent_parent.load(parents)

    def copy(self) -> BlockTable:
        """The columns as they are now: milliseconds for a million blocks. What is made of them needs no lock."""
        made = BlockTable()
        for name, column in vars(self).items():
            setattr(made, name, _copied(column))
        return made

    def memory_bytes(self) -> int:
        """Bytes of all columns, spare room at their ends included."""
        columns = [column for column in vars(self).values() if isinstance(column, array | KeyColumn)]
        return sum(column.__sizeof__() for column in columns)


def _copied(column: object) -> object:
    return column[:] if isinstance(column, array) else column.copy() if isinstance(column, KeyColumn) else column
