"""The int8 codec in plain numpy: the definition that C++ and Triton equal bit for bit.

The prose is in docs/format-slices.md. All arithmetic is IEEE fp32, one rounding an operation, no fused
multiply-add where it would change a bit (``code * scale`` is exact, so decoding may fuse).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.kernels.layout import SliceGeometry

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]

LARGEST_VALUE = np.float32(60000.0)
"""Blocks with a larger magnitude (or NaN or Inf) stay raw: decoded values then always fit in fp16."""

INVERSE_127 = np.float32(1.0 / 127.0)


def raw_to_float32(data: Bytes, dtype: str) -> Floats:
    """Read raw elements of ``dtype`` from bytes as fp32 [elements]; exact."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.dtype(dtype)).astype(np.float32)


def float32_to_raw(values: Floats, dtype: str) -> Bytes:
    """Round fp32 values to ``dtype``, to nearest and ties to even, and return their bytes. Values are finite."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(np.dtype(dtype)).view(np.uint8)


def check_int8_geometry(geometry: SliceGeometry) -> None:
    """Raise ValueError unless the int8 interleave, which pairs halves, can hold this geometry."""
    for name in ("head_dim", "block_tokens"):
        if getattr(geometry, name) % 2:
            raise ValueError(f"{name} is {getattr(geometry, name)}; the int8 codec needs an even number")


def interleave(codes: Codes) -> Codes:
    """Put row ``i`` beside row ``i + rows / 2``: [rows, columns] becomes [rows / 2, columns, 2]."""
    half = codes.shape[0] // 2
    return np.stack([codes[:half], codes[half:]], axis=-1)


def separate(pairs: Codes) -> Codes:
    """Undo ``interleave``: [rows / 2, columns, 2] becomes [rows, columns]."""
    return np.concatenate([pairs[..., 0], pairs[..., 1]], axis=0)


def _reciprocal(scale: Floats) -> Floats:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _codes(scaled: Floats) -> Codes:
    return np.clip(np.rint(scaled), -127, 127).astype(np.int8)


def quantise_head(key: Floats, value: Floats) -> Bytes | None:
    """Encode one head: K fp32 [head_dim, block_tokens], V fp32 [block_tokens, head_dim]; None if refused."""
    if not (np.abs(key) <= LARGEST_VALUE).all() or not (np.abs(value) <= LARGEST_VALUE).all():
        return None
    low, high = key.min(1), key.max(1)
    zero = ((low + high) * np.float32(0.5)).astype(np.float16) + np.float16(0)  # -0 becomes +0
    centre = zero.astype(np.float32)
    key_scale = (np.maximum(high - centre, centre - low) * INVERSE_127).astype(np.float16)
    inverse = _reciprocal(key_scale.astype(np.float32))
    key_codes = _codes((key - centre[:, None]) * inverse[:, None])
    value_scale = (np.abs(value).max(1) * INVERSE_127).astype(np.float16)
    value_codes = _codes(value * _reciprocal(value_scale.astype(np.float32))[:, None])
    parts = (interleave(key_codes), interleave(value_codes), key_scale, zero, value_scale)
    return np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])


def dequantise_head(data: Bytes, geometry: SliceGeometry) -> tuple[Floats, Floats]:
    """Decode one head of an int8 slice: K fp32 [head_dim, block_tokens] and V fp32 [block_tokens, head_dim]."""
    dim, tokens, count = geometry.head_dim, geometry.block_tokens, geometry.head_elements
    key_codes = separate(data[:count].view(np.int8).reshape(dim // 2, tokens, 2))
    value_codes = separate(data[count : 2 * count].view(np.int8).reshape(tokens // 2, dim, 2))
    params = data[2 * count : geometry.int8_head_bytes].copy().view(np.float16).astype(np.float32)
    key_scale, zero, value_scale = params[:dim], params[dim : 2 * dim], params[2 * dim :]
    key = key_codes.astype(np.float32) * key_scale[:, None] + zero[:, None]
    return key, value_codes.astype(np.float32) * value_scale[:, None]


def quantise_slice(raw: Bytes, geometry: SliceGeometry) -> Bytes | None:
    """Encode a raw slice, uint8 [raw_bytes], into uint8 [int8_bytes]; None if it must stay raw."""
    check_int8_geometry(geometry)
    dim, tokens = geometry.head_dim, geometry.block_tokens
    heads = raw_to_float32(raw[: geometry.raw_bytes], geometry.dtype).reshape(geometry.kv_heads, 2, -1)
    coded = [quantise_head(head[0].reshape(dim, tokens), head[1].reshape(tokens, dim)) for head in heads]
    kept = [head for head in coded if head is not None]
    return np.concatenate(kept) if len(kept) == len(coded) else None


def dequantise_slice(coded: Bytes, geometry: SliceGeometry) -> Bytes:
    """Decode an int8 slice, uint8 [int8_bytes], into raw uint8 [raw_bytes] of the model's dtype."""
    check_int8_geometry(geometry)
    rows = coded[: geometry.int8_bytes].reshape(geometry.kv_heads, geometry.int8_head_bytes)
    parts = [half.reshape(-1) for row in rows for half in dequantise_head(row, geometry)]
    return float32_to_raw(np.concatenate(parts), geometry.dtype)
