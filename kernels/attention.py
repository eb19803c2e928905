"""Paged attention and the merge of its partial results: one entry, the fastest form that fits the tensors.

CUDA tensors go to the Triton kernels. CPU tensors go to the C++ kernels where they are built and hold the shape,
to the torch path of ``attention_torch`` elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from kvstore.kernels import attention_torch, native
from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial

__all__ = ["merge", "paged_attention"]

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def paged_attention(query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, *, layer: int) -> Partial:
    """Attend with every query of ``batch`` over the blocks it names, in layer ``layer``.

    ``query`` is [queries, q_heads, head_dim] in fp32, fp16 or bf16; q_heads is a multiple of the geometry's KV
    heads, and q head ``h`` reads KV head ``h // (q_heads / kv_heads)``. Returns fp32 partial results in the
    order of ``query``; rows that see no token have out 0 and lse -inf. ``options.sinks`` is not applied here:
    a sink counts once, in ``merge(partials, sinks=options.sinks)``.

    Raises ValueError when shapes, dtypes or devices do not fit. Slices are read only until the call returns
    (on a GPU: until its stream has passed).
    """
    check_arguments(query, batch, options, layer)
    if query.is_cuda:
        # Imported here because triton is absent on most hosts without a GPU.
        form = importlib.import_module("kvstore.kernels.triton_attention")
        found: Partial = form.paged_attention(query, batch, options, layer=layer)
        return found
    if native.holds(batch.geometry):
        return native.paged_attention(query, batch, options, layer=layer)
    return attention_torch.paged_attention(query, batch, options, layer=layer)


def merge(partials: Sequence[Partial], sinks: torch.Tensor | None = None) -> Partial:
    """Join partial results over disjoint subsets of the same queries' context.

    ``sinks`` fp32 [q_heads] adds, once for a query, a logit that takes mass and gives no value. Rows empty in
    all parts stay out 0 and lse -inf (with sinks: lse = sink). A single part without sinks is returned as is.

    Raises ValueError for no parts or parts of different shapes.
    """
    if not partials:
        raise ValueError("partials is empty; at least one partial result is needed")
    first = partials[0]
    for index, part in enumerate(partials):
        if part.out.shape != first.out.shape or part.lse.shape != first.lse.shape:
            raise ValueError(f"partials[{index}].out is {tuple(part.out.shape)}; it must be {tuple(first.out.shape)}")
    if sinks is not None and sinks.shape != first.lse.shape[1:]:
        raise ValueError(f"sinks is {tuple(sinks.shape)}; it must be {tuple(first.lse.shape[1:])}, one logit a head")
    if len(partials) == 1 and sinks is None:
        return first
    if first.out.is_cuda:
        form = importlib.import_module("kvstore.kernels.triton_merge")
        joined: Partial = form.merge(partials, sinks)
        return joined
    if native.available() and all(part.out.device.type == "cpu" for part in partials):
        return native.merge(partials, sinks)
    return attention_torch.merge(partials, sinks)


def check_arguments(query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, layer: int) -> None:
    """Raise ValueError that names the argument, its value and what would be right."""
    geometry = batch.geometry
    if query.dim() != 3 or query.shape[2] != geometry.head_dim:
        raise ValueError(f"query is {tuple(query.shape)}; it must be [queries, q_heads, {geometry.head_dim}]")
    if query.dtype not in QUERY_DTYPES:
        raise ValueError(f"query.dtype is {query.dtype}; it must be one of {QUERY_DTYPES}")
    if query.shape[1] == 0 or query.shape[1] % geometry.kv_heads:
        raise ValueError(f"query has {query.shape[1]} heads; it must be a multiple of {geometry.kv_heads} KV heads")
    if layer < 0:
        raise ValueError(f"layer is {layer}; it must not be negative")
    geometry.slice_bytes(batch.codec)
    if options.window is not None and options.window < 1:
        raise ValueError(f"window is {options.window}; it must be at least 1, or None")
    if options.soft_cap is not None and not options.soft_cap > 0:
        raise ValueError(f"soft_cap is {options.soft_cap}; it must be above 0, or None")
    _check_table(query, batch)


def _check_table(query: torch.Tensor, batch: PagedBatch) -> None:
    if batch.addresses.dim() != 2:
        raise ValueError(f"addresses is {tuple(batch.addresses.shape)}; it must be [sequences, blocks]")
    sequences = batch.addresses.shape[0]
    expected = (
        ("addresses", batch.addresses, torch.int64, tuple(batch.addresses.shape)),
        ("starts", batch.starts, torch.int32, tuple(batch.addresses.shape)),
        ("query_offsets", batch.query_offsets, torch.int32, (sequences + 1,)),
        ("context_lens", batch.context_lens, torch.int32, (sequences,)),
    )
    for name, tensor, dtype, shape in expected:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} {shape}")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {query.device} with the queries")
    if query.is_cuda:
        return
    offsets = batch.query_offsets
    if int(offsets[0]) != 0 or int(offsets[-1]) != query.shape[0] or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"query_offsets is {offsets.tolist()}; it must rise from 0 to {query.shape[0]}, the queries")
