"""The Triton kernel of paged attention: a tile of queries of one KV head against a share of one sequence's blocks.

Decode and prefill are this one kernel with a different tile height. The rows of a sequence are its pairs (query,
head of the GQA group) in that order, ``queries * GROUP`` of them, cut into tiles of ``BLOCK_M`` rows: with one query
a sequence, a whole group is one tile of 16 rows. Tiles never straddle sequences: those of sequence ``s`` begin at
number ``offsets[s] * GROUP // BLOCK_M + s``, so the grid needs no knowledge of how long each sequence is.

A program reads its sequence's block table once to find the range of entries that its rows can see at all (tables in
order make that range tight, any order stays correct), takes its share of the range, and runs over it with a straight
loop whose loads are masked, so that the compiler may pipeline them. Blocks are absolute addresses: memory of the device, memory of
another process mapped by CUDA IPC, and pinned host memory are all read alike.

An int8 slice pairs channel ``i`` with channel ``i + head_dim / 2`` and token ``i`` with ``i + block_tokens / 2`` in one
16-bit word, so a tile of words is two tiles of codes that are multiplied as they are: no shuffles, nothing
dequantised in memory. The per-channel scale goes into q, the zero point into one number a row, V's scale into the
weights. Codes become fp16 by placing the byte in the mantissa of 1024 (``0x6400``) and subtracting.

Sums are fp32. Not yet run on hardware: checked in the interpreter, compiled for the targets of ``compile_gate``.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

SEQUENCE_SCAN = tl.constexpr(128)
"""Sequences looked at in one step when a tile looks for its own."""

TABLE_SCAN = tl.constexpr(1024)
"""Table entries looked at in one step when a program looks for those that it needs."""


@triton.jit
def find_sequence(query_offsets, sequences, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the last sequence whose first tile is not after ``tile``."""
    found = 0
    for base in range(0, sequences, SEQUENCE_SCAN):
        index = base + tl.arange(0, SEQUENCE_SCAN)
        inside = index < sequences
        first_row = tl.load(query_offsets + index, mask=inside, other=0) * GROUP
        found += tl.sum((inside & (first_row // BLOCK_M + index <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit
def find_entries(addresses, starts, blocks, first_seen, last_seen, BLOCK_TOKENS: tl.constexpr):
    """Return the half-open range of table entries that holds every block with a token in first_seen..last_seen."""
    low = tl.full((TABLE_SCAN,), 2147483647, tl.int32)
    high = tl.zeros((TABLE_SCAN,), tl.int32)
    for base in range(0, blocks, TABLE_SCAN):
        index = base + tl.arange(0, TABLE_SCAN)
        inside = index < blocks
        address = tl.load(addresses + index, mask=inside, other=0)
        start = tl.load(starts + index, mask=inside, other=0)
        wanted = (address != 0) & (start <= last_seen) & (start + BLOCK_TOKENS > first_seen)
        low = tl.minimum(low, tl.where(wanted, index, 2147483647))
        high = tl.maximum(high, tl.where(wanted, index + 1, 0))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def finish_scores(scores, factor, positions, places, window, soft_cap, WINDOW: tl.constexpr, CAP: tl.constexpr):
    """Scale, cap and mask raw dot products [rows, tokens]; the result is in units of log2, -inf where unseen."""
    scores = scores * factor
    if CAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1); both ends saturate without a NaN.
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))
    seen = positions[None, :] <= places[:, None]
    if WINDOW:
        seen = seen & (positions[None, :] > places[:, None] - window)
    return tl.where(seen, scores * LOG2_E, float("-inf"))


@triton.jit
def shift_top(top, tile_top):
    """Return the new running maximum, a finite stand-in where it is -inf, and the decay of what was summed before."""
    new_top = tl.maximum(top, tile_top)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, safe, tl.exp2(top - safe)


@triton.jit
def multiply(left, right, FP32_PRODUCTS: tl.constexpr):
    """``left @ right`` in fp32. The interpreter multiplies the raw bits of bf16, so there both go to fp32 first."""
    if FP32_PRODUCTS:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def low_codes(words):
    """The int8 in the low byte of each int16, as fp16: exact."""
    return ((words & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def high_codes(words):
    """The int8 in the high byte of each int16, as fp16: exact."""
    return (((words >> 8) & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def attend_raw(
    query, top, mass, total, slice_head, first_token, start, live, places, last_seen, score_scale, window, soft_cap,
    RAW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FP32_PRODUCTS: tl.constexpr,
):  # fmt: skip
    """One tile of TILE tokens of a raw slice: K [HEAD_DIM, tokens], V [tokens, HEAD_DIM] at ``slice_head``."""
    pointer = slice_head.to(tl.pointer_type(RAW))
    channels = tl.arange(0, BLOCK_D)
    tokens = first_token + tl.arange(0, TILE)
    positions = start + tokens
    inside = channels < HEAD_DIM
    key = tl.load(
        pointer + channels[:, None] * BLOCK_TOKENS + tokens[None, :], mask=inside[:, None] & live, other=0.0
    )
    # A token that no row sees may be memory that was never written: its weight is 0, and 0 * NaN is NaN.
    written = (positions <= last_seen) & live
    value = tl.load(
        pointer + HEAD_DIM * BLOCK_TOKENS + tokens[:, None] * HEAD_DIM + channels[None, :],
        mask=written[:, None] & inside[None, :],
        other=0.0,
    )
    places = tl.where(live, places, -1)
    scores = multiply(query, key, FP32_PRODUCTS)
    scores = finish_scores(scores, score_scale, positions, places, window, soft_cap, WINDOW, CAP)
    top, safe, decay = shift_top(top, tl.max(scores, 1))
    weights = tl.exp2(scores - safe[:, None])
    mass = mass * decay + tl.sum(weights, 1)
    total = total * decay[:, None] + multiply(weights.to(RAW), value, FP32_PRODUCTS)
    return top, mass, total
