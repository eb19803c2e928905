"""Counts by time taken, as Prometheus keeps them: how many ended within each bound, and their time in all."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""Upper bounds, in seconds: a local call takes a tenth of a millisecond, a verification minutes."""


@dataclass(slots=True)
class Histogram:
    """The last entry of ``within`` counts what took longer than all bounds. One thread at a time adds; any may read,
    and one that comes between two additions sees one more or less."""

    within: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.within[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> Histogram:
        """What was counted until now."""
        return Histogram(list(self.within), self.seconds)
