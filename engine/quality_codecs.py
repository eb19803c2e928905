"""The codecs that the quality probe compares: the store's own, and two that it does not have, for comparison.

Each takes K and V of one layer, [kv_heads, tokens, head_dim] in fp32, whole blocks of tokens, and returns them as a
reader gets them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvstore.core.errors import InvalidArgument
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.quant import dequantise, quantise

BLOCK_TOKENS: Final = 64
_E4M3_MAX: Final = 448.0
_SCALE_MIN: Final = 6e-8
"""The smallest fp16 above zero: a token of zeros has a scale, too."""

Pair = tuple[torch.Tensor, torch.Tensor]
RoundTrip = Callable[[torch.Tensor, torch.Tensor], Pair]


@dataclass(frozen=True, slots=True)
class ProbeCodec:
    """A codec by name; ``slice_bytes`` of a geometry are what a block's slice takes under it."""

    name: str
    code: RoundTrip
    slice_bytes: Callable[[SliceGeometry], int]
    words: str

    def share_of_fp16(self, kv_heads: int, head_dim: int) -> float:
        """Bytes of a slice over those that raw fp16 takes."""
        return self.slice_bytes(_fp16(kv_heads, head_dim)) / _fp16(kv_heads, head_dim).raw_bytes


def through_dtype(dtype: torch.dtype) -> RoundTrip:
    """Raw blocks of a model whose K and V are kept in ``dtype``."""
    return lambda key, value: (key.to(dtype).float(), value.to(dtype).float())


def through_int8(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """The store's int8: whole blocks quantised and dequantised by the kernels that the store uses."""
    heads, tokens, width = key.shape
    geometry = SliceGeometry(heads, width, BLOCK_TOKENS, "float32")
    blocks = tokens // BLOCK_TOKENS
    # [blocks, heads, head_dim, block_tokens] and [blocks, heads, block_tokens, head_dim], as a raw slice holds them.
    keys = key.reshape(heads, blocks, BLOCK_TOKENS, width).permute(1, 0, 3, 2)
    values = value.reshape(heads, blocks, BLOCK_TOKENS, width).permute(1, 0, 2, 3)
    raw = torch.stack([keys.reshape(blocks, heads, -1), values.reshape(blocks, heads, -1)], 2).contiguous().numpy()
    coded = np.zeros(blocks * geometry.slice_stride("int8"), np.uint8)
    if not quantise(raw, coded, geometry, blocks, strides=(geometry.raw_bytes, geometry.slice_stride("int8"))):
        raise InvalidArgument("text", "values beyond fp16", "K and V that are finite; such blocks stay raw")
    back = np.empty_like(raw)
    dequantise(coded, back, geometry, blocks, strides=(geometry.raw_bytes, geometry.slice_stride("int8")))
    both = torch.from_numpy(back).view(blocks, heads, 2, -1)
    found_keys = both[:, :, 0].view(blocks, heads, width, BLOCK_TOKENS).permute(1, 0, 3, 2)
    found_values = both[:, :, 1].view(blocks, heads, BLOCK_TOKENS, width).permute(1, 0, 2, 3)
    return found_keys.reshape(heads, tokens, width), found_values.reshape(heads, tokens, width)


def through_token_int8(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """Plain int8: K and V alike symmetric, one fp16 scale a token and head. For comparison only."""
    return _token_int8(key), _token_int8(value)


def through_fp8(key: torch.Tensor, value: torch.Tensor) -> Pair:
    """fp8 e4m3, one fp16 scale a token and head. For comparison only."""
    return _fp8(key), _fp8(value)


def _token_int8(numbers: torch.Tensor) -> torch.Tensor:
    scale = _scale(numbers, 127.0)
    return (numbers / scale).round().clamp(-127, 127) * scale


def _fp8(numbers: torch.Tensor) -> torch.Tensor:
    scale = _scale(numbers, _E4M3_MAX)
    # A scale rounded down lets the largest number out of the range, where this dtype has NaN and no saturation.
    return (numbers / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def _scale(numbers: torch.Tensor, top: float) -> torch.Tensor:
    return (numbers.abs().amax(-1, keepdim=True) / top).half().float().clamp_min(_SCALE_MIN)


def _fp16(kv_heads: int, head_dim: int) -> SliceGeometry:
    return SliceGeometry(kv_heads, head_dim, BLOCK_TOKENS, "float16")


def _bytes_with_token_scales(geometry: SliceGeometry) -> int:
    """One byte a number, two bytes for the scale of each token and head, of K and of V."""
    return geometry.kv_heads * 2 * geometry.block_tokens * (geometry.head_dim + 2)


CODECS: Final = {
    codec.name: codec
    for codec in (
        ProbeCodec("fp16", through_dtype(torch.float16), lambda g: g.slice_bytes("raw"), "raw"),
        ProbeCodec("bf16", through_dtype(torch.bfloat16), lambda g: g.slice_bytes("raw"), "raw"),
        ProbeCodec("int8", through_int8, lambda g: g.slice_bytes("int8"), "K per channel and block, V per token"),
        ProbeCodec("int8-token", through_token_int8, _bytes_with_token_scales, "K and V per token, to compare with"),
        ProbeCodec("fp8", through_fp8, _bytes_with_token_scales, "e4m3 per token, to compare with"),
    )
}
