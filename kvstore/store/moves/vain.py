"""Evictions that bring nothing are not repeated: whoever fills the disk would else have a tier emptied for nothing.

Blocks are dropped from SSD so that a write finds room. Where it finds none all the same (others took the room, or it
did not come back), the next try waits, and each further failure doubles the wait. A write that works ends it.
"""

from __future__ import annotations

from typing import Final

from kvstore.core.clock import Clock

FIRST_S: Final = 1.0
LAST_S: Final = 300.0


class Vain:
    """How often dropping was in vain, and until when it is not tried again. Plain fields: a late look does no harm."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._next = 0.0

    def may_try(self) -> bool:
        """Whether blocks may be dropped for a write now."""
        return not self._failures or self._clock.now() >= self._next

    def failed(self) -> None:
        """Blocks were dropped and the write found no room."""
        self._failures += 1
        self._next = self._clock.now() + min(LAST_S, FIRST_S * 2.0 ** min(self._failures - 1, 16))

    def worked(self) -> None:
        """A write found room."""
        self._failures = 0
