"""Benchmarks of decode attention on the CPU: rows as in ``bench``, beside what memory allows and what torch takes.

The limit of a time is the shortest time in which the same threads read as many bytes: a gibibyte in order, or the
very blocks in the order in which attention meets them. A speed-up over torch stands beside the speed-up that a kernel
at that limit would have, since torch is never slower than memory either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from kvstore.kernels import bench_torch, native, quant
from kvstore.kernels.attention import paged_attention
from kvstore.kernels.bench import (
    LLAMA_8B,
    SMOLLM2,
    Bytes,
    Model,
    Row,
    conditions,
    memory,
    restored_threads,
    set_threads,
    take_turns,
)
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch

log = logging.getLogger(__name__)

Shape = tuple[int, int]

SHAPES: Final[tuple[Shape, ...]] = ((1, 131_072), (8, 8_192))
"""(sequences, tokens of each) of the decode rows."""

LONG_SHAPE: Final[Shape] = (1, 1_048_576)

PATTERN_BLOCKS: Final = 64
"""Different blocks that are drawn, and quantised once; the others repeat them."""

BANDWIDTH_BYTES: Final = 1 << 30
"""Bytes of the read-bandwidth measure: far above the caches of a node's share of a socket."""

SPARE_BYTES: Final = 3 << 29
"""What must be left of the machine's memory beside the blocks."""

