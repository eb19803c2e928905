"""The store's threads: loaders (jobs of fetch and prefetch), writers (to SSD), and the housekeeper.

Reads never wait behind writes, since each kind has its own threads and its own bounded queue. A thread whose work
raises logs the traceback, is counted as restarted, and goes on with the next piece; what the piece had claimed was
given back by the piece itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from kvstore.core.namespace import PAGE_BYTES
from kvstore.core.types import Tier
from kvstore.store.config import StoreConfig, Watermarks
from kvstore.store.moves.move import Movement
from kvstore.store.moves.persist import Persister
from kvstore.store.moves.queues import Queues, Task
from kvstore.store.moves.recency import Recency
from kvstore.store.tables.tenancy import Tenancy

log = logging.getLogger(__name__)

JOIN_SECONDS: Final = 30.0

PIECE_BLOCKS: Final = 64
"""Most blocks that background reclaim frees in one locked section."""


class Movers:
    """The threads. With no threads configured, work waits for ``run_pending``."""

    def __init__(self, movement: Movement, persister: Persister, tenancy: Tenancy, queues: Queues) -> None:
        self._movement = movement
        self._state = movement.state
        self._config: StoreConfig = movement.state.config
        self._persister = persister
        self._tenancy = tenancy
        self.recency = Recency(movement.state)
        self._queues = queues
        self._threads: list[threading.Thread] = []
        self.chores: list[Callable[[], None]] = []
        """What others have done every ``tick_ms``."""

    # -- threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the configured threads."""
        config = self._config
        if config.loader_threads == 0:
            return
        plan = [("loader", self._queues.next_load)] * config.loader_threads
        plan += [("writer", self._next_write)] * config.writer_threads
        plan += [("housekeeper", self._next_chore)]
        for number, (name, step) in enumerate(plan):
            thread = threading.Thread(target=self._run, args=(name, step), name=f"kvstore-{name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Finish what is under way and end the threads. What still waits is not done."""
        self._queues.stop()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
            if thread.is_alive():
                log.error("%s did not end in %s s", thread.name, JOIN_SECONDS)
        self._threads.clear()

    def run_pending(self) -> None:
        """Do what waits, in the calling thread: loads first, then writes, then chores."""
        while (load := self._queues.pop_load()) is not None:
            self._guard("loader", load)
        while batch := self._queues.pop_writes():
            self._guard("writer", lambda slots=batch: self._write(slots))  # type: ignore[misc]
        self._guard("housekeeper", self._chores)

    def _run(self, name: str, step: Callable[[], Task | None]) -> None:
        while True:
            task = step()
            if task is None:
                return
            self._guard(name, task)

    def _guard(self, name: str, task: Task) -> None:
        try:
            task()
        except Exception:  # noqa: BLE001  a mover outlives whatever one piece of work does
            log.exception("the %s failed and goes on with the next piece", name)
            with self._state.locked() as book:
                book.counters.count(f"mover_restarts_{name}")

    def _next_write(self) -> Task | None:
        if not self._queues.wait_writes():
            return None
        batch = self._queues.pop_writes()
        return lambda: self._write(batch)

    def _next_chore(self) -> Task | None:
        return self._chores if self._queues.wait_wanted(self._config.tick_ms / 1000) else None

    def _write(self, slots: list[int]) -> None:
        try:
            self._persister.to_ssd(slots)
        finally:
            with self._state.locked() as book:
                for slot in slots:
                    book.unref(slot)

    # -- chores --------------------------------------------------------------------------------------------------

    def _chores(self) -> None:
        self.tick()
        for tier, nbytes in self._queues.pop_wanted().items():
            # All that was asked for if it can be, else as much as halving finds.
            goal = nbytes
            while goal >= PAGE_BYTES and not self._movement.make_room(tier, goal, total=True):
                goal //= 2
        for tier in (*self._state.arenas, *self._state.storages):
            self._keep_watermarks(tier)

    def tick(self) -> None:
        """Expire leases and answers of jobs; look at the disk's health; tell it of uses now and then."""
        for tier in self._state.storages:
            self._movement.look_at(tier)
        with self._state.locked() as book:
            self._movement.forget_lost(book)
            self._expire_jobs()
        self._tenancy.expire_all()
        self.recency.tick()
        for chore in self.chores:
            chore()

    def _expire_jobs(self) -> None:
        owners = self._state.owners
        limit = self._state.clock.now() - self._config.job_keep_ms / 1000
        old = [job for job in owners.jobs.values() if job.finished_at is not None and job.finished_at <= limit]
        for job in old:
            owners.take_job(job)

    def _keep_watermarks(self, tier: Tier) -> None:
        marks, capacity, used = self._fill_level(tier)
        if capacity == 0 or used <= marks.high * capacity:
            return
        surplus = used - int(marks.low * capacity)
        # In pieces, so that what is freed first can be used before the rest is, and the lock is held for short times.
        while (left := self._surplus(tier, int(marks.low * capacity))) > 0:
            if not self._movement.make_room(tier, left, total=True, limit=PIECE_BLOCKS):
                break
        if tier in self._state.storages:
            self._movement.reclaim(tier, surplus)

    def _surplus(self, tier: Tier, low: int) -> int:
        """Bytes above the low watermark that dropping blocks can bring back. On SSD those of live blocks count: dead
        bytes come back by reclaim, and dropping more blocks for them would empty the tier."""
        arena = self._state.arenas.get(tier)
        if arena is not None:
            return arena.used_bytes - low
        with self._state.locked() as book:
            return book.bytes[tier] - low

    def _fill_level(self, tier: Tier) -> tuple[Watermarks, int, int]:
        marks = self._config.marks(tier)
        level = self._state.storages.get(tier) or self._state.arenas[tier]
        return marks, level.capacity_bytes, level.used_bytes
