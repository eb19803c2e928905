"""What every attention kernel must agree with: float64, one loop a query, no cleverness.

Slow by intention and used by tests only. It reads slices by address as the kernels do, so that the layout,
the block table and the arithmetic are all checked by it. Arrays are numpy; memory behind the addresses must
be readable by the CPU (a GPU test keeps a host copy of its arena and passes ``read``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch
from kvstore.kernels.quant_reference import dequantise_head, raw_to_float32

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Reader = Callable[[int, int], Bytes]


@dataclass(frozen=True, slots=True)
class ReferencePartial:
    """``out`` float64 [queries, q_heads, head_dim] and ``lse`` float64 [queries, q_heads]."""

    out: Floats
    lse: Floats


def read_memory(address: int, size: int) -> Bytes:
    """Return a copy of ``size`` bytes at ``address`` of this process."""
    return np.frombuffer(ctypes.string_at(address, size), dtype=np.uint8)


def slice_values(data: Bytes, geometry: SliceGeometry, codec: str) -> tuple[Floats, Floats]:
    """Decode one slice into K and V, each float64 [kv_heads, block_tokens, head_dim].

    Of an int8 slice these are the values its codes stand for, ``code * scale + zero``, not rounded to the
    model's dtype: what a kernel that reads codes directly computes with.
    """
    heads, dim, tokens = geometry.kv_heads, geometry.head_dim, geometry.block_tokens
    if codec == "int8":
        rows = data[: geometry.int8_bytes].reshape(heads, geometry.int8_head_bytes)
        pairs = [dequantise_head(row, geometry) for row in rows]
        keys = np.stack([key for key, _ in pairs]).astype(np.float64)
        values = np.stack([value for _, value in pairs]).astype(np.float64)
        return keys.transpose(0, 2, 1), values
    raw = raw_to_float32(data[: geometry.raw_bytes], geometry.dtype).astype(np.float64)
    raw = raw.reshape(heads, 2, geometry.head_elements)
    keys = raw[:, 0].reshape(heads, dim, tokens).transpose(0, 2, 1)
    return keys, raw[:, 1].reshape(heads, tokens, dim)


def sequence_context(
    batch: PagedBatch, sequence: int, *, layer: int, read: Reader = read_memory
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Gather one sequence: K and V float64 [kv_heads, tokens, head_dim] and the tokens' positions, int64 [tokens].

    Only tokens that its last query may see are returned, in the order of the block table.
    """
    geometry = batch.geometry
    stride, size = geometry.slice_stride(batch.codec), geometry.slice_bytes(batch.codec)
    keys, values, positions = [], [], []
    for address, start in zip(batch.addresses[sequence].tolist(), batch.starts[sequence].tolist(), strict=True):
        if address == 0:
            continue
        key, value = slice_values(read(address + layer * stride, size), geometry, batch.codec)
        keys.append(key)
        values.append(value)
        positions.append(np.arange(start, start + geometry.block_tokens, dtype=np.int64))
    if not keys:
        empty = np.zeros((geometry.kv_heads, 0, geometry.head_dim))
        return empty, empty, np.zeros(0, dtype=np.int64)
    places = np.concatenate(positions)
    seen = places < int(batch.context_lens[sequence])
    return np.concatenate(keys, 1)[:, seen], np.concatenate(values, 1)[:, seen], places[seen]


def paged_attention_reference(
    query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, *, layer: int, read: Reader = read_memory
) -> ReferencePartial:
    """Attention of every query over its sequence's blocks; sinks are left to ``merge_reference``.

    ``query`` [queries, q_heads, head_dim] of any float dtype. Rows that see nothing give out 0, lse -inf.
    """
    rows = query.detach().cpu().double().numpy()
    count, heads, dim = rows.shape
    out, lse = np.zeros((count, heads, dim)), np.full((count, heads), -np.inf)
    group = heads // batch.geometry.kv_heads
    offsets = batch.query_offsets.tolist()
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        keys, values, positions = sequence_context(batch, sequence, layer=layer, read=read)
        for row in range(begin, end):
            place = int(batch.context_lens[sequence]) - (end - begin) + (row - begin)
            seen = positions <= place
            if options.window is not None:
                seen &= positions > place - options.window
            if not seen.any():
                continue
            for head in range(heads):
                scores = keys[head // group][seen] @ rows[row, head] * options.scale
                if options.soft_cap is not None:
                    scores = options.soft_cap * np.tanh(scores / options.soft_cap)
                top = scores.max()
                weights = np.exp(scores - top)
                lse[row, head] = top + np.log(weights.sum())
                out[row, head] = weights @ values[head // group][seen] / weights.sum()
    return ReferencePartial(out, lse)


def merge_reference(partials: list[ReferencePartial], sinks: Floats | None = None) -> ReferencePartial:
    """Join partial results over disjoint subsets; ``sinks`` [q_heads] adds mass without a value."""
    logs = [partial.lse for partial in partials]
    outs = [partial.out for partial in partials]
    if sinks is not None:
        logs.append(np.broadcast_to(sinks, logs[0].shape))
        outs.append(np.zeros_like(outs[0]))
    stacked = np.stack(logs)
    top = stacked.max(0)
    safe = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(stacked - safe)
    total = weights.sum(0)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    return ReferencePartial((np.stack(outs) * shares[..., None]).sum(0), lse)
