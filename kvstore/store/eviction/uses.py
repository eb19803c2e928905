"""When blocks were used: columns at once, and the order of the tiers' policies later, in batches.

Policies whose order the index keeps itself (``BlockIndex.listed``) are not told: it moves when the use is noted.

``match`` and ``fetch`` pay for a column and an append; the policies are told before they choose victims, and before
anything else changes their order. Guarded by the store's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.store.columns.index import BlockIndex
from kvstore.store.eviction.contract import Eviction

TICKS: Final = 100
"""Units of ``last_use`` in a second; 32 bits of them are 497 days."""

NOTED_MAX: Final = 8192
"""Most uses that are noted before the policies are told of them."""


class Uses:
    """Notes uses of blocks for the policies of the tiers that there are."""

    def __init__(self, index: BlockIndex, policies: Sequence[Eviction], start: float) -> None:
        self._index = index
        self._policies = policies
        self._start = start
        self._noted: list[int] = []
        """Slots in the order of their uses, children before parents, since the policies were told last."""

    def ticks(self, now: float) -> int:
        """A moment as ``last_use`` counts it."""
        return int((now - self._start) * TICKS)

    def note(self, slots: list[int], now: float) -> None:
        """Blocks, given parents first, are used now."""
        self._index.note(slots, int((now - self._start) * TICKS))  # ``ticks`` without its call: each fetch comes here.
        if self._policies:
            self._noted += reversed(slots)
            if len(self._noted) > NOTED_MAX:
                self.hand_over()

    def hand_over(self) -> None:
        """Tell the policies what was noted. Whatever is not in their tier, or pinned there, they ignore."""
        if self._noted:
            noted, self._noted = self._noted, []
            for policy in self._policies:
                policy.used(noted)

    def idle_seconds(self, slot: int, now: float) -> float:
        """Seconds since a block's last use, to a hundredth."""
        return max(0.0, now - self._start - self._index.last_use[slot] / TICKS)
