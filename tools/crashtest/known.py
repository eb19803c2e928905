"""What the clients of a daemon know of its blocks, and what must become of each in a crash."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvstore.core.keys import chain_keys
from kvstore.core.namespace import NamespaceSpec
from kvstore.core.types import BlockKey, Reason
from kvstore.tools.crashtest.trace import Trace

SLICE_BYTES: Final = 16 << 10
SPEC: Final = NamespaceSpec(
    model="crashtest", dtype="opaque", layers=4, kv_heads=1, head_dim=1, block_tokens=4, opaque_slice_bytes=SLICE_BYTES
)


class Fate(Enum):
    """What became of a block that was acknowledged as durable, as far as the daemon told."""

    THERE = "nothing says that it went"
    EVICTED = "evicted"
    REMOVED = "removed on request"
    SPOILED = "dropped though nobody asked, and not for space"


def keys_of(chain: int, blocks: int) -> list[BlockKey]:
    """Keys of the first blocks of a chain."""
    return chain_keys(SPEC.namespace_id, [chain, *range(1, blocks * SPEC.block_tokens)], SPEC.block_tokens)


def payload_of(key: BlockKey) -> bytes:
    """The bytes of a block."""
    return hashlib.shake_128(key).digest(SPEC.layers * SLICE_BYTES)


@dataclass(slots=True)
class Known:
    """What was acknowledged. The lock guards it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    durable: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks that were acknowledged as durable, each with a position in the daemon's log: it was there at some moment
    behind it, so only a drop behind it can be why it is gone."""
    soft: dict[BlockKey, int] = field(default_factory=dict)
    """Blocks that were acknowledged in memory in this life, with positions as above. A flush makes them durable."""
    asked: Counter[BlockKey] = field(default_factory=Counter)
    """Removals that were asked for."""
    chains: int = 0

    def witness(self, keys: Iterable[BlockKey], since: int) -> None:
        """Blocks were durable at some moment behind a position of the log. The lock is held."""
        for key in keys:
            self.durable[key] = max(since, self.durable.get(key, 0))

    def ask(self, keys: Sequence[BlockKey]) -> None:
        """A removal is about to be sent. The lock is held."""
        self.asked.update(keys)

    def fate(self, key: BlockKey, trace: Trace) -> Fate:
        """What the daemon told of a durable block since it was last known to be there."""
        drop = trace.drops.get(key)
        if drop is None or drop.at < self.durable[key]:
            return Fate.THERE
        if drop.cause is Reason.EVICTED:
            return Fate.EVICTED
        if drop.cause is Reason.REMOVED and trace.removals[key] <= self.asked[key]:
            return Fate.REMOVED
        return Fate.SPOILED
