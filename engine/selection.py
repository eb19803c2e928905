"""Selected attention: of the blocks in storage, those that a query needs are read, and the rest is bounded.

What lies in memory is always attended to; nothing is ever dropped. Of each block in storage a digest stays in memory
(``kernels/digest.py``), made when its slices are read for the first time. A query ranks them: the estimate of a block's
mass is the mean of its upper bound and of the score of its mean key, normalised over the blocks for each query head and
averaged over the heads that share a KV head. The blocks that hold ``mass`` of every KV head's estimate are read, the
highest ones where they would be more than ``max_share`` of the context; the first and the last block always.

The bound is no estimate: no token scores above a block's upper bound, so the mass of what was not read is at most the
sum of these beside the mass of what was. Digests are kept in fp16, rounded outward.

A decode step chooses nearly what the one before chose. So slices that were read stay in memory, as many as the engine
has ``hot_bytes`` for (``hot.py``), and only those that are new are read from storage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engine.cold import ColdReader, Indices, Piece, Tally
from kvstore.engine.hot import HotSlices
from kvstore.kernels.digest import Digests, bound_scores, digest_slices
from kvstore.kernels.layout import SliceGeometry
from kvstore.kernels.paged import AttentionOptions


@dataclass(frozen=True, slots=True)
class Budget:
    """The share of mass to be read, and the most blocks."""

    mass: float
    blocks: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows of the reader to read, ascending, and the log of the most mass that the others can have, [q_heads]."""

    rows: Indices
    left_log: NDArray[np.float32]


class Selector:
    """Digests of the blocks that one sequence's reader reads, the choice among them, and the slices that were chosen.

    ``hot_bytes`` is the most memory that these slices take.
    """

    def __init__(self, geometry: SliceGeometry, layers: int, hot_bytes: int = 0, tally: Tally | None = None) -> None:
        self._geometry = geometry
        self._tally = tally or Tally()
        self.hot_bytes = hot_bytes
        self._known: list[int] = [0] * layers
        none = np.empty((0, 3, geometry.kv_heads, geometry.head_dim), np.float16)
        self._digests: list[Digests] = [none] * layers
        """Rows beyond ``_known`` are room to grow."""
        self._hot = [HotSlices(geometry, hot_bytes // layers) for _ in range(layers)]
        self.left_out = 0.0
        """Largest bound of a share of mass that was left out, of any head and layer, since ``begin``."""

    def begin(self) -> None:
        """A step begins."""
        self.left_out = 0.0

    def choose(
        self, reader: ColdReader, query: torch.Tensor, options: AttentionOptions, layer: int, budget: Budget
    ) -> Chosen:
        """Which rows of the reader one query [q_heads, head_dim] needs.

        Raises ColdLost and LinkLost, where digests are missing.
        """
        digests, starts = self._complete(reader, layer), reader.starts
        most, middle = bound_scores((query.float() * options.scale).numpy(), digests)
        if options.soft_cap is not None:
            cap = np.float32(options.soft_cap)
            most, middle = cap * np.tanh(most / cap), cap * np.tanh(middle / cap)
        rank = _wanted(_shares((most + middle) * np.float32(0.5), self._geometry.kv_heads), budget)
        # Ends first: where a text begins, and what was said last before what lies in memory.
        rank[starts.argmin()] = rank[starts.argmax()] = math.inf
        rows = np.flatnonzero(rank)
        if len(rows) > budget.blocks:
            rows = np.sort(rows[np.argpartition(-rank[rows], budget.blocks - 1)[: budget.blocks]])
        most[rows] = -math.inf
        return Chosen(rows.astype(np.int32), _log_sum(most) + math.log(self._geometry.block_tokens))

    def read(self, reader: ColdReader, layer: int, rows: Indices) -> Iterator[Piece]:
        """The slices of these rows: from memory what was chosen lately, the rest from storage. Raises as the reader."""
        hot = self._hot[layer]
        there = hot.has(rows)
        missing = rows[~there]
        if len(missing):
            # Read while what is here is attended to.
            reader.begin([(layer, missing)])
        for piece in hot.pieces(rows[there], reader.starts):
            self._tally.hot_bytes += piece.nbytes
            yield piece
        if len(missing):
            for piece in reader.read(layer):
                hot.keep(piece)
                yield piece

    def note(self, chosen: Chosen, lse: torch.Tensor) -> None:
        """Count the bound of what was left out, beside the log mass [q_heads] of what was attended to."""
        share = 1.0 / (1.0 + np.exp(np.minimum(lse.numpy() - chosen.left_log, 80.0)))
        self.left_out = max(self.left_out, float(share.max()))

    def _complete(self, reader: ColdReader, layer: int) -> Digests:
        """Digests of all rows in this layer: those that are missing are read."""
        known, count = self._known[layer], len(reader.starts)
        if known < count:
            digests = self._digests[layer]
            if len(digests) < count:
                digests = np.empty((count + count // 8, *digests.shape[1:]), np.float16)
                digests[:known] = self._digests[layer][:known]
                self._digests[layer] = digests
            for piece in reader.read(layer, np.arange(known, count, dtype=np.int32)):
                digests[piece.rows] = digest_slices(piece.addresses[0].numpy(), self._geometry, piece.codec)
            self._known[layer] = count
        return self._digests[layer][:count]


def _shares(scores: NDArray[np.float32], kv_heads: int) -> NDArray[np.float32]:
    """Estimates of the mass of each block, [blocks, kv_heads], from estimates of log mass, [blocks, q_heads]."""
    mass = np.exp(scores - scores.max(axis=0))
    mass /= mass.sum(axis=0)
    return np.asarray(mass.reshape(len(mass), kv_heads, -1).mean(axis=-1), np.float32)


def _log_sum(logs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log of the sum of what these are the logs of, down the columns; -inf of nothing."""
    top = np.maximum(logs.max(axis=0), -1e30)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(logs - top).sum(axis=0)) + top, np.float32)


def _wanted(heads: NDArray[np.float32], budget: Budget) -> NDArray[np.float32]:
    """Rank of each block, [blocks]: its largest share, above 0 where some KV head needs it to reach ``mass``.

    No block beyond the first ``budget.blocks`` of a head is looked at: those of that head alone fill the budget.
    """
    rank = np.zeros(len(heads), np.float32)
    for shares in heads.T:
        first = np.arange(len(shares))
        if budget.blocks < len(shares):
            first = np.argpartition(-shares, budget.blocks)[: budget.blocks]
        first = first[np.argsort(-shares[first], kind="stable")]
        ordered = shares[first]
        needed = first[np.cumsum(ordered) - ordered < budget.mass]
        rank[needed] = np.maximum(rank[needed], shares[needed])
    return rank
