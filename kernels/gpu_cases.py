"""Correctness of the Triton kernels where they run: each check compares a kernel with its reference on one device.

Nothing but torch, triton and numpy is needed. The same checks run on a GPU (``tools/gpu_check.py``) and, small, in
Triton's interpreter (the tests). Slices are drawn on the host, copied to where the case wants them (device memory, or
pinned host memory that the device reads in place), and the references read the host's copy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from kvstore.kernels import triton_attention, triton_move, triton_quant
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch
from kvstore.kernels.quant_reference import dequantise_slice, float32_to_raw, quantise_slice
from kvstore.kernels.reference import merge_reference, paged_attention_reference

__all__ = ["AttentionCase", "Check", "Checked", "attention_error", "checks"]

TOLERANCE = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 8e-3, "int8": 1e-3}
"""Largest error relative to the answer's largest value: a few roundings of a weight to the dtype of the products
(fp32 products are three tf32 ones on NVIDIA)."""

QUERY_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LAYERS = 2


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of paged attention: ``contexts`` and ``queries`` have an entry a sequence."""

    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    dtype: str = "float16"
    codec: str = "raw"
    contexts: tuple[int, ...] = (300,)
    queries: tuple[int, ...] = (1,)
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    pinned: bool = False
    splits: int | None = None

    @property
    def name(self) -> str:
        """The case in words, for a table."""
        form = f"int8 ({self.dtype})" if self.codec == "int8" else self.dtype
        kind = "decode" if max(self.queries) == 1 else "prefill"
        extras = [word for word, on in (("window", self.window), ("cap", self.soft_cap)) if on]
        extras += [word for word, on in (("sinks", self.sinks), ("host memory", self.pinned)) if on]
        extras += [f"{self.splits} splits"] if self.splits else []
        return " ".join([kind, form, f"d{self.head_dim}", f"{self.kv_heads}x{self.group}", *extras])

    @property
    def geometry(self) -> SliceGeometry:
        return SliceGeometry(self.kv_heads, self.head_dim, 64, self.dtype)


