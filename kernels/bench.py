"""Benchmarks of the CPU kernels, each row with its limit and its peers measured in the same run.

A row is ``{bench, case, value, unit, limit, limit_unit, fraction, peers, conditions}``; ``peers`` maps a name to a
value in the row's unit, and ``fraction`` is the share of the limit that was reached. Functions here print nothing
and need torch, numpy and the C++ kernels.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvstore.kernels import native, quant
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch

Row = dict[str, Any]

BANDWIDTH_BYTES: Final = 1 << 30
"""Bytes of the read-bandwidth measure: far above the caches of a node's share of a socket."""


@dataclass(frozen=True, slots=True)
class Model:
    """Attention shape of one layer of a model."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


LLAMA_8B: Final = Model("llama-8b", 32, 8, 128)
SMOLLM2: Final = Model("smollm2-135m", 9, 3, 64)

SHAPES: Final = ((1, 131_072), (8, 8_192))
"""(sequences, tokens of each) of the decode rows; ``long`` adds one sequence of 1,048,576 tokens."""


def attention_rows(*, threads: tuple[int, ...] = (1, 2), long: bool = False, repeats: int = 7) -> Iterator[Row]:
    """Yield a row of decode time for each model, shape, codec and thread count; restores the thread counts."""
    before = native.thread_count(), torch.get_num_threads()
    try:
        for count in threads:
            native.set_thread_count(count)
            torch.set_num_threads(count)
            for model in (LLAMA_8B, SMOLLM2):
                for shape in (*SHAPES, (1, 1_048_576)) if long else SHAPES:
                    yield from _decode_rows(model, shape, count, repeats)
    finally:
        native.set_thread_count(before[0])
        torch.set_num_threads(before[1])


def codec_rows(*, threads: tuple[int, ...] = (1, 2), repeats: int = 9) -> Iterator[Row]:
    """Yield rows of quantise and dequantise speed (GB/s of fp16) and of the checksummed copy."""
    before = native.thread_count(), torch.get_num_threads()
    try:
        for count in threads:
            native.set_thread_count(count)
            torch.set_num_threads(count)
            yield from _codec_rows(count, repeats)
        yield _copy_row(repeats)
    finally:
        native.set_thread_count(before[0])
        torch.set_num_threads(before[1])


def memory(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Private memory of ``size`` bytes, page-aligned, faulted in, on huge pages where the kernel gives them."""
    pages = mmap.mmap(-1, size)
    pages.madvise(mmap.MADV_HUGEPAGE)
    data: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(pages, dtype=np.uint8)
    data[:] = 1
    return data


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of ``run`` over ``repeats`` calls, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes a second that the kernels' threads read from memory."""
    data = memory(BANDWIDTH_BYTES)
    return BANDWIDTH_BYTES / seconds(lambda: native.read_all(data), repeats)


