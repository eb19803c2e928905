"""Paged attention on the CPU with torch alone: the path without a compiler, and the path of prefill.

A sequence's visible blocks are decoded in chunks into one fp32 workspace a thread, which is kept between
calls (fresh memory costs more in page faults than the copy), and joined by a running log-sum-exp.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial

CHUNK_TOKENS = 2048
"""Tokens decoded at a time: K and V of one head of 128 then take 2 MiB, about an L2 cache."""

_TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class _Workspace(threading.local):
    """Memory of this thread for decoded K and V, grown to the largest chunk that it met."""

    def __init__(self) -> None:
        self.floats = torch.empty(0)

    def take(self, count: int) -> torch.Tensor:
        if self.floats.numel() < count:
            self.floats = torch.empty(count)
        return self.floats[:count]


_workspace = _Workspace()


def paged_attention(query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, *, layer: int) -> Partial:
    """The contract of ``attention.paged_attention``, for checked arguments on the CPU."""
    out = torch.zeros(query.shape, dtype=torch.float32)
    lse = torch.full(query.shape[:2], -torch.inf)
    offsets = batch.query_offsets.tolist()
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        if begin == end:
            continue
        part = _attend_sequence(query[begin:end], batch, options, sequence, layer)
        out[begin:end], lse[begin:end] = part.out, part.lse
    return Partial(out, lse)


def merge(partials: Sequence[Partial], sinks: torch.Tensor | None) -> Partial:
    """The contract of ``attention.merge``, for checked arguments on any device."""
    logs = [part.lse for part in partials]
    if sinks is not None:
        logs.append(sinks.to(logs[0]).expand_as(logs[0]))
    lse = torch.logsumexp(torch.stack(logs), dim=0)
    safe = torch.where(lse == -torch.inf, 0.0, lse)
    out = torch.zeros_like(partials[0].out)
    for part in partials:
        out.addcmul_(part.out, torch.exp(part.lse - safe).unsqueeze(-1))
    return Partial(out, lse)


def _attend_sequence(
    query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, sequence: int, layer: int
) -> Partial:
    """Attention of one sequence's queries [n, q_heads, head_dim]."""
    geometry = batch.geometry
    count, heads, dim = query.shape
    last = int(batch.context_lens[sequence])
    places = torch.arange(last - count, last)
    grouped = (query.float() * options.scale).view(count, geometry.kv_heads, -1, dim)
    rows = grouped.permute(1, 2, 0, 3).reshape(geometry.kv_heads, -1, dim)
    top = torch.full((*rows.shape[:2], 1), -torch.inf)
    mass, out = torch.zeros_like(top), torch.zeros_like(rows)
    for blocks in _chunks(batch, options, sequence, count):
        key, value, tokens = _decode_blocks(blocks, batch, layer)
        value.masked_fill_((tokens >= last)[None, :, None], 0.0)
        hidden = tokens[None, :] > places[:, None]
        if options.window is not None:
            hidden |= tokens[None, :] <= places[:, None] - options.window
        scores = torch.bmm(rows, key)
        if options.soft_cap is not None:
            scores = scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        scores.view(geometry.kv_heads, -1, count, tokens.numel()).masked_fill_(hidden, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = torch.where(new_top == -torch.inf, 0.0, new_top)
        weights = scores.sub_(safe).exp_()
        decay = torch.exp(top - safe)
        mass = mass * decay + weights.sum(-1, keepdim=True)
        out = torch.baddbmm(out * decay, weights, value)
        top = new_top
    lse = torch.where(mass > 0, top + mass.log(), -torch.inf)
    out = out / torch.where(mass > 0, mass, 1.0)
    shape = (geometry.kv_heads, heads // geometry.kv_heads, count)
    return Partial(
        out.view(*shape, dim).permute(2, 0, 1, 3).reshape(count, heads, dim),
        lse.view(*shape).permute(2, 0, 1).reshape(count, heads),
    )


def _chunks(batch: PagedBatch, options: AttentionOptions, sequence: int, count: int) -> list[list[tuple[int, int]]]:
    """Address and start of the blocks that any query of the sequence sees, in chunks."""
    last = int(batch.context_lens[sequence])
    first = 0 if options.window is None else last - count - options.window + 1
    tokens = batch.geometry.block_tokens
    table = zip(batch.addresses[sequence].tolist(), batch.starts[sequence].tolist(), strict=True)
    seen = [(address, start) for address, start in table if address and start < last and start + tokens > first]
    step = max(1, CHUNK_TOKENS // tokens)
    return [seen[index : index + step] for index in range(0, len(seen), step)]


def _decode_blocks(
    blocks: list[tuple[int, int]], batch: PagedBatch, layer: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decode blocks: K fp32 [kv_heads, head_dim, tokens], V fp32 [kv_heads, tokens, head_dim], positions [tokens].

    K and V are the thread's workspace: valid until the next chunk.
    """
    geometry = batch.geometry
    heads, dim, width = geometry.kv_heads, geometry.head_dim, geometry.block_tokens
    total = len(blocks) * width
    floats = _workspace.take(2 * heads * dim * total)
    key = floats[: heads * dim * total].view(heads, dim, total)
    value = floats[heads * dim * total :].view(heads, total, dim)
    offset, size = layer * geometry.slice_stride(batch.codec), geometry.slice_bytes(batch.codec)
    for index, (address, _) in enumerate(blocks):
        data = memory_at(address + offset, size)
        block_key, block_value = _slice_values(data, geometry, batch.codec)
        span = slice(index * width, (index + 1) * width)
        key[:, :, span] = block_key
        value[:, span] = block_value
    starts = torch.tensor([start for _, start in blocks])
    return key, value, (starts[:, None] + torch.arange(width)).flatten()


def memory_at(address: int, size: int) -> torch.Tensor:
    """View ``size`` bytes of this process as uint8 without copying."""
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _slice_values(data: torch.Tensor, geometry: SliceGeometry, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K [kv_heads, head_dim, block_tokens] and V [kv_heads, block_tokens, head_dim]; raw ones are views."""
    heads, dim, tokens, count = (
        geometry.kv_heads,
        geometry.head_dim,
        geometry.block_tokens,
        geometry.head_elements,
    )
    if codec == "raw":
        both = data.view(_TORCH_DTYPES[geometry.dtype]).view(heads, 2, count)
        return both[:, 0].view(heads, dim, tokens), both[:, 1].view(heads, tokens, dim)
    rows = data.view(heads, geometry.int8_head_bytes)
    params = rows[:, 2 * count :].contiguous().view(torch.float16).float()
    key_scale, zero, value_scale = params[:, :dim], params[:, dim : 2 * dim], params[:, 2 * dim :]
    key_codes = rows[:, :count].view(torch.int8).view(heads, dim // 2, tokens, 2)
    value_codes = rows[:, count : 2 * count].view(torch.int8).view(heads, tokens // 2, dim, 2)
    key = torch.cat([key_codes[..., 0], key_codes[..., 1]], dim=1).float()
    value = torch.cat([value_codes[..., 0], value_codes[..., 1]], dim=1).float()
    return key.mul_(key_scale[..., None]).add_(zero[..., None]), value.mul_(value_scale[..., None])
