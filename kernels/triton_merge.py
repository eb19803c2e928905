"""Merging partial attention by log-sum-exp, in Triton: the splits of one launch, and the partials of several.

Each program joins one (query, head) pair: it finds the largest log-sum-exp, then sums the values of the parts
weighted by ``exp(lse - largest)``, a fixed number of parts at a time. Parts that saw nothing are not read. Sums are
fp32. Not yet run on hardware: checked in the interpreter, compiled for the targets of ``compile_gate``.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvstore.kernels.paged import Partial
from kvstore.kernels.triton_launch import on_device_of, require_device

__all__ = ["merge", "merge_kernel", "merge_stacked"]

PARTS_A_STEP = tl.constexpr(16)
"""Parts joined in one step: 16 rows of 256 channels take 32 registers of each thread."""


@triton.jit
def top_log(lse, parts, pairs, pair):
    """Return the largest log-sum-exp of one pair over all parts."""
    top = tl.full((PARTS_A_STEP,), float("-inf"), tl.float32)
    for first in range(0, parts, PARTS_A_STEP):
        part = first + tl.arange(0, PARTS_A_STEP)
        log = tl.load(lse + part.to(tl.int64) * pairs + pair, mask=part < parts, other=float("-inf"))
        top = tl.maximum(top, log)
    return tl.max(top, 0)


@triton.jit(do_not_specialize=["parts", "pairs"])
def merge_kernel(
    part_out,
    part_lse,
    sinks,
    out,
    lse,
    parts,
    pairs,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid (pairs): ``part_out`` fp32 [parts, pairs, HEAD_DIM] and ``part_lse`` fp32 [parts, pairs] into one part.

    A pair is a query and a head, heads fastest; ``sinks`` fp32 [HEADS] is read only with HAS_SINKS.
    """
    pair = tl.program_id(0)
    channels = tl.arange(0, BLOCK_D)
    inside = channels < HEAD_DIM
    top = top_log(part_lse, parts, pairs, pair)
    sink = float("-inf")
    if HAS_SINKS:
        sink = tl.load(sinks + pair % HEADS)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.exp(sink - safe)
    total = tl.full((BLOCK_D,), 0.0, tl.float32)
    for first in range(0, parts, PARTS_A_STEP):
        part = first + tl.arange(0, PARTS_A_STEP)
        place = part.to(tl.int64) * pairs + pair
        log = tl.load(part_lse + place, mask=part < parts, other=float("-inf"))
        weight = tl.exp(log - safe)
        wanted = (log > float("-inf"))[:, None] & inside[None, :]
        values = tl.load(part_out + place[:, None] * HEAD_DIM + channels[None, :], mask=wanted, other=0.0)
        mass += tl.sum(weight, 0)
        total += tl.sum(values * weight[:, None], 0)
    empty = mass == 0.0
    tl.store(lse + pair, tl.where(empty, float("-inf"), safe + tl.log(tl.where(empty, 1.0, mass))))
    place = pair.to(tl.int64) * HEAD_DIM + channels
    tl.store(out + place, total / tl.where(empty, 1.0, mass), mask=inside)


def merge_stacked(part_out: torch.Tensor, part_lse: torch.Tensor, sinks: torch.Tensor | None = None) -> Partial:
    """Join ``part_out`` fp32 [parts, queries, q_heads, head_dim] and ``part_lse`` fp32 [parts, queries, q_heads].

    Both are contiguous. ``sinks`` fp32 [q_heads] as in ``attention.merge``. Returns fresh tensors.
    """
    require_device("part_out", part_out)
    parts, queries, heads, dim = part_out.shape
    out = torch.empty(part_out.shape[1:], dtype=torch.float32, device=part_out.device)
    lse = torch.empty(part_lse.shape[1:], dtype=torch.float32, device=part_out.device)
    if not queries:
        return Partial(out, lse)
    with on_device_of(part_out):
        merge_kernel[(queries * heads,)](
            part_out,
            part_lse,
            part_lse if sinks is None else sinks.to(torch.float32).contiguous(),
            out,
            lse,
            parts,
            queries * heads,
            HEADS=heads,
            HEAD_DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            HAS_SINKS=sinks is not None,
            num_warps=1 if dim <= 64 else 4,
        )
    return Partial(out, lse)


def merge(partials: Sequence[Partial], sinks: torch.Tensor | None = None) -> Partial:
    """The contract of ``attention.merge`` for checked arguments on a GPU: one launch for any number of parts."""
    if len(partials) == 1:
        return merge_stacked(partials[0].out.contiguous()[None], partials[0].lse.contiguous()[None], sinks)
    return merge_stacked(
        torch.stack([part.out for part in partials]), torch.stack([part.lse for part in partials]), sinks
    )
