"""The written specification of int8 slices, checked on the numpy reference."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.quant_reference import (
    dequantise_head,
    dequantise_slice,
    float32_to_raw,
    quantise_head,
    quantise_slice,
    raw_to_float32,
)

GEOMETRY = SliceGeometry(1, 40, 64, "float32")


def draw(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((40, 64), dtype=np.float32), rng.standard_normal((64, 40), dtype=np.float32)


def encode(key: np.ndarray, value: np.ndarray) -> np.ndarray:
    coded = quantise_head(key, value)
    assert coded is not None
    return coded


def test_codes_lie_where_the_document_says() -> None:
    key, value = draw()
    coded = encode(key, value)
    codes, params = coded.view(np.int8), coded[2 * 40 * 64 :].view(np.float16).astype(np.float32)
    for channel, token in ((0, 0), (19, 63), (20, 0), (39, 17)):
        code = codes[2 * ((channel % 20) * 64 + token) + channel // 20]
        decoded = code * params[channel] + params[40 + channel]
        assert abs(decoded - key[channel, token]) <= 0.51 * params[channel]
    for token, channel in ((0, 0), (31, 39), (32, 5), (63, 39)):
        code = codes[40 * 64 + 2 * ((token % 32) * 40 + channel) + token // 32]
        assert abs(code * params[80 + token] - value[token, channel]) <= 0.51 * params[80 + token]
    assert coded.size == GEOMETRY.int8_head_bytes


def test_error_is_at_most_half_a_step() -> None:
    key, value = draw(1)
    key += np.linspace(-50, 50, 40, dtype=np.float32)[:, None]
    key_back, value_back = dequantise_head(encode(key, value), GEOMETRY)
    step = (key.max(1) - key.min(1))[:, None] / 254
    assert (np.abs(key_back - key) <= 0.5 * step + 6e-4 * np.abs(key)).all()
    assert (np.abs(value_back - value) <= 0.51 * np.abs(value).max(1)[:, None] / 127).all()


def test_outlier_channels_do_not_hurt_the_others() -> None:
    plain, value = draw(2)
    spiky = plain.copy()
    spiky[::9] += 12
    errors = [
        float(np.sqrt(np.mean((dequantise_head(encode(key, value), GEOMETRY)[0] - key) ** 2))) for key in (plain, spiky)
    ]
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 60001.0, -1e30])
@pytest.mark.parametrize("part", ["key", "value"])
def test_values_that_int8_cannot_hold_are_refused(bad: float, part: str) -> None:
    key, value = draw(3)
    (key if part == "key" else value)[7, 11] = bad
    assert quantise_head(key, value) is None


def test_constant_and_zero_rows_are_exact_within_fp16() -> None:
    key, value = np.zeros((40, 64), np.float32), np.zeros((64, 40), np.float32)
    key[3] = 1.0
    key[4] = -0.0
    coded = encode(key, value)
    key_back, value_back = dequantise_head(coded, GEOMETRY)
    assert (key_back == key).all()
    assert (value_back == 0).all()
    zeros = coded[2 * 40 * 64 + 80 : 2 * 40 * 64 + 160].view(np.uint16)
    assert zeros[4] == 0


def test_largest_values_stay_finite_in_fp16() -> None:
    key, value = draw(4)
    key[0, ::2], key[0, 1::2], key[1] = 60000, -60000, 60000
    value[5] = -60000
    raw = dequantise_slice(encode(key, value), SliceGeometry(1, 40, 64, "float16"))
    assert np.isfinite(raw.view(np.float16)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_slice_round_trip_is_stable(dtype: str) -> None:
    """Encoding what was decoded changes a value by no more than the two roundings, and keeps the layout."""
    geometry = SliceGeometry(3, 40, 64, dtype)
    rng = np.random.default_rng(5)
    values = rng.standard_normal(geometry.raw_bytes // geometry.itemsize, dtype=np.float32)
    coded = quantise_slice(float32_to_raw(values, dtype), geometry)
    assert coded is not None
    back = raw_to_float32(dequantise_slice(coded, geometry), dtype)
    assert coded.size == geometry.int8_bytes
    assert np.abs(back - values).max() < 0.05


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.0039064], np.float32)
    assert raw_to_float32(float32_to_raw(values, "bfloat16"), "bfloat16").tolist() == [1.0, 1.0, 1.015625, -1.0078125]


@pytest.mark.parametrize(("dim", "tokens", "name"), [(41, 64, "head_dim"), (40, 63, "block_tokens")])
def test_odd_sizes_are_refused_by_name(dim: int, tokens: int, name: str) -> None:
    geometry = SliceGeometry(1, dim, tokens, "float32")
    with pytest.raises(ValueError, match=name):
        quantise_slice(np.zeros(geometry.raw_bytes, np.uint8), geometry)
