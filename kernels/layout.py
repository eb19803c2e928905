"""The byte layout of a slice: one layer's K and V for one block of tokens.

A *raw* slice holds, for each KV head in turn, K channel-major ``[head_dim][block_tokens]`` followed by
V token-major ``[block_tokens][head_dim]``, both in the model's dtype, with no padding. ``q @ K`` is then
a plain tile load on a GPU and an outer-product panel on a CPU, without horizontal sums in either phase.

An *int8* slice holds, for each KV head in turn::

    K codes    int8  [head_dim / 2][block_tokens][2]   channel c beside channel c + head_dim / 2
    V codes    int8  [block_tokens / 2][head_dim][2]   token t beside token t + block_tokens / 2
    K scale    fp16  [head_dim]                        asymmetric, per channel over the block's tokens
    K zero     fp16  [head_dim]                        in units of K itself: K = code * scale + zero
    V scale    fp16  [block_tokens]                    symmetric, per token: V = code * scale

So the code of K (channel c, token t) is byte ``2 * ((c % (head_dim / 2)) * block_tokens + t) + c // (head_dim / 2)``
of its head, and that of V (token t, channel d) is byte ``head_elements + 2 * ((t % (block_tokens / 2)) * head_dim
+ d) + t // (block_tokens / 2)``. A pair is one 16-bit load that a CPU feeds to ``vpmaddwd`` / ``vpdpwssd`` and a GPU
splits by shifts into two tiles that meet the halves of q and p. docs/format-slices.md is the whole specification.

This module is arithmetic only: no numpy, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvstore.kernels.codecs import row_of

SLICE_ALIGNMENT: Final = 512
"""Slices start at multiples of this many bytes, the smallest unit of a direct disk read."""

DTYPE_BYTES: Final[dict[str, int]] = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one element of each model dtype that a slice may hold."""


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class SliceGeometry:
    """Shape of one slice; every derived byte count is a property.

    ``dtype`` is the model's dtype, a key of ``DTYPE_BYTES``; codecs keep it to know what they decode to.
    """

    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {sorted(DTYPE_BYTES)}")

    @property
    def itemsize(self) -> int:
        """Bytes of one raw element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def head_elements(self) -> int:
        """Elements of K (and of V) of one head: ``head_dim * block_tokens``."""
        return self.head_dim * self.block_tokens

    @property
    def raw_bytes(self) -> int:
        """Bytes of a raw slice."""
        return 2 * self.kv_heads * self.head_elements * self.itemsize

    @property
    def int8_head_bytes(self) -> int:
        """Bytes of one head of an int8 slice: codes of K and V, then the fp16 parameters."""
        return 2 * self.head_elements + 2 * (2 * self.head_dim + self.block_tokens)

    @property
    def int8_bytes(self) -> int:
        """Bytes of an int8 slice, without padding at its end."""
        return self.kv_heads * self.int8_head_bytes

    def slice_bytes(self, codec: str) -> int:
        """Bytes of a slice under ``codec``, without padding at its end."""
        return row_of(codec).slice_bytes(self)

    def slice_stride(self, codec: str) -> int:
        """Bytes from one slice to the next in a block: ``slice_bytes`` aligned up."""
        return align_up(self.slice_bytes(codec), SLICE_ALIGNMENT)
