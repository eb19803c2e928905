"""Where the library's models meet paged attention: one function under the name ``kvstore_paged``.

The model calls it once a layer with the queries, keys and values of all tokens of a step, flattened into one row.
It writes K and V into the blocks and attends over the blocks; which sequence a token belongs to is in the
``AttentionStep`` that ``attending`` holds up around the pass: not every family hands keyword arguments to its layers.

Up to three producers give partial results in fp32: blocks on DEVICE, blocks in HOST in place, and slices that are read
from storage while the layers before are computed. One merge by log-sum-exp makes the result of them, so that where a
block lies changes nothing but the order of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch
from transformers import AttentionInterface

from kvstore.engine.cold import ColdReader, Indices, Pass, Piece
from kvstore.engine.params import Selected
from kvstore.engine.selection import Budget, Selector
from kvstore.kernels.attention import merge, paged_attention
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions, PagedBatch, Partial

ATTENTION_NAME: Final = "kvstore_paged"

PARTS_MAX: Final = 8
"""Partial results kept before they are merged: those of long chunks of a prompt take megabytes each."""


class Writer(Protocol):
    """Takes the K and V of one layer of a step's tokens (``writer.KvWriter``)."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write layer ``layer`` of every token: key and value are [kv_heads, tokens, head_dim]."""


@dataclass(frozen=True, slots=True)
class ColdPart:
    """The COLD blocks of one sequence of a step, whose queries are rows ``first`` to ``first + count``.

    ``context`` is the number of tokens that its last query sees. ``last_row`` is its row among those that the last
    layer computes, or None if it draws no token. A part with a ``selector`` has one query and ``selected``.
    """

    reader: ColdReader
    first: int
    count: int
    context: int
    last_row: int | None
    geometry: SliceGeometry
    selector: Selector | None = None
    selected: Selected | None = None

    def attend(self, query: torch.Tensor, near: Partial, options: AttentionOptions, layer: int) -> Partial:
        """The result for ``query``, the last rows of the sequence, over ``near`` (what lies in memory) and COLD blocks.

        With a selector: over those that it chooses, in layers without a window.
        """
        if options.window is not None:
            within = self._within(options.window)
            pieces = self.reader.read(layer, within) if len(within) else iter(())
            return merge([near, *self._partials(query, options, pieces)])
        if self.selector is None or self.selected is None:
            return merge([near, *self._partials(query, options, self.reader.read(layer))])
        blocks = -(-self.context // self.geometry.block_tokens)
        budget = Budget(self.selected.mass, max(2, int(self.selected.max_share * blocks)))
        chosen = self.selector.choose(self.reader, query[0], options, layer, budget)
        pieces = self.selector.read(self.reader, layer, chosen.rows)
        whole = merge([near, *self._partials(query, options, pieces)])
        self.selector.note(chosen, whole.lse[0])
        return whole

    def _partials(self, query: torch.Tensor, options: AttentionOptions, pieces: Iterator[Piece]) -> list[Partial]:
        """Partial results over pieces of COLD blocks."""
        offsets = torch.tensor([0, len(query)], dtype=torch.int32)
        contexts = torch.tensor([self.context], dtype=torch.int32)
        parts: list[Partial] = []
        for piece in pieces:
            batch = PagedBatch(piece.addresses, piece.starts, offsets, contexts, self.geometry, piece.codec)
            parts.append(paged_attention(query, batch, options, layer=0))
            if len(parts) == PARTS_MAX:
                parts = [merge(parts)]
        return parts

    def passes(self, windows: Sequence[int | None]) -> list[Pass]:
        """What the layers of these windows will read; with a selector that is not known before they do."""
        if self.selector is not None:
            return []
        rows = [None if window is None else self._within(window) for window in windows]
        return [(layer, part) for layer, part in enumerate(rows) if part is None or len(part)]

    def _within(self, window: int) -> Indices:
        """Rows of the reader that any query sees through a window."""
        first = self.context - self.count - window + 1
        return np.flatnonzero(self.reader.starts + self.geometry.block_tokens > first).astype(np.int32)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step's tokens: where their K and V go, and what their queries attend to.

    ``batches[layer]`` are disjoint parts of the same context (one a codec); their partial results are merged, and
    those of ``cold`` with them. ``last_rows`` int64, if given, are the rows that the last layer has to compute, since
    no other of its results is used; ``batches`` of that layer has these queries only. ``windows`` is filled by the
    layers: their sliding windows.
    """

    writer: Writer
    batches: Sequence[tuple[PagedBatch, ...]]
    windows: dict[int, int | None] = field(default_factory=dict)
    cold: tuple[ColdPart, ...] = ()
    last_rows: torch.Tensor | None = None


_STEP: Final[ContextVar[AttentionStep]] = ContextVar("step")


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """While this lasts, passes in this thread attend to what ``step`` says. One pass at a time."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


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

    Returns [1, tokens, heads, head_dim] in the dtype of ``query``. Reads of ``arguments`` are ``scaling``,
    ``sliding_window``, ``softcap`` and ``s_aux``; the mask is the batch's own and ``attention_mask``
    is None, since this name registers no mask.
    """
    step = _STEP.get()
    layer: int = module.layer_idx
    step.writer.write(layer, key[0], value[0])
    options = AttentionOptions(
        scale=arguments.get("scaling") or query.shape[-1] ** -0.5,
        window=arguments.get("sliding_window"),
        soft_cap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )
    step.windows[layer] = options.window
    rows = query[0].transpose(0, 1).contiguous()
    if step.last_rows is None or layer != len(step.batches) - 1:
        return _attend(step, rows, options, layer).to(query.dtype).unsqueeze(0), None
    out = torch.zeros_like(rows)
    if len(step.last_rows):
        out[step.last_rows] = _attend(step, rows[step.last_rows], options, layer).to(query.dtype)
    return out.unsqueeze(0), None


def _attend(step: AttentionStep, rows: torch.Tensor, options: AttentionOptions, layer: int) -> torch.Tensor:
    """Attention fp32 [rows, heads, head_dim] of the rows that this layer computes."""
    parts = [paged_attention(rows, batch, options, layer=layer) for batch in step.batches[layer]]
    if not step.cold:
        return merge(parts, options.sinks).out
    narrow = step.last_rows is not None and layer == len(step.batches) - 1
    joined = merge(parts)
    for cold in step.cold:
        if narrow and cold.last_row is None:
            continue
        begin, end = (cold.first, cold.first + cold.count) if not narrow else (cold.last_row, (cold.last_row or 0) + 1)
        near = Partial(joined.out[begin:end], joined.lse[begin:end])
        whole = cold.attend(rows[begin:end], near, options, layer)
        joined.out[begin:end], joined.lse[begin:end] = whole.out, whole.lse
    return merge([joined], options.sinks).out
