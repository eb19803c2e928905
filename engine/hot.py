"""Slices of cold blocks that selected attention has read lately, kept in memory: one layer of one sequence.

What was used longest ago makes room; what the present choice needs stays. A slice lies here as it was handed out, its
checksum compared, in memory of the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.client.pieces import PieceCopies
from kvstore.engine.cold import Indices, Piece
from kvstore.kernels.layout import SLICE_ALIGNMENT, SliceGeometry, align_up

CODECS: Final = ("raw", "int8")
ABSENT: Final = -1


class HotSlices:
    """At most ``nbytes`` of slices, by the rows of a reader. Memory is taken as it is used."""

    def __init__(self, geometry: SliceGeometry, nbytes: int) -> None:
        self._bytes = {codec: geometry.slice_bytes(codec) for codec in CODECS}
        self._stride = align_up(max(self._bytes.values()), SLICE_ALIGNMENT)
        self._slots = nbytes // self._stride
        self._memory: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._slot_of: NDArray[np.int32] = np.empty(0, np.int32)
        """By row: its slot, or ABSENT."""
        self._row_of: NDArray[np.int32] = np.full(self._slots, ABSENT, np.int32)
        self._codec_of: NDArray[np.int8] = np.zeros(self._slots, np.int8)
        self._used: NDArray[np.int64] = np.zeros(self._slots, np.int64)
        """By slot: number of the choice that used it last; 0 for what was never used."""
        self._choice = 0

    def has(self, rows: Indices) -> NDArray[np.bool_]:
        """A choice of rows begins: which of them are here. They stay until the next."""
        self._choice += 1
        if len(rows) and len(self._slot_of) <= rows[-1]:
            more = np.full(int(rows[-1]) + 1 - len(self._slot_of), ABSENT, np.int32)
            self._slot_of = np.concatenate([self._slot_of, more])
        slots = self._slot_of[rows]
        there: NDArray[np.bool_] = slots != ABSENT
        self._used[slots[there]] = self._choice
        return there

    def pieces(self, rows: Indices, starts: Indices) -> Iterator[Piece]:
        """The slices of rows that are here, one piece a codec; ``starts`` as of the reader."""
        slots = self._slot_of[rows]
        codecs = self._codec_of[slots]
        for number in np.unique(codecs).tolist():
            chosen = codecs == number
            addresses = self._memory.ctypes.data + slots[chosen].astype(np.int64) * self._stride
            tables = torch.from_numpy(addresses)[None], torch.from_numpy(starts[rows[chosen]])[None]
            yield Piece(rows[chosen], *tables, CODECS[number], int(chosen.sum()) * self._bytes[CODECS[number]])

    def keep(self, piece: Piece) -> None:
        """Copy the slices of a piece that was read, as many as there is room for beside the present choice."""
        count = min(len(piece.rows), self._slots)
        if not count:
            return
        if not len(self._memory):
            self._memory = np.empty((self._slots, self._stride), np.uint8)
        slots = np.argpartition(self._used, count - 1)[:count]
        slots = slots[self._used[slots] < self._choice]
        rows, nbytes = piece.rows[: len(slots)], self._bytes[piece.codec]
        old = self._row_of[slots]
        self._slot_of[old[old != ABSENT]] = ABSENT
        targets, sources = self._memory.ctypes.data + slots * self._stride, piece.addresses[0, : len(slots)].numpy()
        PieceCopies(targets, np.ascontiguousarray(sources), nbytes, ()).run(threads=1)
        self._row_of[slots], self._slot_of[rows] = rows, slots
        self._codec_of[slots], self._used[slots] = CODECS.index(piece.codec), self._choice
