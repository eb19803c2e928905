"""What waits for a mover: loads, blocks for SSD, and room that is wanted. Verbs put in, the movers' threads take out.

The queues are bounded and have a lock of their own, which is taken after the store's, never before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.core.types import Tier
from kvstore.store.config import StoreConfig
from kvstore.store.tables.book import Book
from kvstore.store.tables.state import State

Task = Callable[[], None]


class Queues:
    """The queues of one store."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._config: StoreConfig = state.config
        self._wakeup = threading.Condition()
        self._loads: deque[Task] = deque()
        self._writes: deque[int] = deque()
        self._wanted: dict[Tier, int] = {}
        self._stopping = False

    # -- what verbs put in ---------------------------------------------------------------------------------------

    def submit_load(self, task: Task) -> bool:
        """Queue a job; False if the queue is full."""
        with self._wakeup:
            if len(self._loads) >= self._config.load_queue_max or self._stopping:
                return False
            self._loads.append(task)
            self._wakeup.notify_all()
            return True

    def queue_writes(self, book: Book, slots: Sequence[int]) -> None:
        """Queue blocks for SSD, parents first; those that find no place are counted."""
        if self._state.disk is None or not slots:
            return
        with self._wakeup:
            room = max(self._config.write_queue_max - len(self._writes), 0)
            taken = slots[:room]
            for slot in taken:
                book.ref(slot)
            self._writes.extend(taken)
            self._wakeup.notify_all()
        if len(taken) < len(slots):
            book.counters.count("ssd_writes_dropped_queue_full", len(slots) - len(taken))

    def want_room(self, tier: Tier, nbytes: int) -> None:
        """Have the housekeeper free a hole of ``nbytes`` by demotion. Does not wait."""
        with self._wakeup:
            self._wanted[tier] = max(self._wanted.get(tier, 0), nbytes)
            self._wakeup.notify_all()

    @property
    def waiting(self) -> tuple[int, int]:
        """Jobs and blocks that wait."""
        return len(self._loads), len(self._writes)

    # -- what movers take out ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wake all who wait in ``next_load``, ``wait_writes`` and ``wait_wanted``: there is nothing more to do."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()

    def next_load(self) -> Task | None:
        """Wait for a load and take it; None at the end."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._loads or self._stopping)
            return self._loads.popleft() if self._loads and not self._stopping else None

    def pop_load(self) -> Task | None:
        """A load, if one waits."""
        with self._wakeup:
            return self._loads.popleft() if self._loads else None

    def wait_writes(self) -> bool:
        """Wait until blocks wait for SSD; False at the end."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._writes or self._stopping)
            return not self._stopping

    def pop_writes(self) -> list[int]:
        """Slots of blocks for SSD, as many as are written together, each with a ref that is the taker's now."""
        with self._wakeup:
            count = min(len(self._writes), self._config.extent_blocks_max)
            return [self._writes.popleft() for _ in range(count)]

    def wait_wanted(self, seconds: float) -> bool:
        """Wait until room is wanted, so long at most; False at the end."""
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._wanted or self._stopping, seconds)
            return not self._stopping

    def pop_wanted(self) -> dict[Tier, int]:
        """Bytes that are wanted, by tier."""
        with self._wakeup:
            wanted, self._wanted = self._wanted, {}
        return wanted
