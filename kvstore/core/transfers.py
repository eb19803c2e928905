"""What every copy of blocks took, by edge: from where to where, how many, how many bytes, how long; and the slow ones.

An edge is a pair of words: ``buffer`` (a session's), ``device``, ``host``, ``ssd``, or the number of a colder tier.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvstore.core.histogram import Histogram
from kvstore.core.types import Tier

BUFFER: Final = "buffer"
SLOW_S: Final = 0.1
"""A batch that takes longer is remembered by itself: it has 64 MiB at most, which a disk reads in less."""

SLOW_KEPT: Final = 32

Edge = tuple[str, str]


@dataclass(slots=True)
class Transfers:
    """One edge. A batch is what one call to a tier, one commit or one block between two arenas copies."""

    batches: Histogram = field(default_factory=Histogram)
    blocks: int = 0
    nbytes: int = 0
    failed: int = 0
    """Blocks whose copy failed."""


@dataclass(frozen=True, slots=True)
class SlowTransfer:
    """One batch that took long."""

    unix_seconds: float
    edge: Edge
    blocks: int
    nbytes: int
    seconds: float


class TransferTimes:
    """Of one store. Its lock guards the counts and is taken last; no call waits for anything else."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time) -> None:
        self.now = now
        self._wall = wall
        self._lock = threading.Lock()
        self._of: dict[Edge, Transfers] = {}
        self._slow: deque[SlowTransfer] = deque(maxlen=SLOW_KEPT)

    def count(self, edge: Edge, began: float, blocks: int, nbytes: int, failed: int = 0) -> None:
        """A batch that began at ``began`` (of ``now``) has ended: ``blocks`` of ``nbytes`` in all arrived."""
        seconds = self.now() - began
        with self._lock:
            found = self._of.get(edge)
            if found is None:
                found = self._of[edge] = Transfers()
            found.batches.add(seconds)
            found.blocks += blocks
            found.nbytes += nbytes
            found.failed += failed
            if seconds > SLOW_S:
                self._slow.append(SlowTransfer(self._wall(), edge, blocks, nbytes, seconds))

    def by_edge(self) -> dict[Edge, Transfers]:
        """What was counted so far."""
        with self._lock:
            return {
                edge: Transfers(found.batches.copy(), found.blocks, found.nbytes, found.failed)
                for edge, found in self._of.items()
            }

    @property
    def slow(self) -> tuple[SlowTransfer, ...]:
        """The last of those that took long, oldest first."""
        with self._lock:
            return tuple(self._slow)


@functools.cache
def edge(source: Tier | str, target: Tier | str) -> Edge:
    """The words of an edge between tiers, or a tier and ``BUFFER``."""
    return _word(source), _word(target)


def _word(place: Tier | str) -> str:
    return place if isinstance(place, str) else place.name.lower()
