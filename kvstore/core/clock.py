"""Time as a collaborator: the store takes a Clock, tests hand it one they turn by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some start that never go back."""

    def now(self) -> float:
        """Return the present time in seconds."""


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)
    """Itself, since calling a function that calls it would take as long again."""


class ManualClock:
    """A clock that stands until it is told to go on, for tests."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the time last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Go on by ``seconds``, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; a clock does not go back")
        self._now += seconds
