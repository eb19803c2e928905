"""Blocks as the engine sees them, the block table of one sequence, and the registry of blocks that are shared.

::

    TAIL     a reservation on DEVICE: being filled, seen by nobody else
    STAGED   the same in the engine's own pool, where the cache has no DEVICE: copied into HOST when it is full
    SEALED   committed and pinned: on DEVICE, or in HOST in place (raw or int8); shared by the engine's sequences
    COLD   committed and held, without a place in memory: read from storage layer by layer (``cold.py``)
    PRIVATE  in the engine's own pool: never shared

A TAIL or STAGED block becomes SEALED when it is full (its address may change then: the key may have been resident
already). What is STAGED becomes PRIVATE where the cache does not take it. A SEALED block changes its address when it
is moved from DEVICE to HOST, and loses it when it becomes COLD.

A table keeps addresses and codecs as columns that grow with it, so that a step reads them without work a block; a
block knows its seats in tables and tells them when it moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.core.types import Area, BlockKey, Codec, ReservationId
from kvstore.engine.memory import Region

COLUMN_ROWS: Final = 64
"""Rows that a column has room for at first; it doubles when they are used up."""


class BlockState(Enum):
    """Who owns a block's bytes."""

    TAIL = "tail"
    STAGED = "staged"
    SEALED = "sealed"
    COLD = "cold"
    PRIVATE = "private"


@dataclass(slots=True, eq=False)
class Block:
    """K and V of ``block_tokens`` tokens of all layers at one address.

    ``users`` counts the sequences whose tables hold it. ``area`` is NONE for the private pool and for COLD blocks.
    ``moving`` is set while a job copies it to HOST, ``moved`` once the lease on moved blocks pins it there.
    ``seats`` are the tables that it is in, with its index in each.
    """

    state: BlockState
    region: Region
    offset: int
    area: Area
    codec: Codec = Codec.RAW
    reservation: ReservationId | None = None
    key: BlockKey | None = None
    users: int = 1
    moving: bool = False
    moved: bool = False
    seats: list[tuple[BlockTable, int]] = field(default_factory=list)

    @property
    def address(self) -> int:
        """Address of the slice of layer 0; 0 for a COLD block."""
        return 0 if self.state is BlockState.COLD else self.region.address + self.offset

    @property
    def pooled(self) -> bool:
        """Whether it lies in the engine's own pool."""
        return self.area is Area.NONE and self.state is not BlockState.COLD

    def place(self, region: Region, offset: int, area: Area, codec: Codec) -> None:
        """Say where it lies from now on."""
        self.region, self.offset, self.area, self.codec = region, offset, area, codec
        self._tell()

    def cool(self) -> None:
        """Give up its place in memory: it is read from storage from now on."""
        self.state, self.area, self.moved = BlockState.COLD, Area.NONE, False
        self._tell()

    def _tell(self) -> None:
        for table, index in self.seats:
            table.look_at(index)


class Column:
    """A one-dimensional array that grows at its end."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._data: npt.NDArray[Any] = np.zeros(COLUMN_ROWS, dtype)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, value: int) -> None:
        """Add a row."""
        if self._length == len(self._data):
            self._data = np.concatenate([self._data, np.zeros_like(self._data)])
        self._data[self._length] = value
        self._length += 1

    def __setitem__(self, index: int, value: int) -> None:
        self._data[index] = value

    def cut(self, length: int) -> None:
        """Keep the first ``length`` rows."""
        self._length = length

    def view(self, begin: int = 0, end: int | None = None) -> npt.NDArray[Any]:
        """Rows ``begin`` to ``end`` (all that there are), in place: not to be written, and not kept."""
        return self._data[begin : self._length if end is None else min(end, self._length)]


class BlockTable:
    """The blocks of one sequence in order; block ``i`` holds tokens ``i * block_tokens`` on.

    ``keys`` are the keys of the full blocks known so far. ``private`` is set once a block of the pool is in the table:
    the blocks after it cannot be committed, since their parent never will be. ``addresses`` (int64, 0 for COLD
    blocks), ``codecs`` and ``areas`` (int8) are columns of ``blocks``; ``cold`` are the indices of COLD blocks in the
    order in which they became so.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.keys: list[BlockKey] = []
        self.sealed = 0
        self.private = False
        self.addresses = Column(np.int64)
        self.codecs = Column(np.int8)
        self.areas = Column(np.int8)
        self.cold = Column(np.int32)

    def append(self, block: Block) -> None:
        """Add a block at the end."""
        block.seats.append((self, len(self.blocks)))
        self.blocks.append(block)
        self.addresses.append(block.address)
        self.codecs.append(block.codec)
        self.areas.append(block.area)
        if block.state is BlockState.COLD:
            self.cold.append(len(self.blocks) - 1)

    def replace(self, index: int, block: Block) -> None:
        """Put another block in the place of one."""
        self._leave(self.blocks[index])
        self.blocks[index] = block
        block.seats.append((self, index))
        self.look_at(index)

    def look_at(self, index: int) -> None:
        """Bring the columns up to date with a block that has changed."""
        block = self.blocks[index]
        self.addresses[index], self.codecs[index], self.areas[index] = block.address, block.codec, block.area
        if block.state is BlockState.COLD:
            self.cold.append(index)

    def cut(self, length: int) -> list[Block]:
        """Keep the first ``length`` blocks, with all COLD ones among them; returns the others."""
        gone = self.blocks[length:]
        for block in gone:
            self._leave(block)
        del self.blocks[length:]
        self.addresses.cut(length)
        self.codecs.cut(length)
        self.areas.cut(length)
        return gone

    def make_private(self) -> None:
        """Keep what is not sealed, and whatever follows, in the engine's own memory; all of it must lie there."""
        for block in self.blocks[self.sealed :]:
            block.state = BlockState.PRIVATE
        self.private = True

    def _leave(self, block: Block) -> None:
        block.seats = [seat for seat in block.seats if seat[0] is not self]


class Registry:
    """The SEALED and COLD blocks in use, by key, and those of each area in the order in which they came there."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, Block] = {}
        self._by_area: dict[Area, dict[Block, None]] = {Area.DEVICE: {}, Area.HOST: {}}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def get(self, key: BlockKey) -> Block | None:
        """The block of this key, if it is in use."""
        return self._blocks.get(key)

    def add(self, key: BlockKey, block: Block) -> None:
        """Take a block that was sealed or found."""
        block.key = key
        self._blocks[key] = block
        self._by_area.get(block.area, {})[block] = None

    def remove(self, block: Block) -> None:
        """Forget a block that nobody uses any more."""
        if block.key is not None:
            del self._blocks[block.key]
        self._by_area.get(block.area, {}).pop(block, None)

    def place(self, block: Block, region: Region, offset: int, area: Area, codec: Codec) -> None:
        """Point a block at another copy of it."""
        self._by_area.get(block.area, {}).pop(block, None)
        block.place(region, offset, area, codec)
        self._by_area.get(area, {})[block] = None

    def cool(self, block: Block) -> None:
        """A block has no place in memory any more."""
        self._by_area.get(block.area, {}).pop(block, None)
        block.cool()

    def within(self, area: Area) -> Iterable[Block]:
        """Blocks in an area, the longest there first."""
        return self._by_area[area]

    def count(self, area: Area) -> int:
        """Number of blocks in an area."""
        return len(self._by_area[area])

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()
        for blocks in self._by_area.values():
            blocks.clear()
