"""The codec over buffers: every level gives the reference's bytes, refuses alike, and keeps to its slices."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.kernels import native, quant
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.quant_reference import dequantise_slice, float32_to_raw, quantise_slice

LEVELS = [None, *native.native_status().levels]
SHAPES = [(1, 64, 64), (3, 128, 64), (2, 40, 64), (1, 80, 32), (2, 34, 6), (1, 256, 128), (1, 66, 250)]


def draw(geometry: SliceGeometry, seed: int) -> np.ndarray:
    """Values of very different sizes, with ties, zeros, negative zeros and subnormals among them."""
    rng = np.random.default_rng(seed)
    count = geometry.raw_bytes // geometry.itemsize
    values = rng.standard_normal(count, dtype=np.float32) * np.float32(10.0) ** rng.integers(-7, 5, count)
    values = np.clip(values, -6e4, 6e4).astype(np.float32)
    values[rng.random(count) < 0.1] = 0.0
    values[rng.random(count) < 0.1] *= -0.0
    rows = values.reshape(-1, 2)
    rows[: len(rows) // 8] = np.round(rows[: len(rows) // 8])
    return float32_to_raw(values, geometry.dtype)


def buffers(geometry: SliceGeometry, slices: int, seed: int) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Raw slices, a coded buffer full of 0xA5, and odd strides between slices."""
    strides = (geometry.raw_bytes + 12, geometry.int8_bytes + 6)
    raw = np.full(slices * strides[0], 0x5A, np.uint8)
    for index in range(slices):
        raw[index * strides[0] : index * strides[0] + geometry.raw_bytes] = draw(geometry, seed + index)
    return raw, np.full(slices * strides[1], 0xA5, np.uint8), strides


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_equal_the_reference(shape: tuple[int, int, int], dtype: str, level: str | None) -> None:
    geometry = SliceGeometry(*shape, dtype)
    raw, coded, strides = buffers(geometry, 3, seed=shape[1])
    assert quant.quantise(raw, coded, geometry, 3, strides=strides, level=level)
    back = np.full(raw.size, 0x5A, np.uint8)
    quant.dequantise(coded, back, geometry, 3, strides=strides, level=level)
    for index in range(3):
        at = index * strides[0]
        wanted = quantise_slice(raw[at : at + geometry.raw_bytes], geometry)
        assert wanted is not None
        place = coded[index * strides[1] : (index + 1) * strides[1]]
        assert (place[: geometry.int8_bytes] == wanted).all()
        assert (place[geometry.int8_bytes :] == 0xA5).all()
        assert (back[at : at + geometry.raw_bytes] == dequantise_slice(wanted, geometry)).all()
        assert (back[at + geometry.raw_bytes : at + strides[0]] == 0x5A).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 61000.0])
def test_one_bad_value_anywhere_refuses(bad: float, dtype: str, level: str | None) -> None:
    geometry = SliceGeometry(2, 40, 64, dtype)
    raw, coded, strides = buffers(geometry, 2, seed=9)
    cell = float32_to_raw(np.array([bad], np.float32), dtype)
    if np.isnan(bad):
        cell = {"float16": np.uint16(0x7E01), "bfloat16": np.uint16(0x7FC1), "float32": np.uint32(0x7FC00001)}[dtype]
        cell = np.array([cell]).view(np.uint8)
    count = geometry.raw_bytes // geometry.itemsize
    for element in (0, 63, 40 * 64 - 1, 40 * 64, 2 * 40 * 64 - 1, 2 * 40 * 64 + 17, count - 1):
        spoiled = raw.copy()
        at = strides[0] + element * geometry.itemsize
        spoiled[at : at + geometry.itemsize] = cell
        assert not quant.quantise(spoiled, coded, geometry, 2, strides=strides, level=level), element
    assert quant.quantise(raw, coded, geometry, 2, strides=strides, level=level)


def test_every_bit_pattern_of_fp16_decodes_and_encodes_alike() -> None:
    """Scales and zero points take every fp16 value; codes every byte."""
    geometry = SliceGeometry(64, 256, 64, "float32")
    rng = np.random.default_rng(1)
    coded = rng.integers(0, 256, geometry.int8_bytes, dtype=np.uint8)
    heads = coded.reshape(64, geometry.int8_head_bytes)
    finite = np.arange(65536, dtype=np.uint16)
    finite = finite[np.isfinite(finite.view(np.float16))]
    params = rng.permutation(np.resize(finite, 64 * 576)).reshape(64, 576)
    heads[:, 2 * geometry.head_elements :] = params.view(np.uint8)
    wanted = dequantise_slice(coded, geometry).view(np.float32)
    for level in LEVELS:
        found = np.zeros(geometry.raw_bytes, np.uint8)
        quant.dequantise(coded, found, geometry, 1, level=level)
        assert (found.view(np.float32) == wanted).all()


def test_python_path_when_the_extension_can_not_hold_the_shape() -> None:
    geometry = SliceGeometry(1, 258, 4, "float16")
    assert not native.holds(geometry)
    raw, coded, strides = buffers(geometry, 2, seed=5)
    assert quant.quantise(raw, coded, geometry, 2, strides=strides)
    back = np.zeros_like(raw)
    quant.dequantise(coded, back, geometry, 2, strides=strides)
    wanted = quantise_slice(raw[strides[0] : strides[0] + geometry.raw_bytes], geometry)
    assert (coded[strides[1] : strides[1] + geometry.int8_bytes] == wanted).all()
    raw[:2] = 0xFF
    assert not quant.quantise(raw, coded, geometry, 2, strides=strides)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"slices": -1}, "slices"),
        ({"slices": 3}, "raw"),
        ({"strides": (10, 10_000)}, "raw stride"),
        ({"strides": (20_480, 10)}, "coded stride"),
        ({"coded": np.zeros(10, np.uint8)}, "coded"),
        ({"raw": np.zeros((200, 400), np.uint8)[:, ::2]}, "raw"),
        ({"geometry": SliceGeometry(2, 41, 64, "float16")}, "head_dim"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], name: str) -> None:
    geometry = SliceGeometry(2, 40, 64, "float16")
    raw, coded, strides = buffers(geometry, 2, seed=7)
    arguments = {"raw": raw, "coded": coded, "geometry": geometry, "slices": 2, "strides": strides} | change
    with pytest.raises(ValueError, match=name):
        quant.quantise(**arguments)  # type: ignore[arg-type]


def test_read_only_targets_are_refused() -> None:
    geometry = SliceGeometry(2, 40, 64, "float16")
    raw, coded, strides = buffers(geometry, 1, seed=7)
    coded.setflags(write=False)
    with pytest.raises(ValueError, match="coded"):
        quant.quantise(raw, coded, geometry, 1, strides=strides)
