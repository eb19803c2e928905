"""New K and V into their blocks: a plan made once a step, carried out once a layer.

Runs of a prompt's tokens go block by block through strided views; the single tokens of decoding sequences go
together through one scatter, since views of one token each would cost more than the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from kvstore.engine.memory import Region
from kvstore.kernels.layout import SliceGeometry

RUN_TOKENS_MIN: Final = 4
"""Shorter runs are scattered: two strided copies cost about as much as scattering four tokens of SmolLM2."""


@dataclass(frozen=True, slots=True)
class WriteRun:
    """``count`` consecutive tokens, rows ``row`` on of the step, to tokens ``start`` on of the block at ``offset``."""

    region: Region
    offset: int
    start: int
    row: int
    count: int


class KvWriter:
    """Writes one step's K and V. The runs' memory stays the caller's and must stay reserved until the step ends."""

    def __init__(self, runs: list[WriteRun], geometry: SliceGeometry, slice_stride: int) -> None:
        self._geometry = geometry
        self._stride = slice_stride // geometry.itemsize
        self._views = [(run, *_views(run, geometry, self._stride)) for run in runs if run.count >= RUN_TOKENS_MIN]
        short = [run for run in runs if run.count < RUN_TOKENS_MIN]
        regions = {id(run.region): run.region for run in short}.values()
        self._scatters = [self._scatter(region, [r for r in short if r.region is region]) for region in regions]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write layer ``layer`` of every token: key and value are [kv_heads, tokens, head_dim].

        They are rounded to the dtype of the geometry where the model computes in another one.
        """
        for run, keys, values in self._views:
            rows, span = slice(run.row, run.row + run.count), slice(run.start, run.start + run.count)
            keys[layer][:, :, span] = key[:, rows].transpose(1, 2)
            values[layer][:, span] = value[:, rows]
        for flat, picked, index in self._scatters:
            both = torch.stack((key, value))[:, :, picked]
            flat[layer * self._stride :].index_copy_(0, index, both.flatten().to(flat.dtype))

    def _scatter(self, region: Region, runs: list[WriteRun]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Flat memory, rows of the step, and the element of layer 0 for each of [2, kv_heads, rows, head_dim]."""
        geometry = self._geometry
        dim, tokens = geometry.head_dim, geometry.block_tokens
        size = geometry.itemsize
        singles = [(run.offset // size, run.start + i, run.row + i) for run in runs for i in range(run.count)]
        bases, places, rows = torch.tensor(singles).unbind(1)
        heads = (torch.arange(geometry.kv_heads) * 2 * geometry.head_elements)[:, None, None]
        channels = torch.arange(dim)
        keys = heads + (bases + places)[None, :, None] + channels * tokens
        values = heads + (bases + geometry.head_elements + places * dim)[None, :, None] + channels
        index = torch.stack((keys, values)).flatten()
        return region.elements(geometry.dtype), rows.to(region.device), index.to(region.device)


def _views(run: WriteRun, geometry: SliceGeometry, stride: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The block, without copies: K [layers, kv_heads, head_dim, tokens], V [layers, kv_heads, tokens, head_dim]."""
    heads, dim, tokens = geometry.kv_heads, geometry.head_dim, geometry.block_tokens
    flat, begin = run.region.elements(geometry.dtype), run.offset // geometry.itemsize
    layers = run.region.layers
    per_head = 2 * geometry.head_elements
    keys = flat.as_strided((layers, heads, dim, tokens), (stride, per_head, tokens, 1), begin)
    values = flat.as_strided((layers, heads, tokens, dim), (stride, per_head, dim, 1), begin + geometry.head_elements)
    return keys, values
