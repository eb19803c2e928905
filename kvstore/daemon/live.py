"""What the page shows, as plain values: sizes and counts, never a name, a key or a tenant. Namespaces are numbers.

Asked for by every page that is open, so what is costly is kept for a while: ``FRESH_S``, the trees ``TREE_S``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

from kvstore.core.errors import KVStoreError
from kvstore.daemon.metrics import Snapshot
from kvstore.store.report import NamespaceReport, TreeReport
from kvstore.store.store import Store

FRESH_S: Final = 0.5
TREE_S: Final = 10.0
TREES_MAX: Final = 2
TREE_NODES: Final = 12
TREE_BLOCKS_MAX: Final = 200_000
"""A namespace with more is not drawn: making its tree takes more processor time than a page is worth."""

NAMESPACES_SHOWN: Final = 8
SLOW_SHOWN: Final = 8


def page() -> bytes:
    """The page: one document, nothing loaded from elsewhere."""
    return files("kvstore.daemon").joinpath("page.html").read_bytes()


class Live:
    """The values of one daemon. Called by the threads of the server."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], store: Store, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._snapshot, self._store, self._now = snapshot, store, now
        self._lock = threading.Lock()
        self._at = self._trees_at = float("-inf")
        self._values: dict[str, Any] = {}
        self._trees: list[dict[str, Any]] = []

    def values(self) -> dict[str, Any]:
        """As the page reads them; at most ``FRESH_S`` old."""
        with self._lock:
            if self._now() - self._at >= FRESH_S:
                self._values, self._at = self._make(), self._now()
            return self._values

    def _make(self) -> dict[str, Any]:
        now = self._snapshot()
        report = now.report
        namespaces = list(enumerate(self._store.namespaces(), 1))
        if self._now() - self._trees_at >= TREE_S:
            self._trees, self._trees_at = self._draw(namespaces), self._now()
        counters = now.counters
        missed = {n.removeprefix("match_missed_"): v for n, v in counters.items() if n.startswith("match_missed_")}
        largest = sorted(namespaces, key=lambda entry: -entry[1].blocks)[:NAMESPACES_SHOWN]
        return {
            "version": now.version, "uptime_seconds": report.uptime_seconds, "draining": report.draining,
            "sessions": report.sessions, "leases": report.leases, "warnings": len(report.warnings),
            "found": counters.get("match_found", 0), "missed": missed,
            "put": {name: counters.get(f"put_{name}", 0) for name in ("new", "existed", "known")},
            "tiers": [
                {
                    "name": tier.tier.name, "capacity": tier.capacity_bytes, "used": tier.used_bytes,
                    "pinned": tier.pinned_bytes, "blocks": tier.blocks, "state": tier.state,
                    "high": tier.high_watermark, "evicted": tier.evicted, "demoted": tier.demoted,
                    "promoted": tier.promoted, "found": counters.get(f"fetch_found_{tier.tier.name.lower()}", 0),
                }
                for tier in report.tiers
            ],
            "edges": [
                {"source": source, "target": target, "blocks": t.blocks, "bytes": t.nbytes,
                 "seconds": t.batches.seconds, "batches": sum(t.batches.within), "failed": t.failed}
                for (source, target), t in sorted(report.transfers.items())
            ],
            "slow": [
                {"ago": max(0.0, time.time() - one.unix_seconds), "source": one.edge[0], "target": one.edge[1],
                 "bytes": one.nbytes, "blocks": one.blocks, "seconds": one.seconds}
                for one in reversed(report.slow[-SLOW_SHOWN:])
            ],
            "namespaces": [
                {"number": number, "blocks": one.blocks, "brought": one.brought, "evicted": one.evicted}
                for number, one in largest
            ],
            "trees": self._trees,
        }  # fmt: skip

    def _draw(self, namespaces: list[tuple[int, NamespaceReport]]) -> list[dict[str, Any]]:
        drawn = []
        small = [(number, one) for number, one in namespaces if 0 < one.blocks <= TREE_BLOCKS_MAX]
        for number, one in sorted(small, key=lambda entry: -entry[1].blocks)[:TREES_MAX]:
            try:
                tree = self._store.tree(one.namespace_id, TREE_NODES)
            except KVStoreError:
                continue  # Forgotten meanwhile: there is nothing of it to be drawn.
            drawn.append({"number": number, "blocks": tree.blocks, "nodes": _nodes(tree, one.spec.block_tokens)})
        return drawn


def _nodes(tree: TreeReport, block_tokens: int) -> list[dict[str, Any]]:
    return [
        {"level": node.level, "tokens": node.blocks * block_tokens, "blocks": node.total_blocks,
         "bytes": node.total_bytes, "hits": node.hits, "residency": node.residency}
        for node in tree.nodes
    ]  # fmt: skip
