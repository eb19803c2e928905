"""What a tier of storage offers beside its contract where it keeps files whose dead bytes come back by rewriting.

A tier says so by deriving from ``Maintained``. The store tells it when room is wanted, and operators may have it
compacted and see its files and what was set aside. Storage that gives space back by itself has nothing of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.stop import Stop, never
from kvstore.core.types import BlockKey


@dataclass(frozen=True, slots=True)
class SegmentUsage:
    """One segment file."""

    segment_id: int
    file_bytes: int
    live_bytes: int
    blocks: int
    open: bool
    used_bytes: int = 0
    """Bytes that were written; what is behind them in the file is free, not dead."""


@dataclass(frozen=True, slots=True)
class QuarantineEntry:
    """Bytes that failed a check and were set aside."""

    file: str
    bytes: int
    key: BlockKey
    cause: str


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What one compaction did."""

    segments: int = 0
    bytes_rewritten: int = 0
    bytes_freed: int = 0


class Maintained(ABC):
    """Its methods are called like those of ``DiskTier``: by any thread."""

    @property
    @abstractmethod
    def fragmentation(self) -> float:
        """Share of the bytes of sealed storage that are dead: what ``compact`` would give back."""

    @abstractmethod
    def reclaim(self, nbytes: int) -> int:
        """Give dropped blocks' space back, rewriting segments if needed, until ``nbytes`` fit; returns bytes freed."""

    @abstractmethod
    def compact(self, fragmentation: float, stop: Stop = never) -> CompactReport:
        """Rewrite segments above this share of dead bytes, until ``stop()``, which is asked before each 8 MiB or so."""

    @abstractmethod
    def segments(self) -> Sequence[SegmentUsage]:
        """Its files."""

    @abstractmethod
    def quarantine(self) -> Sequence[QuarantineEntry]:
        """What was set aside."""

    @abstractmethod
    def empty_quarantine(self) -> None:
        """Delete what was set aside."""
