"""Python's collector of cycles, which stops every thread while it looks at the heap: the loop's, and the lock's holder.

Young objects are collected as usual, which takes less than a millisecond. A collection of everything took up to 50 ms
where nine clients had calls of 4,096 keys under way, and came many times a second: it is made in moments without calls
instead. What it finds is little, since cycles are made by failures only.
"""

from __future__ import annotations

import gc
from typing import Final

from kvstore.core.clock import Clock

PERIOD_S: Final = 60.0
"""Seconds between collections of everything, if there are moments without calls."""

PERIOD_S_MAX: Final = 600.0
"""Seconds between them where there are none."""

NEVER: Final = 1 << 30


def keep_to_the_young() -> None:
    """From now on collections by themselves are of young objects, and none looks at what is there now.

    What is there at the start is most of the heap, and stays.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


class Collector:
    """Makes collections of everything when its owner's ticks find a good moment. One thread's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.now()

    def tick(self, *, quiet: bool) -> bool:
        """Collect if it is time to; ``quiet``: no call is under way. True if it did."""
        since = self._clock.now() - self._last
        if since < (PERIOD_S if quiet else PERIOD_S_MAX):
            return False
        gc.collect()
        self._last = self._clock.now()
        return True
