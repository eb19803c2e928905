"""Pieces: where scattered blocks lie, and that copies go there and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import Pieces, Pointer, pieces
from kvstore.client.pieces import PieceCopies, between
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout
from kvstore.core.types import Area, Codec, Place
from kvstore.kernels import native
from tests.client.harness import small_spec


@pytest.fixture(params=["native", "memmove"])
def route(request, monkeypatch):
    if request.param == "memmove":
        monkeypatch.setattr(pieces.native, "available", lambda: False)
    elif not native.available():
        pytest.skip("the C++ kernels were not built")


def layout_of(layers: int, slice_bytes: int) -> BlockLayout:
    return BlockLayout.of(small_spec(layers=layers, opaque_slice_bytes=slice_bytes))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(1, 4), st.sampled_from([24, 64, 100, 4160]), st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_blocks_go_to_their_pieces_and_back_and_nowhere_else(route, layers, slice_bytes, split, one_region, data):
    """Pieces smaller than a slice, a slice each, or in one region with distances between them."""
    blocks = 3
    layout, piece_bytes = layout_of(layers, slice_bytes), slice_bytes // split
    gap = data.draw(st.integers(0, 9))
    step = split * (piece_bytes + gap)
    order = data.draw(st.permutations(range(blocks)))
    if one_region:
        regions = [np.full(blocks * layers * step, 255, np.uint8)]
        found = Pieces.of(
            regions, [n * layers * step for n in order], piece_bytes, count=layers * split, stride=piece_bytes + gap
        )
    else:
        regions = [np.full(blocks * step, 255, np.uint8) for _ in range(layers)]
        found = Pieces.of(regions, [n * step for n in order], piece_bytes, count=split, stride=piece_bytes + gap)
    stride = layout.raw_slice_stride
    memory = np.arange(blocks * layers * stride, dtype=np.uint32).astype(np.uint8)
    places = [Place(Area.BUFFER, n * layers * stride, stride, Codec.RAW) for n in range(blocks)]
    theirs, ours, part, owners = between(found, places, memory.data, layout)
    PieceCopies(ours, theirs, part, owners).run(2)
    copied = 0
    for number, at in enumerate(order):
        payload = b"".join(
            memory[number * layers * stride + layer * stride :][:slice_bytes].tobytes() for layer in range(layers)
        )
        copied += len(payload)
        for piece in range(layers * split):
            region = regions[0] if one_region else regions[piece // split]
            begin = at * layers * step if one_region else at * step
            within = piece if one_region else piece % split
            begin += within * (piece_bytes + gap)
            assert region[begin : begin + piece_bytes].tobytes() == payload[piece * piece_bytes :][:piece_bytes]
            region[begin : begin + piece_bytes] = 255
    assert all((region == 255).all() for region in regions)
    before = memory.copy()
    memory[:] = 7
    for region in regions:
        region[:] = 9
    PieceCopies(theirs, ours, part, owners).run(1)
    assert int((memory == 9).sum()) == copied
    assert int((memory == 7).sum()) == memory.size - copied
    assert before.size == memory.size


def test_a_piece_outside_of_its_region_is_refused():
    region = bytearray(100)
    Pieces.of([region], [0, 90], 10)
    for offsets in ([91], [-1], [0, 0, 95]):
        with pytest.raises(InvalidArgument, match="region 0"):
            Pieces.of([region], offsets, 10)
    with pytest.raises(InvalidArgument, match="region 1"):
        Pieces.of([region, Pointer(1 << 20, 5)], [0], 10)
    with pytest.raises(InvalidArgument, match="pieces apart"):
        Pieces.of([region], [0], 10, count=2, stride=9)
    with pytest.raises(InvalidArgument, match="shape"):
        Pieces.of([region], [[0, 1]], 10)


def test_addresses_of_another_shape_are_refused():
    good = np.zeros(4, np.int64)
    for other in (np.zeros(3, np.int64), np.zeros((2, 2), np.int64), np.zeros(4, np.int32), np.zeros(8, np.int64)[::2]):
        with pytest.raises(ValueError, match="expected flat contiguous"):
            native.copy_pieces(good, other, 8, 1)


def test_large_copies_are_split_over_threads(route):
    rng = np.random.default_rng(3)
    source = rng.integers(0, 255, 5 << 20, np.uint8)
    target = np.zeros_like(source)
    for size in (640, 1 << 20):
        target[:] = 0
        begins = np.arange(0, source.size, size, dtype=np.int64)
        order = rng.permutation(len(begins))
        PieceCopies(target.ctypes.data + begins[order], source.ctypes.data + begins[order], size, ()).run(3)
        assert np.array_equal(source, target)
