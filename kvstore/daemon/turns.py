"""How long turns of the event loop take, as a histogram: whoever holds the loop keeps all other callers waiting.

A turn is what runs between two looks at the sockets. It is measured around the loop's selector, in time that passed, so
that a thread which keeps the interpreter from the loop counts, too.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable

from kvstore.core.durations import Durations


class Turns:
    """Counts of turns that took longer than each bound. Used on the loop's thread only."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._durations = Durations()

    def count(self, seconds: float) -> None:
        """Enter one turn."""
        self._durations.count(seconds)

    def counters(self) -> dict[str, int]:
        """By the names that docs/operations.md lists."""
        return self._durations.counters("loop_turns", "loop_turn")


class TurnSelector(selectors.DefaultSelector):
    """The usual selector, which tells ``turns`` how long it was before the loop came back to it."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._left = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events; the turn before ends here, the next begins on return."""
        if self._left:
            self._turns.count(self._turns.now() - self._left)
        try:
            return super().select(timeout)
        finally:
            self._left = self._turns.now()


def measured_loop(turns: Turns) -> asyncio.AbstractEventLoop:
    """A new event loop whose turns are counted."""
    return asyncio.SelectorEventLoop(TurnSelector(turns))
