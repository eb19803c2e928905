"""The int8 codec in the interpreter, bit for bit against numpy; run by ``test_triton`` in a process of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.quant_reference import dequantise_slice, float32_to_raw, quantise_slice
from kvstore.kernels.triton_launch import interpreted
from kvstore.kernels.triton_quant import dequantise, quantise

BLOCKS, LAYERS = 2, 2


def addresses(rows: torch.Tensor) -> torch.Tensor:
    return torch.tensor([row.data_ptr() for row in rows], dtype=torch.int64)


def write_raw(values: np.ndarray, geometry: SliceGeometry) -> torch.Tensor:
    """Blocks of raw slices, uint8 [BLOCKS, LAYERS * stride], of fp32 values [BLOCKS, LAYERS, elements]."""
    stride = geometry.slice_stride("raw")
    raw = torch.full((BLOCKS, LAYERS * stride), 0xEE, dtype=torch.uint8)
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            data = float32_to_raw(values[block, layer].copy(), geometry.dtype)
            raw[block, layer * stride : layer * stride + geometry.raw_bytes] = torch.from_numpy(data)
    return raw


def draw(geometry: SliceGeometry, seed: int) -> np.ndarray:
    """Slices of very different magnitude, with constant, zero and tiny channels at the start of each head."""
    rng = np.random.default_rng(seed)
    elements = 2 * geometry.kv_heads * geometry.head_elements
    values = rng.standard_normal((BLOCKS, LAYERS, elements)) * np.exp(3 * rng.standard_normal((BLOCKS, LAYERS, 1)))
    tokens = geometry.block_tokens
    values[0, 0, :tokens] = 3.0
    values[0, 0, tokens : 2 * tokens] = 0.0
    values[0, 1, :tokens] = -1e-9
    values[0, 1, tokens : 2 * tokens] = np.linspace(-127, 127, tokens) / 2
    values[1, 1, :tokens] = 59000.0
    values[1, 0, : tokens // 2] = -0.0
    return values.astype(np.float32)


def check(raw: torch.Tensor, geometry: SliceGeometry) -> None:
    strides = geometry.slice_stride("raw"), geometry.slice_stride("int8")
    coded = torch.full((BLOCKS, LAYERS * strides[1]), 0xEE, dtype=torch.uint8)
    back = torch.full_like(raw, 0xEE)
    refused = quantise(addresses(raw), addresses(coded), geometry, LAYERS)
    dequantise(addresses(coded), addresses(back), geometry, LAYERS)
    assert refused.tolist() == [0] * BLOCKS
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            first, begin = layer * strides[0], layer * strides[1]
            wanted = quantise_slice(raw[block, first : first + geometry.raw_bytes].numpy(), geometry)
            assert wanted is not None
            np.testing.assert_array_equal(coded[block, begin : begin + geometry.int8_bytes].numpy(), wanted)
            found = back[block, first : first + geometry.raw_bytes].numpy()
            np.testing.assert_array_equal(found, dequantise_slice(wanted, geometry))
            assert (coded[block, begin + geometry.int8_bytes : begin + strides[1]] == 0xEE).all()
            assert (back[block, first + geometry.raw_bytes : first + strides[0]] == 0xEE).all()


SIZES = [(32, 64), (66, 64), (80, 64), (128, 32)]
QUICK = [("float16", 32, 64), ("bfloat16", 66, 64), ("float32", 80, 64), ("float16", 128, 32)]
REST = [
    case
    for case in [(dtype, *size) for dtype in ("float16", "bfloat16", "float32") for size in SIZES]
    if case not in QUICK
]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tokens"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)]
)
def test_bit_equal_to_numpy(dtype: str, head_dim: int, tokens: int) -> None:
    assert interpreted()
    geometry = SliceGeometry(2, head_dim, tokens, dtype)
    check(write_raw(draw(geometry, head_dim), geometry), geometry)


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (np.nan, "key"),
        (-60100.0, "key"),
        (np.nan, "value"),
        (60100.0, "value"),
        pytest.param(np.inf, "key", marks=pytest.mark.slow),
        pytest.param(60100.0, "key", marks=pytest.mark.slow),
        pytest.param(-np.inf, "value", marks=pytest.mark.slow),
        pytest.param(-60100.0, "value", marks=pytest.mark.slow),
    ],
)
def test_blocks_that_must_stay_raw_are_named(bad: float, part: str) -> None:
    geometry = SliceGeometry(2, 32, 64, "float32")
    values = np.ones((BLOCKS, LAYERS, 2 * geometry.kv_heads * geometry.head_elements), np.float32)
    values[1, 1, -1 if part == "value" else -geometry.head_elements - 1] = bad
    raw = write_raw(values, geometry)
    coded = torch.zeros(BLOCKS, LAYERS * geometry.slice_stride("int8"), dtype=torch.uint8)
    assert quantise(addresses(raw), addresses(coded), geometry, LAYERS).tolist() == [0, 1]


def test_the_largest_value_that_fits() -> None:
    geometry = SliceGeometry(1, 32, 64, "float32")
    values = np.full((BLOCKS, LAYERS, 2 * geometry.head_elements), 60000.0, np.float32)
    values[:, :, ::3] = -60000.0
    check(write_raw(values, geometry), geometry)


def test_bad_arguments() -> None:
    good, geometry = torch.zeros(2, dtype=torch.int64), SliceGeometry(1, 32, 64, "float16")
    with pytest.raises(ValueError, match="layers is 0"):
        quantise(good, good, geometry, 0)
    with pytest.raises(ValueError, match=r"coded is torch\.int32"):
        quantise(good, good.int(), geometry, 1)
    with pytest.raises(ValueError, match="raw has strides"):
        quantise(torch.zeros(4, dtype=torch.int64)[::2], good, geometry, 1)
    with pytest.raises(ValueError, match="head_dim is 33"):
        dequantise(good, good, SliceGeometry(1, 33, 64, "float16"), 1)
    empty = torch.zeros(0, dtype=torch.int64)
    assert quantise(empty, empty, geometry, 1).shape == (0,)