@dataclass(frozen=True, slots=True)
class Check:
    """A named comparison; ``run`` returns the error found, which must not exceed ``limit``."""

    name: str
    limit: float
    run: Callable[[torch.device], float]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found: ``trouble`` is the text of an exception, if there was one."""

    name: str
    error: float
    limit: float
    trouble: str = ""

    @property
    def passed(self) -> bool:
        return not self.trouble and self.error <= self.limit


def checks(cases: list[AttentionCase]) -> Iterator[Check]:
    """Yield a check for each attention case, then those of the codec, of copies and, on a GPU, of graph capture."""
    for case in cases:
        limit = TOLERANCE["int8" if case.codec == "int8" else case.dtype]
        yield Check(case.name, limit, partial(attention_error, case))
    for dtype in QUERY_DTYPES:
        for head_dim in (64, 80):
            geometry = SliceGeometry(2, head_dim, 64, dtype)
            name = f"int8 codec of {dtype} d{head_dim}, bytes that differ from numpy"
            yield Check(name, 0.0, partial(codec_differences, geometry))
    yield Check("copy of blocks, bytes that differ", 0.0, copy_differences)
    yield Check("captured in a graph and replayed, difference", 0.0, graph_difference)


def draw(case: AttentionCase, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw blocks: their bytes uint8 [blocks, LAYERS * stride], and the table's rows of blocks (-1: none) and starts.

    Tables are in random order with holes; tokens after a sequence's end are NaN in raw blocks.
    """
    rng = np.random.default_rng(seed)
    geometry = case.geometry
    counts = [-(-context // 64) for context in case.contexts]
    blocks = np.full((len(counts), max(counts) + 1), -1)
    starts = np.full(blocks.shape, 7, np.int32)
    stride, size = geometry.slice_stride(case.codec), geometry.slice_bytes(case.codec)
    memory = np.full((sum(counts), LAYERS * stride), 0xFF, np.uint8)
    order = iter(rng.permutation(sum(counts)))
    for sequence, count in enumerate(counts):
        for index, column in enumerate(rng.permutation(blocks.shape[1])[:count]):
            place = next(order)
            blocks[sequence, column], starts[sequence, column] = place, index * 64
            for layer in range(LAYERS):
                data = _draw_slice(rng, case, case.contexts[sequence] - index * 64)
                memory[place, layer * stride : layer * stride + size] = data
    return memory, blocks, starts


def _draw_slice(rng: np.random.Generator, case: AttentionCase, filled: int) -> np.ndarray:
    heads, dim = case.kv_heads, case.head_dim
    key = rng.standard_normal((heads, dim, 64), dtype=np.float32)
    value = rng.standard_normal((heads, 64, dim), dtype=np.float32)
    if case.codec == "raw":
        key[:, :, filled:] = np.nan
        value[:, filled:] = np.nan
    both = np.concatenate([key.reshape(heads, -1), value.reshape(heads, -1)], axis=1).reshape(-1)
    raw = float32_to_raw(both, case.dtype)
    coded = quantise_slice(raw, case.geometry) if case.codec == "int8" else raw
    if coded is None:
        raise ValueError("a drawn slice does not fit the int8 codec; drawn values must be finite")
    return coded


def place_memory(memory: np.ndarray, device: torch.device, *, pinned: bool) -> torch.Tensor:
    """Copy bytes to the device, or into pinned host memory; the caller keeps the tensor while addresses are used."""
    host = torch.from_numpy(memory)
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory() if pinned else host.to(device)


def attention_error(case: AttentionCase, device: torch.device) -> float:
    """Run the case and return its largest error against float64, relative to the answer's largest value.

    A log-sum-exp that is off by more than that counts too, and so does a row that is empty on one side only.
    """
    memory, blocks, starts = draw(case)
    place = place_memory(memory, device, pinned=case.pinned)
    addresses = np.where(blocks >= 0, place.data_ptr() + blocks.astype(np.int64) * memory.shape[1], 0)
    offsets = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int32)
    generator = torch.Generator().manual_seed(1)
    shape = (int(offsets[-1]), case.kv_heads * case.group, case.head_dim)
    query = torch.randn(shape, generator=generator).to(QUERY_DTYPES[case.dtype])
    sinks = torch.randn(shape[1], generator=generator) if case.sinks else None
    options = AttentionOptions(case.head_dim**-0.5, case.window, case.soft_cap)
    host = PagedBatch(
        torch.from_numpy(addresses),
        torch.from_numpy(starts),
        torch.from_numpy(offsets),
        torch.tensor(case.contexts, dtype=torch.int32),
        case.geometry,
        case.codec,
    )
    batch = _to(host, device)
    found = triton_attention.paged_attention(query.to(device), batch, options, layer=1, splits=case.splits)
    flat, base = memory.reshape(-1), place.data_ptr()
    wanted = paged_attention_reference(
        query, host, options, layer=1, read=lambda address, size: flat[address - base : address - base + size]
    )
    if sinks is not None:
        found = triton_attention.merge([found], sinks.to(device))
        wanted = merge_reference([wanted], sinks.double().numpy())
    out, lse = found.out.double().cpu().numpy(), found.lse.double().cpu().numpy()
    if (np.isneginf(lse) != np.isneginf(wanted.lse)).any() or np.isnan(out).any() or np.isnan(lse).any():
        return float("inf")
    seen = ~np.isneginf(wanted.lse)
    error = float(np.abs(out - wanted.out).max()) / max(float(np.abs(wanted.out).max()), 1e-3)
    return max(error, float(np.abs(lse[seen] - wanted.lse[seen]).max(initial=0.0)))


def _to(batch: PagedBatch, device: torch.device) -> PagedBatch:
    return replace(
        batch,
        addresses=batch.addresses.to(device),
        starts=batch.starts.to(device),
        query_offsets=batch.query_offsets.to(device),
        context_lens=batch.context_lens.to(device),
    )


def row_addresses(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Addresses of the rows of a contiguous uint8 matrix, int64 on ``device``."""
    return rows.data_ptr() + rows.shape[1] * torch.arange(rows.shape[0], dtype=torch.int64, device=device)


def codec_differences(geometry: SliceGeometry, device: torch.device) -> float:
    """Count bytes in which quantise and dequantise differ from the numpy reference."""
    rng = np.random.default_rng(3)
    raw_stride, coded_stride = geometry.slice_stride("raw"), geometry.slice_stride("int8")
    memory = np.zeros((3, raw_stride), np.uint8)
    for block in range(3):
        values = rng.standard_normal(2 * geometry.kv_heads * geometry.head_elements) * 10.0 ** (2 * block - 3)
        memory[block, : geometry.raw_bytes] = float32_to_raw(values.astype(np.float32), geometry.dtype)
    raw = place_memory(memory, device, pinned=False)
    coded = torch.zeros(3, coded_stride, dtype=torch.uint8, device=device)
    back = torch.zeros(3, raw_stride, dtype=torch.uint8, device=device)
    refused = triton_quant.quantise(row_addresses(raw, device), row_addresses(coded, device), geometry, 1)
    triton_quant.dequantise(row_addresses(coded, device), row_addresses(back, device), geometry, 1)
    wrong = int(refused.sum().item())
    for block in range(3):
        wanted = quantise_slice(memory[block, : geometry.raw_bytes], geometry)
        if wanted is None:
            raise ValueError("a drawn slice does not fit the int8 codec; drawn values must be finite")
        wrong += int((coded[block].cpu().numpy()[: geometry.int8_bytes] != wanted).sum())
        decoded = dequantise_slice(wanted, geometry)
        wrong += int((back[block].cpu().numpy()[: geometry.raw_bytes] != decoded).sum())
    return float(wrong)


def copy_differences(device: torch.device) -> float:
    """Count bytes that differ after blocks went from host memory to the device and back by ``copy_blocks``."""
    memory = np.random.default_rng(4).integers(0, 256, (5, 20480), dtype=np.uint8)
    host = place_memory(memory, device, pinned=True)
    there = torch.zeros(5, 20480, dtype=torch.uint8, device=device)
    back = place_memory(np.zeros_like(memory), device, pinned=True)
    order = torch.tensor([3, 0, 4, 1, 2], device=device)
    triton_move.copy_blocks(row_addresses(host, device)[order], row_addresses(there, device), 20480)
    triton_move.copy_blocks(row_addresses(there, device), row_addresses(back, device)[order], 20480)
    wrong = (there.cpu().numpy() != memory[order.cpu().numpy()]).sum()
    return float(wrong + (back.cpu().numpy() != memory).sum())


def graph_difference(device: torch.device) -> float:
    """Largest difference between a decode step and its replay from a CUDA graph; 0 where there are no graphs."""
    if device.type == "cpu":
        return 0.0
    case = AttentionCase(contexts=(500, 130), queries=(1, 1), splits=4)
    memory, blocks, starts = draw(case)
    place = place_memory(memory, device, pinned=False)
    addresses = np.where(blocks >= 0, place.data_ptr() + blocks.astype(np.int64) * memory.shape[1], 0)
    host = PagedBatch(
        torch.from_numpy(addresses),
        torch.from_numpy(starts),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor(case.contexts, dtype=torch.int32),
        case.geometry,
    )
    batch, options = _to(host, device), AttentionOptions(case.head_dim**-0.5)
    query = torch.randn(2, 8, 128, device=device, dtype=torch.float16)
    plain = triton_attention.paged_attention(query, batch, options, layer=0, splits=4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton_attention.paged_attention(query, batch, options, layer=0, splits=4)
    captured.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return float((captured.out - plain.out).abs().max().item())
