"""The arguments of paged attention: queries in, slices by address.

A sequence's context is a list of blocks that may lie anywhere: in the DEVICE arena, in the HOST arena in
place, in a buffer into which cold slices were read. So a block is named by the *address* of its slice of
layer 0, and an op adds ``layer * slice_stride``. Blocks of different codecs have different strides and go
in separate calls, whose partial results ``merge`` joins by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.kernels.layout import SliceGeometry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which tokens each sequence of a step attends to. Tensors live on the device of the queries.

    ``addresses``     int64 [sequences, blocks]  address of the block's slice of layer 0; 0 marks no block
    ``starts``        int32 [sequences, blocks]  position of the block's first token in its sequence
    ``query_offsets`` int32 [sequences + 1]      queries of sequence s are rows offsets[s]..offsets[s+1]
    ``context_lens``  int32 [sequences]          tokens visible to the sequence's last query, itself included

    Queries of a sequence are its last tokens: query i of n has position ``context_lens - n + i`` and sees
    every token at a position not above its own (and, with a window of w, above its own minus w). Blocks
    may come in any order and any subset: positions decide, not places. The K and V of the queries
    themselves have been written to their blocks before the call.

    The caller owns the memory behind the addresses and keeps it readable until the op returns (CPU) or
    its stream has passed (GPU).
    """

    addresses: torch.Tensor
    starts: torch.Tensor
    query_offsets: torch.Tensor
    context_lens: torch.Tensor
    geometry: SliceGeometry
    codec: str = "raw"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What changes the scores: ``scale`` multiplies q.k; the rest is off when None.

    ``window``   attend to the last ``window`` tokens only, the query included
    ``soft_cap`` scores become ``cap * tanh(score / cap)`` (Gemma 2)
    ``sinks``    fp32 [q_heads], one extra logit a head that takes mass and gives no value (gpt-oss);
                 it counts once for a query however many calls share its context, so ``paged_attention``
                 leaves it out and ``merge(partials, sinks=options.sinks)`` puts it in
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a subset of the context, mergeable with others by log-sum-exp.

    ``out``  fp32 [queries, q_heads, head_dim]  softmax-weighted values over the subset; 0 where it is empty
    ``lse``  fp32 [queries, q_heads]            natural log of the sum of exp(score); -inf where it is empty

    Both are on the device of the queries and belong to whoever receives them.
    """

    out: torch.Tensor
    lse: torch.Tensor
