"""Decode attention in plain torch, timed: the peers of the CPU kernels.

All routes put a GQA group in the query rows, which torch runs several times faster than ``enable_gqa``. They get
their memory from the caller, who fills it: their times do not depend on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch

from kvstore.kernels.bench import Bytes, Model, take_turns

CHUNK_BLOCKS: Final = 32
"""Blocks gathered at a time by the paged route, the fastest of 8, 32, 128, 512 and 2,048 (2,048 tokens)."""

Routes = dict[str, Callable[[], object]]


def contiguous(name: str) -> bool:
    """Whether a route finds K and V joined and in torch's own order, which a paged cache does not give."""
    return name.endswith("contiguous")


def dtype_bytes(dtype: torch.dtype, model: Model, shape: tuple[int, int]) -> int:
    """Bytes of K and V of one layer."""
    return 2 * dtype.itemsize * model.kv_heads * model.head_dim * shape[0] * shape[1]


def decode_times(model: Model, shape: tuple[int, int], data: Bytes, repeats: int) -> dict[str, float]:
    """Seconds of each route for ``shape`` (sequences, tokens); overwrites ``data``. fp32 runs where it fits there."""
    times: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        if dtype_bytes(dtype, model, shape) <= data.size:
            times |= take_turns(_routes(model, shape, data, dtype), repeats)
    return times


def _routes(model: Model, shape: tuple[int, int], data: Bytes, dtype: torch.dtype) -> Routes:
    sequences, tokens = shape
    half = dtype_bytes(dtype, model, shape) // 2
    flat = torch.from_numpy(data[: 2 * half]).view(dtype)
    _fill(flat)
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    query = torch.randn(sequences, model.kv_heads, model.q_heads // model.kv_heads, model.head_dim, dtype=dtype)
    key, value = flat.view(2, sequences, model.kv_heads, tokens, model.head_dim)

    def fused() -> object:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    def apart() -> object:
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value

    routes: Routes = {f"torch sdpa {name}, contiguous": fused, f"torch matmul and softmax {name}, contiguous": apart}
    if dtype is torch.bfloat16:
        routes["torch gather, sdpa, merge bf16, paged"] = _paged(query, flat, model, shape)
    return routes


def _fill(flat: torch.Tensor) -> None:
    """Normal numbers, drawn once and repeated: drawing gigabytes takes longer than all else."""
    some = torch.randn(min(flat.numel(), 1 << 22)).to(flat.dtype)
    for begin in range(0, flat.numel(), some.numel()):
        part = flat[begin : begin + some.numel()]
        part.copy_(some[: part.numel()])


def _paged(query: torch.Tensor, flat: torch.Tensor, model: Model, shape: tuple[int, int]) -> Callable[[], object]:
    """Gather some blocks [64, kv_heads, head_dim] into memory that is kept, attend, and merge by log-sum-exp."""
    sequences, tokens = shape
    count = tokens // 64
    arenas = flat.view(2, sequences * count, 64, model.kv_heads, model.head_dim)
    tables = torch.randperm(sequences * count).view(sequences, count)
    size = min(CHUNK_BLOCKS, count)
    joined = torch.empty(2, size, 64, model.kv_heads, model.head_dim, dtype=flat.dtype)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def parts(rows: torch.Tensor, table: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for begin in range(0, count, size):
            some = table[begin : begin + size]
            for arena, to in zip(arenas, joined, strict=True):
                torch.index_select(arena, 0, some, out=to[: some.numel()])
            key, value = joined[:, : some.numel()].view(2, 1, -1, model.kv_heads, model.head_dim).transpose(2, 3)
            yield attend(rows, key, value)

    def run() -> object:
        return [_merged(parts(query[index : index + 1], table)) for index, table in enumerate(tables)]

    return run


def _merged(parts: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    first, lse = next(parts)
    out = first.float()
    for more, its_lse in parts:
        joint = torch.logaddexp(lse, its_lse)
        out = out * (lse - joint).exp().unsqueeze(-1) + more * (its_lse - joint).exp().unsqueeze(-1)
        lse = joint
    return out


def best(times: Mapping[str, float], *, joined: bool) -> tuple[str, float]:
    """Name and seconds of the fastest route among those over contiguous (``joined``) or over paged K and V."""
    chosen = {name: took for name, took in times.items() if contiguous(name) is joined}
    name = min(chosen, key=lambda name: chosen[name])
    return name, chosen[name]
