"""Digests of blocks: what is kept of a block's K to rank it without reading it.

For each KV head and channel the minimum, the maximum and the mean over the block's tokens, in fp16, the first two
rounded outward. With them a query's score of a block is bounded: no token scores above ``q+ @ max + q- @ min``, and the
mean score is ``q @ mean``. (Quest, arXiv:2406.10774, ranks pages by the same bound.)
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.kernels import native
from kvstore.kernels.attention_torch import memory_at
from kvstore.kernels.layout import SliceGeometry

DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
CHUNK_BYTES: Final = 16 << 20
"""Slices that are decoded together."""

Digests = NDArray[np.float16]
"""[blocks, 3, kv_heads, head_dim]: minimum, maximum, mean."""


def digest_slices(addresses: NDArray[np.int64], geometry: SliceGeometry, codec: str) -> Digests:
    """Digests of the slices at these addresses of this process. All tokens of a slice count: only full blocks have one.

    Native where there are C++ kernels for the shape.
    """
    if not native.holds(geometry):
        return outward(exact_digests(addresses, geometry, codec)).numpy()
    into = np.empty((len(addresses), 3, geometry.kv_heads, geometry.head_dim), np.float16)
    native.digest_slices(addresses, geometry, codec, into)
    return into


def exact_digests(addresses: NDArray[np.int64], geometry: SliceGeometry, codec: str) -> torch.Tensor:
    """Digests in fp32 as they are, [slices, 3, kv_heads, head_dim]."""
    size = geometry.slice_bytes(codec)
    found = torch.empty(len(addresses), 3, geometry.kv_heads, geometry.head_dim)
    step = max(1, CHUNK_BYTES // size)
    for begin in range(0, len(addresses), step):
        part = torch.stack([memory_at(address, size) for address in addresses[begin : begin + step].tolist()])
        keys = _keys(part, geometry, codec)
        into = found[begin : begin + step]
        into[:, 0], into[:, 1], into[:, 2] = keys.amin(-1), keys.amax(-1), keys.mean(-1)
    return found


def outward(digests: torch.Tensor) -> torch.Tensor:
    """Digests in half the memory: fp16, with the minimum and the maximum moved outward past what rounding may take."""
    low, high, mean = digests.unbind(1)
    slack = 2.0**-10
    ends = low - low.abs() * slack - 1e-7, high + high.abs() * slack + 1e-7
    return torch.stack([*ends, mean], dim=1).clamp(-65504.0, 65504.0).half()


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


def bound_scores(query: NDArray[np.float32], digests: Digests) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What a scaled query [q_heads, head_dim] may score in each block, each fp32 [blocks, q_heads].

    The first is above every token's score, the second is the mean of them. q head ``h`` reads KV head
    ``h // (q_heads / kv_heads)``. Native where there are C++ kernels for the shape.
    """
    _, _, kv_heads, dim = digests.shape
    if native.fits(dim):
        most, middle = (np.empty((len(digests), len(query)), np.float32) for _ in range(2))
        native.digest_scores(query, digests, (most, middle))
        return most, middle
    grouped = query.reshape(kv_heads, -1, dim)
    low, high, mean = (digests[:, index].astype(np.float32) for index in range(3))
    above, below = np.maximum(grouped, 0), np.minimum(grouped, 0)
    most = np.einsum("hgd,bhd->bhg", above, high) + np.einsum("hgd,bhd->bhg", below, low)
    middle = np.einsum("hgd,bhd->bhg", grouped, mean)
    return most.reshape(len(digests), -1), middle.reshape(len(digests), -1)
