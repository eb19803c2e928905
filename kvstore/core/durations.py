"""How long something took, as a histogram of what is longer than it should be."""

from __future__ import annotations

from typing import Final

BOUNDS_MS: Final = (1, 2, 5, 10, 50)
"""A turn of the event loop and a locked section are to take 5 ms at most, whatever a client sends."""

NOTABLE_S: Final = BOUNDS_MS[0] / 1000
"""Below this there is nothing to count."""


class Durations:
    """Counts of those that took longer than each bound, and the longest. Its owner sees to it that one thread at a time
    counts."""

    def __init__(self) -> None:
        self._over = [0] * len(BOUNDS_MS)
        self.longest_s = 0.0

    def count(self, seconds: float) -> None:
        """Enter one."""
        self.longest_s = max(self.longest_s, seconds)
        for place, bound in enumerate(BOUNDS_MS):
            if seconds * 1000 <= bound:
                break
            self._over[place] += 1

    def counters(self, many: str, one: str) -> dict[str, int]:
        """Named after what was measured: ``{many}_over_5_ms``, ..., ``{one}_longest_us``."""
        found = {f"{many}_over_{bound}_ms": count for bound, count in zip(BOUNDS_MS, self._over, strict=True)}
        return {**found, f"{one}_longest_us": int(self.longest_s * 1e6)}
