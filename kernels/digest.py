"""Digests of blocks: what is kept of a block's K to rank it without reading it.

For each KV head and channel the minimum, the maximum and the mean over the block's tokens. With them a query's score of
a block is bounded: no token scores above ``q+ @ max + q- @ min``, and the mean score is ``q @ mean``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from kvstore.kernels.attention_torch import memory_at
from kvstore.kernels.layout import SliceGeometry

DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
CHUNK_BYTES: Final = 16 << 20
"""Slices that are decoded together."""


def digest_slices(addresses: Sequence[int], geometry: SliceGeometry, codec: str) -> torch.Tensor:
    """Digests of the slices at these addresses of this process: fp32 [slices, 3, kv_heads, head_dim].

    The three are minimum, maximum and mean. All tokens of a slice count: only full blocks have a digest.
    """
    size = geometry.slice_bytes(codec)
    found = torch.empty(len(addresses), 3, geometry.kv_heads, geometry.head_dim)
    step = max(1, CHUNK_BYTES // size)
    for begin in range(0, len(addresses), step):
        part = torch.stack([memory_at(address, size) for address in addresses[begin : begin + step]])
        keys = _keys(part, geometry, codec)
        into = found[begin : begin + step]
        into[:, 0], into[:, 1], into[:, 2] = keys.amin(-1), keys.amax(-1), keys.mean(-1)
    return found


def _keys(data: torch.Tensor, geometry: SliceGeometry, codec: str) -> torch.Tensor:
    """K fp32 [slices, kv_heads, head_dim, block_tokens] of slices uint8 [slices, bytes]."""
    heads, dim, tokens, count = geometry.kv_heads, geometry.head_dim, geometry.block_tokens, geometry.head_elements
    if codec == "raw":
        both = data.view(DTYPES[geometry.dtype]).view(-1, heads, 2, count)
        return both[:, :, 0].reshape(-1, heads, dim, tokens).float()
    rows = data.view(-1, heads, geometry.int8_head_bytes)
    params = rows[:, :, 2 * count :].contiguous().view(torch.float16).float()
    codes = rows[:, :, :count].contiguous().view(torch.int8).view(-1, heads, dim // 2, tokens, 2)
    keys = torch.cat([codes[..., 0], codes[..., 1]], dim=2).float()
    return keys.mul_(params[:, :, :dim, None]).add_(params[:, :, dim : 2 * dim, None])


def bound_scores(query: torch.Tensor, digests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a scaled query [q_heads, head_dim] may score in each block, each fp32 [blocks, q_heads].

    The first is above every token's score, the second is the mean of them. ``digests`` are [blocks, 3, kv_heads,
    head_dim]; q head ``h`` reads KV head ``h // (q_heads / kv_heads)``.
    """
    kv_heads = digests.shape[2]
    grouped = query.float().view(kv_heads, -1, query.shape[1])
    low, high, mean = (digests[:, index].float() for index in range(3))
    most = torch.einsum("hgd,bhd->bhg", grouped.clamp_min(0), high) + torch.einsum(
        "hgd,bhd->bhg", grouped.clamp_max(0), low
    )
    middle = torch.einsum("hgd,bhd->bhg", grouped, mean)
    return most.reshape(len(digests), -1), middle.reshape(len(digests), -1)