def decode_case(
    model: Model, shape: tuple[int, int], codec: str
) -> tuple[torch.Tensor, PagedBatch, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Queries and a batch of random blocks in random order, and the memory that the batch points into."""
    sequences, tokens = shape
    geometry = SliceGeometry(model.kv_heads, model.head_dim, 64, "float16")
    blocks, stride = sequences * tokens // 64, geometry.slice_stride(codec)
    data = memory(blocks * stride)
    rng = np.random.default_rng(0)
    raw = rng.standard_normal(64 * geometry.raw_bytes // 2, dtype=np.float32).astype(np.float16).view(np.uint8)
    some = raw.reshape(64, -1)
    if codec == "int8":
        coded = np.zeros((64, geometry.int8_bytes), np.uint8)
        quant.quantise(raw, coded, geometry, 64, strides=(geometry.raw_bytes, geometry.int8_bytes))
        some = coded
    rows = data.reshape(blocks, stride)
    for index in range(blocks):
        rows[index, : some.shape[1]] = some[index % 64]
    addresses = data.ctypes.data + torch.from_numpy(rng.permutation(blocks)) * stride
    starts = torch.arange(0, tokens, 64, dtype=torch.int32).expand(sequences, -1).contiguous()
    batch = PagedBatch(
        addresses.view(sequences, -1),
        starts,
        torch.arange(sequences + 1, dtype=torch.int32),
        torch.full((sequences,), tokens, dtype=torch.int32),
        geometry,
        codec,
    )
    return torch.randn(sequences, model.q_heads, model.head_dim), batch, data


def _decode_rows(model: Model, shape: tuple[int, int], threads: int, repeats: int) -> Iterator[Row]:
    peers = torch_decode_times(model, shape, max(2, repeats // 2))
    fp16_ms = 0.0
    for codec in ("raw", "int8"):
        query, batch, held = decode_case(model, shape, codec)
        options = AttentionOptions(scale=model.head_dim**-0.5)
        bandwidth = read_bandwidth()
        took = seconds(lambda: paged_attention(query, batch, options, layer=0), repeats)  # noqa: B023
        bandwidth = max(bandwidth, read_bandwidth())
        size = batch.addresses.numel() * batch.geometry.slice_bytes(codec)
        limit_ms, value_ms = size / bandwidth * 1e3, took * 1e3
        others = dict(peers)
        if codec == "raw":
            fp16_ms = value_ms
        else:
            others["fp16, same kernel"] = fp16_ms
        name = "fp16" if codec == "raw" else codec
        yield {
            "bench": "attention",
            "case": f"decode {model.name} {shape[0]} x {shape[1]} {name} {threads} threads",
            "value": round(value_ms, 3),
            "unit": "ms",
            "limit": round(limit_ms, 3),
            "limit_unit": f"ms to read the same bytes at {bandwidth / 1e9:.1f} GB/s, measured around it",
            "fraction": round(limit_ms / value_ms, 3),
            "peers": {peer: round(value, 3) for peer, value in others.items()},
            "conditions": _conditions(threads) | {"bytes": size, "blocks": "random order"},
        }
        del held


def torch_decode_times(model: Model, shape: tuple[int, int], repeats: int) -> dict[str, float]:
    """Milliseconds of torch's routes, the GQA group as query rows.

    "contiguous" ones find K and V joined and in torch's own order, which a paged cache does not give; "paged" ones
    start from blocks in random order and gather them into memory that is kept.
    """
    sequences, tokens = shape
    size = (sequences, model.kv_heads, tokens, model.head_dim)
    found = {}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        if 2 * int(np.prod(size)) * dtype.itemsize > 5 << 30:
            continue
        key, value = torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)
        query = torch.randn(sequences, model.kv_heads, model.q_heads // model.kv_heads, model.head_dim, dtype=dtype)

        def attend(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> object:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)

        def multiply(query: torch.Tensor = query, key: torch.Tensor = key, value: torch.Tensor = value) -> object:
            return torch.softmax(query @ key.transpose(-1, -2), -1) @ value

        found[f"torch sdpa {name}, contiguous"] = seconds(attend, repeats) * 1e3
        found[f"torch matmul and softmax {name}, contiguous"] = seconds(multiply, repeats) * 1e3
    found["torch sdpa bf16, paged"] = _torch_paged_time(model, shape, repeats)
    return found


def _torch_paged_time(model: Model, shape: tuple[int, int], repeats: int) -> float:
    """Milliseconds to gather blocks [kv_heads, 64, head_dim] of K and V and attend to them."""
    sequences, tokens = shape
    blocks = tokens // 64
    arenas = [torch.randn(sequences * blocks, model.kv_heads, 64, model.head_dim).bfloat16() for _ in range(2)]
    joined = [torch.empty(model.kv_heads, blocks, 64, model.head_dim, dtype=torch.bfloat16) for _ in range(2)]
    tables = torch.randperm(sequences * blocks).view(sequences, blocks)
    query = torch.randn(1, model.kv_heads, model.q_heads // model.kv_heads, model.head_dim).bfloat16()

    def run() -> None:
        for table in tables:
            for arena, to in zip(arenas, joined, strict=True):
                to.copy_(arena[table].transpose(0, 1))
            key, value = (to.view(1, model.kv_heads, tokens, model.head_dim) for to in joined)
            torch.nn.functional.scaled_dot_product_attention(query, key, value)

    return seconds(run, repeats) * 1e3


def _codec_rows(threads: int, repeats: int) -> Iterator[Row]:
    for model in (LLAMA_8B, SMOLLM2):
        geometry = SliceGeometry(model.kv_heads, model.head_dim, 64, "float16")
        slices = (64 << 20) // geometry.raw_bytes
        raw, coded = memory(slices * geometry.slice_stride("raw")), memory(slices * geometry.slice_stride("int8"))
        rng = np.random.default_rng(0)
        raw[:] = np.resize(rng.standard_normal(1 << 20, dtype=np.float32).astype(np.float16).view(np.uint8), raw.size)
        other = memory(raw.size)
        size = slices * geometry.raw_bytes
        copy = size / seconds(lambda: np.copyto(other, raw), repeats)  # noqa: B023
        runs: dict[str, Callable[[], object]] = {
            "quantise": lambda: quant.quantise(raw, coded, geometry, slices),  # noqa: B023
            "dequantise": lambda: quant.dequantise(coded, other, geometry, slices),  # noqa: B023
        }
        peers = {"quantise": _torch_quantise_speed(geometry, repeats)}
        for name, run in runs.items():
            speed = size / seconds(run, repeats)
            yield {
                "bench": "codec",
                "case": f"{name} {model.name} {threads} threads",
                "value": round(speed / 1e9, 2),
                "unit": "GB/s of fp16",
                "limit": round(copy / 1e9, 2),
                "limit_unit": "GB/s, a plain copy of the fp16 bytes on one thread",
                "fraction": round(speed / copy, 3),
                "peers": {f"torch {name}": round(peers[name], 2)} if name in peers else {},
                "conditions": _conditions(threads) | {"bytes": size},
            }


def _torch_quantise_speed(geometry: SliceGeometry, repeats: int) -> float:
    """GB/s of the same scheme in plain torch: parameters and codes, without the interleave."""
    values = torch.randn(256, geometry.kv_heads, 2, geometry.head_dim, geometry.block_tokens).half()

    def run() -> None:
        key, value = values[:, :, 0].float(), values[:, :, 1].float()
        low, high = key.amin(-1, keepdim=True), key.amax(-1, keepdim=True)
        ((key - (low + high) / 2) * (254 / (high - low))).round_().to(torch.int8)
        (value * (127 / value.abs().amax(-1, keepdim=True))).round_().to(torch.int8)

    return values.numel() * 2 / seconds(run, repeats) / 1e9


def _copy_row(repeats: int) -> Row:
    source, target = memory(16 << 20), memory(16 << 20)
    copy = source.size / seconds(lambda: np.copyto(target, source), repeats)

    def copy_then_sum() -> None:
        np.copyto(target, source)
        native.crc32c(source)

    apart = source.size / seconds(copy_then_sum, repeats)
    folded = source.size / seconds(lambda: native.copy_crc32c(target, source), repeats)
    return {
        "bench": "codec",
        "case": "copy with CRC-32C 16 MiB 1 threads",
        "value": round(folded / 1e9, 2),
        "unit": "GB/s",
        "limit": round(copy / 1e9, 2),
        "limit_unit": "GB/s, a plain copy",
        "fraction": round(folded / copy, 3),
        "peers": {"copy, then checksum": round(apart / 1e9, 2)},
        "conditions": _conditions(1),
    }


def _conditions(threads: int) -> dict[str, Any]:
    return {
        "threads": threads,
        "level": native.native_status().levels[0],
        "torch": torch.__version__,
        "pages": "huge where the kernel gives them",
    }
