"""Benchmarks of the codec and of copies on the CPU, and what benchmarks of attention share with them.

A row is ``{bench, case, value, unit, limit, limit_unit, target, peers, conditions}``; ``peers`` maps a name to a
value in the row's unit, limit and peers were measured in the same run, and ``target`` is for people. Functions here
print nothing and need torch, numpy and the C++ kernels.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from kvstore.kernels import native, quant
from kvstore.kernels.layout import SliceGeometry

Row = dict[str, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Model:
    """Attention shape of one layer of a model."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int


LLAMA_8B: Final = Model("llama-8b", 32, 8, 128)
SMOLLM2: Final = Model("smollm2-135m", 9, 3, 64)


def codec_rows(*, threads: tuple[int, ...] = (1, 2), repeats: int = 9) -> Iterator[Row]:
    """Yield rows of quantise and dequantise speed (GB/s of fp16) and of the checksummed copy."""
    with restored_threads():
        for count in threads:
            set_threads(count)
            yield from _codec_rows(count, repeats)
        yield _copy_row(repeats)


@contextmanager
def restored_threads() -> Iterator[None]:
    """Give the kernels and torch the numbers of threads back that they have now."""
    before = native.thread_count(), torch.get_num_threads()
    try:
        yield
    finally:
        native.set_thread_count(before[0])
        torch.set_num_threads(before[1])


def set_threads(count: int) -> None:
    """Let the kernels and torch use ``count`` threads."""
    native.set_thread_count(count)
    torch.set_num_threads(count)


def memory(size: int) -> Bytes:
    """``size`` bytes of shared memory, which is what HOST is made of: page-aligned and faulted in."""
    data: Bytes = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    data[:] = 1
    return data


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of ``run`` over ``repeats`` calls, after one that is not counted."""
    return take_turns({"": run}, repeats)[""]


def take_turns(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each over ``repeats`` rounds, after one that is not counted.

    A round runs each once, so that what else the machine does falls on all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn > 0:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


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
                "target": f">= {3 * threads} GB/s",
                "peers": {f"torch {name}": round(peers[name], 2)} if name in peers else {},
                "conditions": conditions(threads) | {"bytes": size},
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
    variant = native.copy_variant()["large with checksum"]
    runs = {form: partial(native.copy_by, form, target, source, summed=True) for form in variant.speeds}
    forms = {form: source.size / found for form, found in take_turns(runs, repeats).items()}
    return {
        "bench": "codec",
        "case": "copy with CRC-32C 16 MiB 1 threads",
        "value": round(folded / 1e9, 2),
        "unit": "GB/s",
        "limit": round(copy / 1e9, 2),
        "limit_unit": "GB/s, a plain copy",
        "target": "",
        "peers": {"copy, then checksum": round(apart / 1e9, 2)}
        | {form: round(speed / 1e9, 2) for form, speed in forms.items()},
        "conditions": conditions(1) | {"chosen": variant.form},
    }


def conditions(threads: int, level: str | None = None) -> dict[str, Any]:
    """What a figure holds for."""
    return {
        "threads": threads,
        "level": level or native.native_status().levels[0],
        "torch": torch.__version__,
        "memory": "shared, as HOST is",
    }
