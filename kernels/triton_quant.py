"""The int8 codec on a GPU, bit-equal to ``quant_reference``: raw slices to int8 slices and back, by address.

The arithmetic is that of docs/format-slices.md, one rounding an operation: division is ``div_rn``, launches forbid
fused multiply-adds, and codes are clamped before they are rounded (the bounds are integers, so the order does not
matter), by adding and subtracting 1.5 * 2**23. A program encodes some pairs of channels of K, or some pairs of
tokens of V, of one head: both members of a pair lie in one 16-bit word, so words are built in registers.

Not yet run on hardware: checked in the interpreter, compiled for the targets of ``compile_gate``.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.triton_form import RAW_TYPES, check_geometry
from kvstore.kernels.triton_launch import on_device_of, require_device
from kvstore.kernels.triton_paged import pointer_at

__all__ = ["dequantise", "quantise"]

Grid = tuple[int, int, int]

LARGEST_VALUE = tl.constexpr(60000.0)
INVERSE_127 = tl.constexpr(1.0 / 127.0)
ROUNDER = tl.constexpr(12582912.0)
PAIRS = 16
"""Pairs of channels, or of tokens, that one program takes."""


@dataclass(frozen=True, slots=True)
class CodecForm:
    """Compile-time constants of the codec's kernels, in elements; ``pairs`` go to one program."""

    head_dim: int
    block_d: int
    block_tokens: int
    pairs: int
    kv_heads: int
    raw: tl.dtype
    raw_stride: int
    coded_stride: int
    alignment: int


def codec_form(geometry: SliceGeometry) -> CodecForm:
    """Return the form for slices of ``geometry``; raises ValueError if the kernels do not take it."""
    check_geometry(geometry, "int8")
    return CodecForm(
        head_dim=geometry.head_dim,
        block_d=triton.next_power_of_2(geometry.head_dim),
        block_tokens=geometry.block_tokens,
        pairs=PAIRS,
        kv_heads=geometry.kv_heads,
        raw=RAW_TYPES[geometry.dtype],
        raw_stride=geometry.slice_stride("raw"),
        coded_stride=geometry.slice_stride("int8"),
        alignment=16 if geometry.head_dim % 4 == 0 else 8,
    )


