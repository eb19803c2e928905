"""Everything that the store's one lock guards, and the lock.

``State.locked()`` is the way in, and what it answers, the ``Book``, is the proof: whoever needs the lock held takes it
as an argument, and there is no other way to it (``match``, which changes nothing and leaves nothing to do, takes
``lock`` itself).

The lock guards the book (index, lists, pins, fills, events, tombstones, counters), ``namespaces``, ``owners``
(sessions, reservations, leases, jobs), ``draining``, ``readable``, ``reserved_bytes``, ``writes``, ``synced`` and
``lost``. It is never held across a copy, a sync, a disk call or a callback: what a locked section leaves to be done
(dropped disk handles, events to announce, buffers to unmap, jobs to announce) is done after it was released. The order
of locks is: this lock, then a tier's or the movers' own; a tier never calls back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from typing import Final, TypeVar

from kvstore.core.clock import Clock
from kvstore.core.durations import NOTABLE_S, Durations
from kvstore.core.errors import TierError
from kvstore.core.namespace import PAGE_BYTES
from kvstore.core.transfers import TransferTimes
from kvstore.core.types import BlockName, Reason, Tier
from kvstore.store.columns.forms import make_index
from kvstore.store.config import StoreConfig
from kvstore.store.guarantees import shares
from kvstore.store.tables.asked_for import Recording
from kvstore.store.tables.book import Book
from kvstore.store.tables.namespaces import NamespaceTable
from kvstore.store.tables.owners import Owners
from kvstore.tiers.base import Arena, DiskHandle, DiskTier

log = logging.getLogger(__name__)


SECTION: Final = 64
"""Blocks of one call that are worked on in one locked section, so that others come between the sections of a long one.

