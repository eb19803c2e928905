"""Blocks in storage, read layer by layer while a step computes: never a whole block for one layer of it.

A reader belongs to one sequence. At the start of a step it is told which layers will ask for all of its blocks, in
order, and keeps reads of what comes next under way while a piece is attended to. Pieces are bounded in bytes.

This is the contract; ``cold_plan.py`` meets it by a reading plan, ``cold_fetch.py`` by a job of the cache a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.types import BlockKey, Reason

BUFFER_SHARE: Final = 2
"""One half of the session's buffer is for pieces; the other takes blocks that are being filled."""

Indices = npt.NDArray[np.int32]
Pass = tuple[int, Indices | None]
"""A layer, and the rows of it to be read; None for all."""


class ColdLost(Exception):
    """A block in storage can not be read any more: what follows it in its sequence has to be computed again."""

    def __init__(self, key: BlockKey, reason: Reason) -> None:
        super().__init__(f"block {key.hex()[:16]} can not be read from storage: {reason.name}")
        self.key = key
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Piece:
    """Slices of one layer of some blocks: readable until the next piece is asked for.

    ``rows`` int32 [blocks] are their places in the reader's ``starts``, ``addresses`` int64 [1, blocks] those of the
    slices, ``starts`` int32 [1, blocks] the position of each block's first token.
    """

    rows: Indices
    addresses: torch.Tensor
    starts: torch.Tensor
    codec: str
    nbytes: int


class ColdReader(Protocol):
    """Reads the COLD blocks of one sequence."""

    def take_in(self) -> None:
        """A step begins: take in the blocks that became COLD since the last one. Raises LinkLost."""

    def begin(self, passes: Sequence[Pass]) -> None:
        """Say what this step will read, in order; all of it is read ahead. Raises LinkLost."""

    def read(self, layer: int, chosen: Indices | None = None) -> Iterator[Piece]:
        """The slices of the next pass that ``begin`` was told of, which is one of ``layer``, piece by piece.

        With nothing left of these: of the ``chosen`` rows. Raises ColdLost and LinkLost.
        """
        ...

    @property
    def starts(self) -> npt.NDArray[np.int32]:
        """Position of the first token of each block, by row."""
        ...

    def close(self) -> None:
        """Give up what is under way."""


@dataclass(slots=True)
class Tally:
    """Bytes that readers handed out, and how long they waited for them; bytes that were in memory still."""

    nbytes: int = 0
    hot_bytes: int = 0
    waited_s: float = 0.0
