"""How long turns of the event loop take, as a histogram: whoever holds the loop keeps all other callers waiting.

A turn is what runs between two looks at the sockets. It is measured around the loop's selector, in time that passed, so
that a thread which keeps the interpreter from the loop counts, too. What the loop itself worked in it, in its thread's
CPU time, is counted beside it: on a machine with more to do than processors only that is the daemon's own.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable

from kvstore.core.durations import NOTABLE_S, Durations


class Turns:
    """Counts of turns that took longer than each bound. Used on the loop's thread only."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, worked: Callable[[], float] = time.thread_time
    ) -> None:
        self.now = now
        self.worked = worked
        self._durations = Durations()
        self._work = Durations()

    def count(self, seconds: float, work_s: float) -> None:
        """Enter one turn, and for how much of it the loop's thread ran."""
        self._durations.count(seconds)
        self._work.count(work_s)

    def counters(self) -> dict[str, int]:
        """By the names that docs/operations.md lists."""
        return self._durations.counters("loop_turns", "loop_turn") | self._work.counters("loop_work", "loop_work")


class TurnSelector(selectors.DefaultSelector):
    """The usual selector, which tells ``turns`` how long it was before the loop came back to it."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._left = 0.0
        self._worked = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events; the turn before ends here, the next begins on return."""
        turns = self._turns
        seconds = turns.now() - self._left
        if self._left and seconds > NOTABLE_S:
            turns.count(seconds, turns.worked() - self._worked)
        try:
            return super().select(timeout)
        finally:
            self._worked = turns.worked()
            self._left = turns.now()


def measured_loop(turns: Turns) -> asyncio.AbstractEventLoop:
    """A new event loop whose turns are counted."""
    return asyncio.SelectorEventLoop(TurnSelector(turns))