It is a few milliseconds' work; most calls have fewer.
"""

MAPPED_SLOTS_MIN: Final = 1 << 16

T = TypeVar("T")


def parts(items: Sequence[T]) -> list[Sequence[T]]:
    """What each section of a long call works on."""
    return [items[begin : begin + SECTION] for begin in range(0, len(items), SECTION)]


class State:
    """The tables, the lock, and the tiers they speak of."""

    def __init__(
        self, config: StoreConfig, arenas: dict[Tier, Arena], storages: Sequence[DiskTier], clock: Clock
    ) -> None:
        self.config = config
        self.clock = clock
        self.arenas = arenas
        self.storages = {Tier(Tier.SSD + place): storage for place, storage in enumerate(storages)}
        """Tiers that are asked and not addressed, hot to cold: SSD, and what there is behind it."""
        self.disk = self.storages.get(Tier.SSD)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified when a fill or I/O has ended."""
        self.namespaces = NamespaceTable(config.namespaces_max, shares(config.guarantees))
        limits = (config.events_max, config.tombstones_max, config.events_epoch)
        index = make_index((*arenas, *(self.storages or (Tier.SSD,))), self._mapped_slots() if config.index_map else 0)
        self._book = Book(self.namespaces, arenas, clock, limits, config.evictions, index)
        self.owners = Owners()
        self.draining = self._serving = False
        self.stored = sum(tier.bit for tier in self.storages)
        """Residency bits of what a restart finds again."""
        self.readable = 0b011 | self.stored
        """Residency bits that can be read now: without those of storage that is degraded."""
        self.reserved_bytes = 0
        """Bytes of DEVICE that are reserved and not committed."""
        self.writes = 0
        """Writes to SSD that were not synced when they returned, so far."""
        self.synced = 0
        """How many of ``writes`` are known to be synced."""
        self.drops = 0
        """Times that the disk was told to forget blocks, so far: that is durable with the next sync only."""
        self.drops_synced = 0
        """How many of ``drops`` are known to be synced."""
        self.lost: list[tuple[Tier, DiskHandle, BlockName]] = []
        """What the disk has lost while its copy was not READY yet."""
        self.later: list[Callable[[], None]] = []
        """What the section leaves to be done; see ``afterwards``."""
        self.transfers = TransferTimes()
        self.recording = Recording(clock)
        self._listeners: list[Callable[[], None]] = []
        self.unproven = self._book
        """For ``match`` alone, which changes nothing and leaves nothing to do, and takes ``lock`` itself."""
        self._section = _Section(self)
        self.locked: Callable[[], AbstractContextManager[Book]] = repeat(self._section).__next__
        """Hold the lock; afterwards, without it, do what the section left to be done. A call answers the one section,
        and is none of a Python function."""

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Within a locked section: let go of the lock until ``changed`` was notified and ``condition`` holds."""
        return self._section.wait_for(condition, seconds)

    def _mapped_slots(self) -> int:
        """Room in an index that is mapped: for twice the smallest blocks that the tiers can hold, and as many ghosts.

        It bounds the memory that a reader of all of it brings into being: 80 bytes a slot at most, 0.08 of the tiers.
        """
        held = sum(arena.capacity_bytes for arena in self.arenas.values())
        held += sum(storage.capacity_bytes for storage in self.storages.values())
        return max(MAPPED_SLOTS_MIN, 4 * held // PAGE_BYTES)

    @property
    def index_fd(self) -> int:
        """Memory that clients of this host map to match without a call; it stays the index's. -1 for none."""
        return self._book.index.fd

    def tell_readers(self, book: Book, *, serving: bool | None = None) -> None:
        """Say for what those who map the index may answer: nothing before the start, behind the end, or while matches
        are recorded."""
        if serving is not None:
            self._serving = serving
        book.index.set_readable(self.readable if self._serving and not self.recording.on else 0)

    def held(self) -> dict[str, int]:
        """How long sections held the lock, and for how much of it their thread ran, as counters."""
        held, work = self._section.durations, self._section.work
        return held.counters("locked_sections", "locked_section") | work.counters("locked_work", "locked_work")

    def after_section(
        self,
        dropped: list[tuple[Tier, DiskHandle, BlockName]],
        later: list[Callable[[], None]],
        *,
        told: bool,
    ) -> None:
        """What a section has left to be done. Without the lock."""
        for tier, storage in self.storages.items() if dropped else ():
            self._drop(storage, [(handle, name) for at, handle, name in dropped if at is tier])
        for action in later:
            _guarded(action)
        if told:
            for listener in tuple(self._listeners):
                _guarded(listener)

    def _drop(self, disk: DiskTier, dropped: list[tuple[DiskHandle, BlockName]]) -> None:
        if not dropped:
            return
        try:
            disk.drop([handle for handle, _ in dropped], [name for _, name in dropped])
        except TierError as error:
            # The blocks are gone from the index; should they be found at the next start, they are merely cached again.
            log.warning("%d dropped blocks stay on SSD for now: %s", len(dropped), error)
        with self.lock:
            self.drops += 1

    def afterwards(self, action: Callable[[], None]) -> None:
        """Within a locked section: run ``action`` once the lock is released."""
        self.later.append(action)

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` after sections that told events; returns what ends it."""
        self._listeners.append(callback)

        def unsubscribe() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return unsubscribe

    def why_absent(self, book: Book, name: BlockName) -> Reason:
        """Why a block that lies nowhere is a miss."""
        return Reason.UNCOMMITTED if name in self.owners.uncommitted else book.tombstones.reason(name)

    def colder(self, tier: Tier) -> Tier | None:
        """The next colder storage, if there is one and it is ready."""
        return next((t for t in self.storages if t > tier and self.readable & t.bit), None)

    @property
    def disk_ready(self) -> bool:
        """Whether SSD takes writes and answers reads, as far as is known."""
        return bool(self.readable & Tier.SSD.bit)


class _Section(AbstractContextManager[Book]):
    """The locked sections of a store, one after the other: what it keeps meanwhile is the lock's holder's.

    A class and no generator, which would take six calls a section instead of three; a put has eight sections.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._lock = state.lock
        self._began = 0.0
        self._worked = 0.0
        self.durations = Durations()
        self.work = Durations()

    def __enter__(self) -> Book:
        self._lock.acquire()
        self._worked = time.thread_time()
        self._began = time.perf_counter()
        return self._state._book

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """See ``State.wait_for``."""
        try:
            return self._state.changed.wait_for(condition, seconds)
        finally:
            self._worked = time.thread_time()
            self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        state = self._state
        book = state._book
        try:
            told = bool(book.news.untold or book.news.token_ids) and book.news.publish()
            dropped, later = book.dropped_handles, state.later
            if dropped:
                book.dropped_handles = []
            if later:
                state.later = []
            held_s = time.perf_counter() - self._began
            if held_s > NOTABLE_S:
                self.durations.count(held_s)
                self.work.count(time.thread_time() - self._worked)
        finally:
            self._lock.release()
        if dropped or later or told:
            state.after_section(dropped, later, told=told)


def _guarded(action: Callable[[], None]) -> None:
    """Run a callback: its failure is its owner's and must not become the caller's, whose work is done."""
    try:
        action()
    except Exception:  # noqa: BLE001  whatever it is, it is logged
        log.exception("a callback failed")
