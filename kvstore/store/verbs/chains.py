"""A namespace's chains as a tree whose nodes are runs of blocks. Works on copies of columns, without the lock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.core.types import Tier
from kvstore.store.eviction.uses import TICKS
from kvstore.store.report import TreeNode, TreeReport
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.state import State

Column = NDArray[np.int64]
NO_KEY: Final = bytes(32)


@dataclass(slots=True)
class _Columns:
    """What is known of the blocks of a namespace, one entry a block, children by parent and sums over subtrees."""

    slots: Column
    parent: Column
    """Position of the parent among these, -1 for none."""
    residency: Column
    bytes_by_tier: NDArray[np.int64]
    hits: Column
    last_use: Column
    children: list[list[int]] = field(default_factory=list)
    total: Column = field(default_factory=lambda: np.zeros(0, np.int64))
    total_bytes: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def sum_up(self) -> None:
        """Sums over all that hangs below each block, leaves first."""
        count = len(self.slots)
        self.children = [[] for _ in range(count)]
        left = np.zeros(count, np.int64)
        for at, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                self.children[parent].append(at)
        left[:] = [len(found) for found in self.children]
        self.total, self.total_bytes = np.ones(count, np.int64), self.bytes_by_tier.copy()
        last_use, level = self.last_use.copy(), np.flatnonzero(left == 0)
        while len(level):
            level = level[self.parent[level] >= 0]
            above = self.parent[level]
            np.add.at(self.total, above, self.total[level])
            np.add.at(self.total_bytes, above, self.total_bytes[level])
            np.maximum.at(last_use, above, last_use[level])
            np.subtract.at(left, above, 1)
            level = np.unique(above[left[above] == 0])
        self.last_use = last_use

    def run_from(self, at: int) -> tuple[int, int]:
        """The last block of the run that begins at one, and its length."""
        length = 1
        while len(self.children[at]) == 1:
            at, length = self.children[at][0], length + 1
        return at, length


def tree_of(state: State, namespace: Namespace, limit: int) -> TreeReport:
    """See ``Store.tree``."""
    with state.locked() as book:
        index = book.index
        top = index.top
        here = (np.array(index.namespace[:top]) == namespace.number) & (np.array(index.residency[:top]) != 0)
        slots = np.flatnonzero(here)
        residency, codec, parents = (
            np.array(column[:top])[slots].astype(np.int64) for column in (index.residency, index.codec, index.parent)
        )
        hits, last_use = (np.array(column[:top])[slots].astype(np.int64) for column in (index.hits, index.last_use))
        tiers, now = tuple(book.tiers), state.clock.now()
        newest = book.uses.ticks(now)
    # Positions of parents among these: one that is a ghost, or gone, is none.
    where = np.full(top + 1, -1, np.int64)
    where[slots] = np.arange(len(slots))
    sizes = np.array([[0] * 4 if not row else list(row) for row in namespace.sizes], np.int64)
    nbytes = np.stack([((residency >> (tier - 1)) & 1) * sizes[tier][codec] for tier in tiers], axis=1)
    known = _Columns(slots, where[np.maximum(parents, -1)], residency, nbytes, hits, last_use)
    known.parent[parents < 0] = -1
    known.sum_up()

    def key_of(position: int) -> bytes:
        return index.key_at(int(slots[position])) or NO_KEY

    chosen, hidden = _choose(known, limit)
    nodes = tuple(_nodes(known, chosen, tiers, key_of, newest))
    return TreeReport(nodes, len(slots), hidden)


def _choose(known: _Columns, limit: int) -> tuple[dict[int, tuple[int, int]], int]:
    """First blocks of the runs that are shown, with their last block and length: the most used, then the largest."""
    chosen: dict[int, tuple[int, int]] = {}
    waiting: list[tuple[int, int, int]] = []

    def offer(at: int) -> None:
        heapq.heappush(waiting, (-int(known.hits[at]), -int(known.total[at]), at))

    roots = np.flatnonzero(known.parent < 0).tolist()
    for root in roots:
        offer(root)
    while waiting and len(chosen) < limit:
        at = heapq.heappop(waiting)[2]
        chosen[at] = known.run_from(at)
        for child in known.children[chosen[at][0]]:
            offer(child)
    return chosen, sum(root not in chosen for root in roots)


def _nodes(
    known: _Columns,
    chosen: dict[int, tuple[int, int]],
    tiers: tuple[Tier, ...],
    key_of: Callable[[int], bytes],
    newest: int,
) -> Iterator[TreeNode]:
    """The chosen runs, parents before their children, siblings as they were chosen."""
    order = {at: number for number, at in enumerate(chosen)}
    below = [(at, 0) for at in reversed([at for at in chosen if known.parent[at] < 0])]
    while below:
        at, level = below.pop()
        last, length = chosen[at]
        children = known.children[last]
        shown = sorted((child for child in children if child in order), key=order.__getitem__, reverse=True)
        below += [(child, level + 1) for child in shown]
        by_tier = dict(zip(tiers, known.total_bytes[at].tolist(), strict=True))
        yield TreeNode(
            level=level,
            key=key_of(at),
            blocks=length,
            residency=int(known.residency[at]),
            total_blocks=int(known.total[at]),
            total_bytes=sum(by_tier.values()),
            bytes_by_tier=tuple(by_tier.get(Tier(n), 0) for n in range(1, max(*tiers, Tier.SSD) + 1)),
            hits=int(known.hits[last]),
            idle_seconds=max(0, newest - int(known.last_use[at])) / TICKS,
            hidden=len(children) - len(shown),
        )
