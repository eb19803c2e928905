"""Copying lists of blocks between addresses on a GPU: gather, scatter, and any mix of memories.

Sources and targets are absolute: device memory, memory mapped by CUDA IPC, pinned host memory. One launch copies any
number of blocks, where a copy engine takes one call each. A program moves 16 KiB in 16-byte loads, so that many are in
flight at once: over PCIe it is the loads in flight that make the bandwidth.

Not yet run on hardware: checked in the interpreter, compiled for the targets of ``compile_gate``.
"""

import torch
import triton
import triton.language as tl

from kvstore.kernels.triton_launch import on_device_of, require_device

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]

WORDS_A_PROGRAM = 2048
"""8-byte words that one program copies: 16 KiB, 8 loads of 16 bytes for each of 128 threads."""


@triton.jit
def copy_kernel(sources, targets, words, WORDS: tl.constexpr):
    """Grid (blocks, chunks): copy ``words`` 8-byte words from each source to its target; address 0 on a side skips."""
    block = tl.program_id(0)
    source = tl.load(sources + block)
    target = tl.load(targets + block)
    place = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = (place < words) & (source != 0) & (target != 0)
    source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    target_words = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    tl.store(target_words + place, tl.load(source_words + place, mask=inside, other=0), mask=inside)


def copy_blocks(sources: torch.Tensor, targets: torch.Tensor, size: int) -> None:
    """Copy ``size`` bytes from each address of ``sources`` to the address at the same place of ``targets``.

    Both are int64 [blocks] on the device that does the work; a pair with an address of 0 is left out. Addresses and
    ``size`` are multiples of 16. Blocks must not overlap. The caller owns both memories until the stream
    has passed. Raises ValueError for tensors or a size that do not fit.
    """
    for name, tensor in (("sources", sources), ("targets", targets)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape != sources.shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be torch.int64 [blocks]")
        require_device(name, tensor)
    if size < 0 or size % 16:
        raise ValueError(f"size is {size}; it must be a multiple of 16 bytes")
    blocks = sources.shape[0]
    if blocks and size:
        grid = (blocks, triton.cdiv(size // 8, WORDS_A_PROGRAM))
        with on_device_of(sources):
            copy_kernel[grid](sources.contiguous(), targets.contiguous(), size // 8, WORDS=WORDS_A_PROGRAM, num_warps=4)


def gather_blocks(sources: torch.Tensor, into: torch.Tensor) -> None:
    """Copy blocks from ``sources`` int64 [blocks] into the rows of ``into``, uint8 [blocks, size], contiguous."""
    copy_blocks(sources, _row_addresses(sources, into), into.shape[1])


def scatter_blocks(source: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy the rows of ``source``, uint8 [blocks, size], contiguous, to ``targets`` int64 [blocks]."""
    copy_blocks(_row_addresses(targets, source), targets, source.shape[1])


def _row_addresses(like: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype != torch.uint8 or rows.dim() != 2 or not rows.is_contiguous() or rows.shape[0] != like.shape[0]:
        raise ValueError(f"rows are {rows.dtype} {tuple(rows.shape)}; they must be contiguous uint8 [blocks, size]")
    return rows.data_ptr() + rows.shape[1] * torch.arange(rows.shape[0], dtype=torch.int64, device=like.device)
