"""Slices that selected attention has read stay in memory, right and bounded, and are not read again while they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.engine.cold import Piece
from kvstore.engine.hot import HotSlices
from kvstore.kernels import native
from kvstore.kernels.attention_torch import memory_at
from kvstore.kernels.layout import SliceGeometry

GEOMETRY = SliceGeometry(2, 16, 8, "float16")


class Storage:
    """Slices whose bytes follow from their rows, some of them raw."""

    def __init__(self, rows: int) -> None:
        self.starts = np.arange(rows, dtype=np.int32) * GEOMETRY.block_tokens
        self.codecs = ["raw" if row % 5 == 0 else "int8" for row in range(rows)]
        self.data = np.random.default_rng(1).integers(0, 256, (rows, GEOMETRY.slice_bytes("raw")), np.uint8)
        self.read: list[int] = []

    def pieces(self, rows: np.ndarray) -> list[Piece]:
        self.read += rows.tolist()
        found = []
        for codec in ("raw", "int8"):
            some = np.array([row for row in rows.tolist() if self.codecs[row] == codec], np.int32)
            if len(some):
                addresses = self.data.ctypes.data + some.astype(np.int64) * self.data.shape[1]
                tables = torch.from_numpy(addresses)[None], torch.from_numpy(self.starts[some])[None]
                found.append(Piece(some, *tables, codec, len(some) * GEOMETRY.slice_bytes(codec)))
        return found


def choose(hot: HotSlices, storage: Storage, rows: list[int]) -> None:
    """One choice, as the selector makes it: whatever is handed out has the bytes of its row."""
    wanted, seen = np.array(sorted(rows), np.int32), []
    there = hot.has(wanted)
    pieces = list(hot.pieces(wanted[there], storage.starts))
    missing = storage.pieces(wanted[~there]) if not there.all() else []
    for piece in missing:
        hot.keep(piece)
    for piece in [*pieces, *missing]:
        nbytes = GEOMETRY.slice_bytes(piece.codec)
        assert piece.nbytes == nbytes * len(piece.rows)
        for row, address, start in zip(piece.rows, piece.addresses[0].tolist(), piece.starts[0].tolist(), strict=True):
            assert bytes(memory_at(address, nbytes).numpy()) == storage.data[row, :nbytes].tobytes()
            assert (start, piece.codec) == (storage.starts[row], storage.codecs[row])
            seen.append(int(row))
    assert sorted(seen) == wanted.tolist()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("slots", [0, 1, 7, 40])
def test_random_choices_have_the_bytes_of_their_rows(
    monkeypatch: pytest.MonkeyPatch, slots: int, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr(native, "available", lambda: False)
    storage, random = Storage(60), np.random.default_rng(slots)
    hot = HotSlices(GEOMETRY, slots * (GEOMETRY.slice_bytes("raw") + 63))
    for _ in range(200):
        choose(hot, storage, random.choice(60, int(random.integers(1, 20)), replace=False).tolist())


def test_what_was_chosen_last_is_not_read_again_and_the_oldest_makes_room() -> None:
    storage = Storage(20)
    hot = HotSlices(GEOMETRY, 6 * GEOMETRY.slice_bytes("raw"))
    choose(hot, storage, [1, 2, 3, 4])
    choose(hot, storage, [3, 4, 5, 6])
    assert storage.read == [1, 2, 3, 4, 5, 6]
    choose(hot, storage, [3, 5, 7])
    choose(hot, storage, [3, 4, 5, 6, 7])
    assert storage.read == [1, 2, 3, 4, 5, 6, 7]
    choose(hot, storage, [1, 2])
    assert storage.read[-1] in (1, 2)
