"""How long calls take, by method, and why they fail: what operators watch. Written on the event loop's thread only.

Any thread may read; one that comes between two additions sees one call more or less.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""Upper bounds of the histogram, in seconds: a local call takes a tenth of a millisecond, a verification minutes."""


@dataclass(slots=True)
class MethodTimes:
    """Calls of one method: how many ended within each bound (the last entry: later than all), and their time in all."""

    within: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    """By reason of the error, as the wire names it."""


class CallTimes:
    """A histogram a method, made at its first call: whoever counts lets through names of methods only."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._of: dict[str, MethodTimes] = {}

    def count(self, name: str, began: float, failure: str = "") -> None:
        """A call that began at ``began`` (of ``now``) has ended."""
        seconds = self.now() - began
        found = self._of.get(name)
        if found is None:
            found = self._of[name] = MethodTimes()
        found.within[bisect_left(BOUNDS_S, seconds)] += 1
        found.seconds += seconds
        if failure:
            found.failures[failure] = found.failures.get(failure, 0) + 1

    def by_method(self) -> dict[str, MethodTimes]:
        """What was counted so far, by name on the wire; the caller must not change it."""
        return dict(self._of)
