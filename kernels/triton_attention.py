"""Paged attention on a GPU: the launch of ``triton_paged`` and of the merge of its splits.

``paged_attention`` serves decode, prefill and mixes of both in one launch, without reading anything back from the
device, so it may be captured in a CUDA graph. Addresses are absolute and must be multiples of 16; they may
name device memory, memory mapped by CUDA IPC, or host memory registered with the device.

Not yet run on hardware: checked in the interpreter, compiled for the targets of ``compile_gate``.
"""

import torch

from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial
from kvstore.kernels.triton_form import LaunchShape, choose_form, choose_splits
from kvstore.kernels.triton_launch import backend, interpreted, multiprocessors, on_device_of, require_device
from kvstore.kernels.triton_merge import merge, merge_stacked
from kvstore.kernels.triton_paged import paged_attention_kernel

__all__ = ["merge", "paged_attention"]


def paged_attention(
    query: torch.Tensor, batch: PagedBatch, options: AttentionOptions, *, layer: int, splits: int | None = None
) -> Partial:
    """The contract of ``attention.paged_attention``, for checked arguments on a GPU.

    ``splits`` sets into how many shares each sequence's blocks are cut; None chooses it for the device. Sinks are
    left to ``merge``. Raises ValueError for geometry that the kernels do not take and for tensors on the CPU.
    The work is queued on the current stream of the queries' device.
    """
    require_device("query", query)
    geometry = batch.geometry
    queries, heads, dim = query.shape
    sequences, blocks = batch.addresses.shape
    group = heads // geometry.kv_heads
    shape = choose_form(
        geometry,
        batch.codec,
        group,
        rows_a_sequence=queries * group / max(1, sequences),
        window=options.window is not None,
        soft_cap=options.soft_cap is not None,
        backend=backend(),
        interpreted=interpreted(),
    )
    tiles = queries * group // shape.form.block_m + sequences
    if splits is None:
        splits = choose_splits(blocks, tiles * geometry.kv_heads, multiprocessors(query.device))
    out = torch.empty((splits, queries, heads, dim), dtype=torch.float32, device=query.device)
    lse = torch.empty((splits, queries, heads), dtype=torch.float32, device=query.device)
    if queries:
        with on_device_of(query):
            _launch(shape, (tiles, geometry.kv_heads, splits), query, batch, options, layer, Partial(out, lse))
    if splits == 1:
        return Partial(out[0], lse[0])
    return merge_stacked(out, lse)


def _launch(
    shape: LaunchShape,
    grid: tuple[int, int, int],
    query: torch.Tensor,
    batch: PagedBatch,
    options: AttentionOptions,
    layer: int,
    into: Partial,
) -> None:
    geometry = batch.geometry
    paged_attention_kernel[grid](
        query.contiguous(),
        batch.addresses.contiguous(),
        batch.starts.contiguous(),
        batch.query_offsets.contiguous(),
        batch.context_lens.contiguous(),
        into.out,
        into.lse,
        query.shape[0],
        batch.addresses.shape[0],
        batch.addresses.shape[1],
        layer * geometry.slice_stride(batch.codec),
        options.scale,
        options.window or 0,
        1.0 if options.soft_cap is None else options.soft_cap,
        FORM=shape.form,
        **shape.options,
    )
