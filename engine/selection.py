"""Selected attention: of the blocks in storage, those that a query needs are read, and the rest is bounded.

What lies in memory is always attended to; nothing is ever dropped. Of each block in storage a digest stays in memory
(``kernels/digest.py``), made when its slices are read for the first time. A query ranks them: the estimate of a block's
mass is the mean of its upper bound and of the score of its mean key, normalised over the blocks for each query head and
averaged over the heads that share a KV head. The blocks that hold ``mass`` of every KV head's estimate are read, the
highest ones where they would be more than ``max_share`` of the context; the first and the last block always.

The bound is no estimate: no token scores above a block's upper bound, so the mass of what was not read is at most the
sum of these beside the mass of what was. Digests are kept in fp16, rounded outward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvstore.engine.cold import ColdReader, Indices
from kvstore.kernels.digest import bound_scores, digest_slices
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
    left_log: torch.Tensor


class Selector:
    """Digests of the blocks that one sequence's reader reads, and the choice among them."""

    def __init__(self, geometry: SliceGeometry, layers: int) -> None:
        self._geometry = geometry
        self._known: list[int] = [0] * layers
        none = torch.empty(0, 3, geometry.kv_heads, geometry.head_dim, dtype=torch.float16)
        self._digests: list[torch.Tensor] = [none] * layers
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
        digests = self._complete(reader, layer)
        most, middle = bound_scores(query * options.scale, digests)
        if options.soft_cap is not None:
            most, middle = (options.soft_cap * torch.tanh(part / options.soft_cap) for part in (most, middle))
        estimate = torch.softmax((most + middle) / 2, dim=0)
        heads = estimate.view(len(estimate), self._geometry.kv_heads, -1).mean(-1)
        rank = _wanted(heads, budget.mass)
        # Ends first: where a text begins, and what was said last before what lies in memory.
        starts = torch.from_numpy(np.ascontiguousarray(reader.starts))
        rank[starts.argmin()] = rank[starts.argmax()] = math.inf
        order = rank.argsort(descending=True)[: budget.blocks]
        rows = order[rank[order] > 0].sort().values
        left = most.clone()
        left[rows] = -math.inf
        log_tokens = math.log(self._geometry.block_tokens)
        return Chosen(rows.numpy().astype(np.int32), torch.logsumexp(left, dim=0) + log_tokens)

    def note(self, chosen: Chosen, lse: torch.Tensor) -> None:
        """Count the bound of what was left out, beside the log mass [q_heads] of what was attended to."""
        share = torch.sigmoid(chosen.left_log - lse)
        self.left_out = max(self.left_out, float(share.max()))

    def _complete(self, reader: ColdReader, layer: int) -> torch.Tensor:
        """Digests of all rows in this layer: those that are missing are read."""
        count = len(reader.starts)
        if self._known[layer] < count:
            missing = np.arange(self._known[layer], count, dtype=np.int32)
            made = torch.empty(len(missing), *self._digests[layer].shape[1:], dtype=torch.float16)
            for piece in reader.read(layer, missing):
                rows = torch.from_numpy(piece.rows - missing[0]).long()
                made[rows] = outward(digest_slices(piece.addresses[0].tolist(), self._geometry, piece.codec))
            self._digests[layer] = torch.cat([self._digests[layer], made])
            self._known[layer] = count
        return self._digests[layer]


def outward(digests: torch.Tensor) -> torch.Tensor:
    """Digests in half the memory: fp16, with the minimum and the maximum moved outward past what rounding may take."""
    low, high, mean = digests.unbind(1)
    slack = 2.0**-10
    ends = low - low.abs() * slack - 1e-7, high + high.abs() * slack + 1e-7
    return torch.stack([*ends, mean], dim=1).clamp(-65504.0, 65504.0).half()


def _wanted(heads: torch.Tensor, mass: float) -> torch.Tensor:
    """Rank of each block, above 0 where some KV head needs it to reach ``mass``: its largest share, [blocks]."""
    ordered, order = heads.sort(dim=0, descending=True)
    needed = ordered.cumsum(0) - ordered < mass
    rank = torch.zeros_like(heads).scatter_(0, order, torch.where(needed, ordered, 0.0))
    return rank.amax(-1)
