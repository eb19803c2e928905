"""Blocks as the engine sees them, and the block table of one sequence.

::

    TAIL     a reservation on DEVICE: being filled, seen by nobody else
    STAGED   the same in the engine's own pool, where the cache has no DEVICE: copied into HOST when it is full
    SEALED   committed and pinned: on DEVICE, or in HOST in place (raw or int8); shared by the engine's sequences
    PRIVATE  in the engine's own pool: never shared

A TAIL or STAGED block becomes SEALED when it is full (its address may change then: the key may have been resident
already). What is STAGED becomes PRIVATE where the cache does not take it.
A SEALED block changes its address when it is moved from DEVICE to HOST. The addresses of a table are therefore read
anew for every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvstore.core.types import Area, BlockKey, Codec, ReservationId
from kvstore.engine.memory import Region


class BlockState(Enum):
    """Who owns a block's bytes."""

    TAIL = "tail"
    STAGED = "staged"
    SEALED = "sealed"
    PRIVATE = "private"


@dataclass(slots=True, eq=False)
class Block:
    """K and V of ``block_tokens`` tokens of all layers at one address.

    ``users`` counts the sequences whose tables hold it. ``area`` is NONE for the private pool. ``moving`` is set
    while a job copies it to HOST, ``moved`` once the lease on moved blocks pins it there.
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

    @property
    def address(self) -> int:
        """Address of the slice of layer 0."""
        return self.region.address + self.offset

    @property
    def pooled(self) -> bool:
        """Whether it lies in the engine's own pool."""
        return self.area is Area.NONE


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence in order; block ``i`` holds tokens ``i * block_tokens`` on.

    ``keys`` are the keys of the full blocks known so far. ``private`` is set once a block of the pool is in the table:
    the blocks after it cannot be committed, since their parent never will be.
    """

    blocks: list[Block] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    sealed: int = 0
    private: bool = False

    def make_private(self) -> None:
        """Keep what is not sealed, and whatever follows, in the engine's own memory; all of it must lie there."""
        for block in self.blocks[self.sealed :]:
            block.state = BlockState.PRIVATE
        self.private = True
