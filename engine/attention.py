"""Where the library's models meet paged attention: one function under the name ``kvstore_paged``.

The model calls it once a layer with the queries, keys and values of all tokens of a step, flattened into one row.
It writes K and V into the blocks and attends over the blocks; which sequence a token belongs to is in the
``AttentionStep`` that travels through the model's keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface

from kvstore.kernels.attention import merge, paged_attention
from kvstore.kernels.paged import AttentionOptions, PagedBatch

ATTENTION_NAME: Final = "kvstore_paged"


class Writer(Protocol):
    """Takes the K and V of one layer of a step's tokens (``writer.KvWriter``)."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write layer ``layer`` of every token: key and value are [kv_heads, tokens, head_dim]."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's tokens: where their K and V go, and what their queries attend to.

    ``batches[layer]`` are disjoint parts of the same context (one a codec); their partial results are merged.
    """

    writer: Writer
    batches: Sequence[tuple[PagedBatch, ...]]


def register_attention() -> None:
    """Make the function known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_forward)


def paged_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The library's attention call: q [1, heads, tokens, head_dim], k and v [1, kv_heads, tokens, head_dim].

    Returns [1, tokens, heads, head_dim] in the dtype of ``query``. Reads of ``arguments`` are ``paged_step``,
    ``scaling``, ``sliding_window``, ``softcap`` and ``s_aux``; the mask is the batch's own and ``attention_mask``
    is None, since this name registers no mask.
    """
    step: AttentionStep = arguments["paged_step"]
    layer: int = module.layer_idx
    step.writer.write(layer, key[0], value[0])
    options = AttentionOptions(
        scale=arguments.get("scaling") or query.shape[-1] ** -0.5,
        window=arguments.get("sliding_window"),
        soft_cap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )
    rows = query[0].transpose(0, 1).contiguous()
    parts = [paged_attention(rows, batch, options, layer=layer) for batch in step.batches[layer]]
    return merge(parts, options.sinks).out.to(query.dtype).unsqueeze(0), None