@triton.jit
def head_bases(raw_addresses, coded_addresses, layers, FORM: tl.constexpr):
    """Return the first byte of this program's head in its raw and its coded slice; program axes are slice and head."""
    slice_index = tl.program_id(0)
    head = tl.program_id(1)
    block = slice_index // layers
    layer = (slice_index % layers).to(tl.int64)
    raw = tl.load(raw_addresses + block) + layer * FORM.raw_stride
    raw += head * (2 * FORM.head_dim * FORM.block_tokens * (FORM.raw.primitive_bitwidth // 8))
    coded = tl.load(coded_addresses + block) + layer * FORM.coded_stride
    coded += head * (2 * FORM.head_dim * FORM.block_tokens + 4 * FORM.head_dim + 2 * FORM.block_tokens)
    return raw, coded


@triton.jit
def to_codes(scaled):
    """Round to the nearest integer, ties to even, within -127..127, as int16."""
    clamped = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
    return ((clamped + ROUNDER) - ROUNDER).to(tl.int16)


@triton.jit
def reciprocal(scale):
    """1 / scale, correctly rounded; 0 where scale is 0."""
    return tl.where(scale == 0.0, 0.0, tl.div_rn(1.0, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def encode_channels(values):
    """Encode channels [pairs, tokens] fp32: codes int16, scale and zero fp16 [pairs]."""
    low = tl.min(values, 1)
    high = tl.max(values, 1)
    # A negative zero becomes +0, as the format says: -0 + 0 is +0.
    zero = (((low + high) * 0.5).to(tl.float16) + 0.0).to(tl.float16)
    centre = zero.to(tl.float32)
    scale = (tl.maximum(high - centre, centre - low) * INVERSE_127).to(tl.float16)
    return to_codes((values - centre[:, None]) * reciprocal(scale.to(tl.float32))[:, None]), scale, zero


@triton.jit
def encode_tokens(values):
    """Encode tokens [pairs, channels] fp32: codes int16 and scale fp16 [pairs]."""
    scale = (tl.max(tl.abs(values), 1) * INVERSE_127).to(tl.float16)
    return to_codes(values * reciprocal(scale.to(tl.float32))[:, None]), scale


@triton.jit
def refuse(refused, layers, low, high):
    """Mark this program's block when a value is NaN, infinite or too large for the codec."""
    fits = (tl.abs(low) <= LARGEST_VALUE) & (tl.abs(high) <= LARGEST_VALUE)
    misfits = tl.sum(tl.sum((~fits).to(tl.int32), 1), 0)
    tl.store(refused + tl.program_id(0) // layers, 1, mask=misfits > 0)


@triton.jit(do_not_specialize=["layers"])
def quantise_keys_kernel(raw_addresses, coded_addresses, refused, layers, FORM: tl.constexpr):
    """Grid (slices, heads, chunks of channel pairs): K codes, scales and zeros of one head."""
    raw, coded = head_bases(raw_addresses, coded_addresses, layers, FORM)
    HALF: tl.constexpr = FORM.head_dim // 2
    pair = tl.program_id(2) * FORM.pairs + tl.arange(0, FORM.pairs)
    token = tl.arange(0, FORM.block_tokens)
    inside = (pair < HALF)[:, None]
    place = pair[:, None] * FORM.block_tokens + token[None, :]
    source = pointer_at(raw, FORM.raw, FORM) + place
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF * FORM.block_tokens, mask=inside, other=0.0).to(tl.float32)
    refuse(refused, layers, low, high)
    low_code, low_scale, low_zero = encode_channels(low)
    high_code, high_scale, high_zero = encode_channels(high)
    words = (low_code & 0xFF) | (high_code << 8)
    tl.store(pointer_at(coded, tl.int16, FORM) + place, words, mask=inside)
    params = pointer_at(coded, tl.float16, FORM) + FORM.head_dim * FORM.block_tokens + pair
    tl.store(params, low_scale, mask=pair < HALF)
    tl.store(params + HALF, high_scale, mask=pair < HALF)
    tl.store(params + FORM.head_dim, low_zero, mask=pair < HALF)
    tl.store(params + FORM.head_dim + HALF, high_zero, mask=pair < HALF)


@triton.jit(do_not_specialize=["layers"])
def quantise_values_kernel(raw_addresses, coded_addresses, refused, layers, FORM: tl.constexpr):
    """Grid (slices, heads, chunks of token pairs): V codes and scales of one head."""
    raw, coded = head_bases(raw_addresses, coded_addresses, layers, FORM)
    HALF: tl.constexpr = FORM.block_tokens // 2
    COUNT: tl.constexpr = FORM.head_dim * FORM.block_tokens
    pair = tl.program_id(2) * FORM.pairs + tl.arange(0, FORM.pairs)
    channel = tl.arange(0, FORM.block_d)
    inside = (channel < FORM.head_dim)[None, :]
    place = pair[:, None] * FORM.head_dim + channel[None, :]
    source = pointer_at(raw, FORM.raw, FORM) + COUNT + place
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF * FORM.head_dim, mask=inside, other=0.0).to(tl.float32)
    refuse(refused, layers, low, high)
    low_code, low_scale = encode_tokens(low)
    high_code, high_scale = encode_tokens(high)
    words = (low_code & 0xFF) | (high_code << 8)
    tl.store(pointer_at(coded, tl.int16, FORM) + COUNT // 2 + place, words, mask=inside)
    scales = pointer_at(coded, tl.float16, FORM) + COUNT + 2 * FORM.head_dim + pair
    tl.store(scales, low_scale)
    tl.store(scales + HALF, high_scale)


@triton.jit
def low_byte(words):
    """The int8 in the low byte of each int16, as fp32."""
    return ((words << 8) >> 8).to(tl.float32)


@triton.jit
def high_byte(words):
    """The int8 in the high byte of each int16, as fp32."""
    return (words >> 8).to(tl.float32)


@triton.jit
def to_raw(values, FORM: tl.constexpr):
    """Round fp32 to the raw dtype, to nearest, ties to even; bf16 by integers, as the interpreter's cast truncates."""
    if FORM.raw == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(FORM.raw)


@triton.jit(do_not_specialize=["layers"])
def dequantise_keys_kernel(raw_addresses, coded_addresses, layers, FORM: tl.constexpr):
    """Grid (slices, heads, chunks of channel pairs): K of one head, rounded to the raw dtype."""
    raw, coded = head_bases(raw_addresses, coded_addresses, layers, FORM)
    HALF: tl.constexpr = FORM.head_dim // 2
    pair = tl.program_id(2) * FORM.pairs + tl.arange(0, FORM.pairs)
    token = tl.arange(0, FORM.block_tokens)
    inside = (pair < HALF)[:, None]
    place = pair[:, None] * FORM.block_tokens + token[None, :]
    words = tl.load(pointer_at(coded, tl.int16, FORM) + place, mask=inside, other=0)
    params = pointer_at(coded, tl.float16, FORM) + FORM.head_dim * FORM.block_tokens + pair
    low_scale = tl.load(params, mask=pair < HALF, other=0.0).to(tl.float32)
    high_scale = tl.load(params + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    low_zero = tl.load(params + FORM.head_dim, mask=pair < HALF, other=0.0).to(tl.float32)
    high_zero = tl.load(params + FORM.head_dim + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    low = low_byte(words) * low_scale[:, None] + low_zero[:, None]
    high = high_byte(words) * high_scale[:, None] + high_zero[:, None]
    target = pointer_at(raw, FORM.raw, FORM) + place
    tl.store(target, to_raw(low, FORM), mask=inside)
    tl.store(target + HALF * FORM.block_tokens, to_raw(high, FORM), mask=inside)


@triton.jit(do_not_specialize=["layers"])
def dequantise_values_kernel(raw_addresses, coded_addresses, layers, FORM: tl.constexpr):
    """Grid (slices, heads, chunks of token pairs): V of one head, rounded to the raw dtype."""
    raw, coded = head_bases(raw_addresses, coded_addresses, layers, FORM)
    HALF: tl.constexpr = FORM.block_tokens // 2
    COUNT: tl.constexpr = FORM.head_dim * FORM.block_tokens
    pair = tl.program_id(2) * FORM.pairs + tl.arange(0, FORM.pairs)
    channel = tl.arange(0, FORM.block_d)
    inside = (channel < FORM.head_dim)[None, :]
    place = pair[:, None] * FORM.head_dim + channel[None, :]
    words = tl.load(pointer_at(coded, tl.int16, FORM) + COUNT // 2 + place, mask=inside, other=0)
    scales = pointer_at(coded, tl.float16, FORM) + COUNT + 2 * FORM.head_dim + pair
    low = low_byte(words) * tl.load(scales).to(tl.float32)[:, None]
    high = high_byte(words) * tl.load(scales + HALF).to(tl.float32)[:, None]
    target = pointer_at(raw, FORM.raw, FORM) + COUNT + place
    tl.store(target, to_raw(low, FORM), mask=inside)
    tl.store(target + HALF * FORM.head_dim, to_raw(high, FORM), mask=inside)


def quantise(raw: torch.Tensor, coded: torch.Tensor, geometry: SliceGeometry, layers: int) -> torch.Tensor:
    """Encode whole blocks: ``raw`` and ``coded`` int64 [blocks] are addresses of the slices of layer 0.

    Slices of a block follow one another at the geometry's slice strides. Returns int32 [blocks] on the device: 1
    where a value is NaN, infinite or above 60,000 in magnitude, so that the block has to stay raw and what
    lies at its ``coded`` address is of no use. The caller owns both memories until the stream has passed.
    Raises ValueError for addresses that do not fit and for geometry that the kernels do not take.
    """
    form = _checked_form(raw, coded, geometry, layers)
    refused = torch.zeros(raw.shape[0], dtype=torch.int32, device=raw.device)
    if raw.shape[0]:
        keys, values = _grids(raw, geometry, layers)
        with on_device_of(raw):
            quantise_keys_kernel[keys](raw, coded, refused, layers, FORM=form, num_warps=4, enable_fp_fusion=False)
            quantise_values_kernel[values](raw, coded, refused, layers, FORM=form, num_warps=4, enable_fp_fusion=False)
    return refused


def dequantise(coded: torch.Tensor, raw: torch.Tensor, geometry: SliceGeometry, layers: int) -> None:
    """Decode whole blocks into raw slices of the geometry's dtype; arguments as for ``quantise``."""
    form = _checked_form(raw, coded, geometry, layers)
    if raw.shape[0]:
        keys, values = _grids(raw, geometry, layers)
        with on_device_of(raw):
            dequantise_keys_kernel[keys](raw, coded, layers, FORM=form, num_warps=4)
            dequantise_values_kernel[values](raw, coded, layers, FORM=form, num_warps=4)


def _checked_form(raw: torch.Tensor, coded: torch.Tensor, geometry: SliceGeometry, layers: int) -> CodecForm:
    if layers < 1:
        raise ValueError(f"layers is {layers}; it must be at least 1")
    for name, tensor in (("raw", raw), ("coded", coded)):
        if tensor.dtype != torch.int64 or tensor.shape != raw.shape or tensor.dim() != 1:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be torch.int64 [blocks]")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
        require_device(name, tensor)
    return codec_form(geometry)


def _grids(raw: torch.Tensor, geometry: SliceGeometry, layers: int) -> tuple[Grid, Grid]:
    slices = raw.shape[0] * layers
    key_chunks = triton.cdiv(geometry.head_dim // 2, PAIRS)
    return (slices, geometry.kv_heads, key_chunks), (slices, geometry.kv_heads, geometry.block_tokens // 2 // PAIRS)