TARGETS: Final = {"raw": ">= 0.6 of it", "int8": ">= 0.45 of it"}
NAMES: Final = {"raw": "fp16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: thread counts, rounds, and the instruction-set level (None: the best)."""

    threads: tuple[int, ...]
    repeats: int
    level: str | None


@dataclass(frozen=True, slots=True)
class Figure:
    """One decode case and its times in seconds; ``peers`` are torch's."""

    name: str
    codec: str
    threads: int
    size: int
    took: float
    limit: float
    limit_name: str
    peers: dict[str, float]


def attention_rows(
    *, threads: tuple[int, ...] = (1, 2), long: bool = True, repeats: int = 7, level: str | None = None
) -> Iterator[Row]:
    """Yield rows for each model, shape, codec and thread count.

    ``long`` adds one sequence of 1,048,576 tokens, if the machine has 8 GiB to spare. ``level`` forces one of
    ``native.LEVELS``; ValueError where this machine lacks it.
    """
    usable = native.native_status().levels
    if level is not None and level not in usable:
        raise ValueError(f"level is {level!r}; it must be one of {usable}")
    shapes = SHAPES
    if long and _available_bytes() >= _case_bytes(LLAMA_8B, LONG_SHAPE) + SPARE_BYTES:
        shapes = (SHAPES[0], LONG_SHAPE, SHAPES[1])
    elif long:
        log.warning("no rows of 1,048,576 tokens: they need 8 GiB of free memory")
    data = memory(max(BANDWIDTH_BYTES, *(_case_bytes(LLAMA_8B, shape) for shape in shapes)))
    plan = Plan(threads, repeats, level)
    with restored_threads():
        for model in (LLAMA_8B, SMOLLM2):
            for shape in shapes:
                yield from _shape_rows(model, shape, data, plan)


def _available_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _case_bytes(model: Model, shape: Shape, codecs: tuple[str, ...] = ("raw", "int8")) -> int:
    geometry = SliceGeometry(model.kv_heads, model.head_dim, 64, "float16")
    return shape[0] * shape[1] // 64 * sum(geometry.slice_stride(codec) for codec in codecs)


def decode_case(model: Model, shape: Shape, codec: str, data: Bytes) -> tuple[torch.Tensor, PagedBatch]:
    """Queries, and a batch of random blocks in random order that lie in ``data``, which is overwritten."""
    sequences, tokens = shape
    geometry = SliceGeometry(model.kv_heads, model.head_dim, 64, "float16")
    blocks, stride = sequences * tokens // 64, geometry.slice_stride(codec)
    rows = data[: blocks * stride].reshape(blocks, stride)
    pattern = _pattern(geometry, codec)
    for begin in range(0, blocks, PATTERN_BLOCKS):
        part = rows[begin : begin + PATTERN_BLOCKS]
        part[:] = pattern[: len(part)]
    order = torch.from_numpy(np.random.default_rng(1).permutation(blocks))
    batch = PagedBatch(
        (data.ctypes.data + order * stride).view(sequences, -1),
        torch.arange(0, tokens, 64, dtype=torch.int32).expand(sequences, -1).contiguous(),
        torch.arange(sequences + 1, dtype=torch.int32),
        torch.full((sequences,), tokens, dtype=torch.int32),
        geometry,
        codec,
    )
    return torch.randn(sequences, model.q_heads, model.head_dim), batch


def _pattern(geometry: SliceGeometry, codec: str) -> Bytes:
    """``PATTERN_BLOCKS`` slices of normal numbers, each with its padding."""
    count = PATTERN_BLOCKS * geometry.raw_bytes // 2
    raw = np.random.default_rng(0).standard_normal(count, dtype=np.float32).astype(np.float16).view(np.uint8)
    slices = np.zeros((PATTERN_BLOCKS, geometry.slice_stride(codec)), np.uint8)
    if codec == "raw":
        slices[:, : geometry.raw_bytes] = raw.reshape(PATTERN_BLOCKS, -1)
    else:
        quant.quantise(raw, slices, geometry, PATTERN_BLOCKS, strides=(geometry.raw_bytes, slices.shape[1]))
    return slices


def _shape_rows(model: Model, shape: Shape, data: Bytes, plan: Plan) -> Iterator[Row]:
    few = max(1, plan.repeats // 2)
    # A round of a gibibyte and more takes long enough to be steady.
    repeats, few = (few, 1) if _case_bytes(model, shape, ("raw",)) > BANDWIDTH_BYTES else (plan.repeats, few)
    peers = {}
    for threads in plan.threads:
        set_threads(threads)
        peers[threads] = bench_torch.decode_times(model, shape, data, few)
    cut = _case_bytes(model, shape, ("raw",))
    cases = {
        "raw": decode_case(model, shape, "raw", data[:cut]),
        "int8": decode_case(model, shape, "int8", data[cut:]),
    }
    for threads in plan.threads:
        set_threads(threads)
        # All in the same rounds: what int8 takes of fp16's time must not depend on when each was measured.
        runs: dict[str, Callable[[], object]] = {"in order": lambda: native.read_all(data[:BANDWIDTH_BYTES])}
        for codec, (query, batch) in cases.items():
            runs |= _runs(query, batch, codec, plan.level)
        times = take_turns(runs, repeats)
        figures = []
        for codec, (_, batch) in cases.items():
            name = f"decode {model.name} {shape[0]} x {shape[1]} {NAMES[codec]} {threads} threads"
            figures.append(_figure((name, codec, threads), batch, times, peers[threads]))
        for figure in figures:
            yield from _rows(figure, figures[0], plan.level)


def _runs(query: torch.Tensor, batch: PagedBatch, codec: str, level: str | None) -> dict[str, Callable[[], object]]:
    options = AttentionOptions(scale=query.shape[-1] ** -0.5)
    size = batch.geometry.slice_bytes(codec)

    def attend() -> object:
        if level is None:
            return paged_attention(query, batch, options, layer=0)
        return native.paged_attention(query, batch, options, layer=0, level=level)

    return {f"kernel {codec}": attend, f"blocks {codec}": lambda: native.read_blocks(batch.addresses, size)}


def _figure(case: tuple[str, str, int], batch: PagedBatch, times: dict[str, float], peers: dict[str, float]) -> Figure:
    codec = case[1]
    size = batch.addresses.numel() * batch.geometry.slice_bytes(codec)
    in_order = times["in order"] * size / BANDWIDTH_BYTES
    limit, way = min((in_order, "a gibibyte in order"), (times[f"blocks {codec}"], "these blocks"))
    words = f"to read as many bytes ({size / limit / 1e9:.1f} GB/s, {way})"
    return Figure(*case, size, times[f"kernel {codec}"], limit, words, peers)


def _rows(figure: Figure, fp16: Figure, level: str | None) -> Iterator[Row]:
    """The time, what it is of torch's, and for int8 what it is of fp16's."""
    shared = {
        "bench": "attention" if level is None else f"attention {level}",
        "conditions": conditions(figure.threads, level) | {"bytes": figure.size, "blocks": "random order"},
    }
    yield shared | {
        "case": figure.name,
        "value": round(figure.took * 1e3, 6),
        "unit": "ms",
        "limit": round(figure.limit * 1e3, 6),
        "limit_unit": f"ms {figure.limit_name}",
        "target": TARGETS[figure.codec],
        # Torch knows no int8 cache: its routes stand once, beside fp16.
        "peers": {name: round(took * 1e3, 6) for name, took in figure.peers.items()} if figure is fp16 else {},
    }
    for joined in (True, False):
        name, took = bench_torch.best(figure.peers, joined=joined)
        yield shared | {
            "case": f"{figure.name}, over {name}",
            "value": round(took / figure.took, 4),
            "unit": "times",
            "limit": round(took / figure.limit, 4),
            "limit_unit": "times, all that memory allows",
            "target": ">= 3 times",
            "peers": {},
        }
    if figure is not fp16:
        yield shared | {
            "case": f"{figure.name}, time over that of fp16",
            "value": round(figure.took / fp16.took, 4),
            "unit": "x",
            "limit": round(figure.limit / fp16.limit, 4),
            "limit_unit": "x, to read the bytes",
            "target": "<= 0.75 x",
            "peers": {},
        }
