"""Paged attention on a GPU: the launch of ``triton_paged`` and of the merge of its splits.

``paged_attention`` serves decode, prefill and mixes of both in one launch, without reading anything back from the
device, so it may be captured in a CUDA graph. Addresses are absolute and must be multiples of 16; they may
name device memory, memory mapped by CUDA IPC, or host memory registered with the device.

Not yet run on hardware: checked in the interpreter, compiled for the targets of ``compile_gate``.
"""

import torch
import triton

from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial
from kvstore.kernels.triton_form import LaunchShape, choose_form, choose_splits
from kvstore.kernels.triton_merge import merge, merge_stacked
from kvstore.kernels.triton_paged import paged_attention_kernel

__all__ = ["interpreted", "merge", "paged_attention", "require_device"]


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels: decided when triton was imported (``TRITON_INTERPRET=1``)."""
    return not isinstance(paged_attention_kernel, triton.JITFunction)


def require_device(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless ``tensor`` is where Triton kernels can reach it."""
    if not tensor.is_cuda and not interpreted():
        raise ValueError(f"{name} is on {tensor.device}; Triton kernels need it on a GPU (or Triton's interpreter)")


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
        backend="hip" if torch.version.hip else "cuda",
        interpreted=interpreted(),
    )
    tiles = queries * group // shape.form.block_m + sequences
    if splits is None:
        splits = choose_splits(blocks, tiles * geometry.kv_heads, multiprocessors(query.device))
    out = torch.empty((splits, queries, heads, dim), dtype=torch.float32, device=query.device)
    lse = torch.empty((splits, queries, heads), dtype=torch.float32, device=query.device)
    if queries:
        _launch(shape, (tiles, geometry.kv_heads, splits), query, batch, options, layer, Partial(out, lse))
    if splits == 1:
        return Partial(out[0], lse[0])
    return merge_stacked(out, lse)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
