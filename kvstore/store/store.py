"""The store: built from its rooms, opened for sessions, asked by operators.

Data calls are made on a session (``session.Session``, which meets ``kvstore.cache.Cache``); here are those that no
session owns. They are synchronous and thread-safe. Only those marked *blocks* may wait for a copy or the disk; all
others are bookkeeping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Sequence
from typing import Final

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.stop import Stop, never
from kvstore.core.types import (
    BlockKey,
    NamespaceId,
    Outcome,
    Tier,
)  # fmt: skip
from kvstore.store.config import StoreConfig
from kvstore.store.moves.durable import Durably
from kvstore.store.moves.loading import Loading
from kvstore.store.moves.move import Movement
from kvstore.store.moves.persist import Persister
from kvstore.store.moves.promote import Promoter
from kvstore.store.moves.queues import Queues
from kvstore.store.moves.reading import Reading
from kvstore.store.moves.space import Space
from kvstore.store.moves.threads import Movers
from kvstore.store.recovery import recover
from kvstore.store.report import (
    BlockEvent,
    BlockPage,
    BlockReport,
    DrainReport,
    EvictReport,
    ExplainReport,
    ForgetReport,
    LeaseReport,
    NamespaceReport,
    SessionReport,
    StatusReport,
    TraceReport,
    TreeReport,
    VerifyReport,
    WhyReport,
)  # fmt: skip
from kvstore.store.session import Session, Verbs
from kvstore.store.tables.owners import Who
from kvstore.store.tables.state import State
from kvstore.store.tables.tenancy import Tenancy
from kvstore.store.verbs.admin import Admin
from kvstore.store.verbs.get import Get, JobDone
from kvstore.store.verbs.maintenance import Maintenance
from kvstore.store.verbs.opening import Opening
from kvstore.store.verbs.plans import Plans
from kvstore.store.verbs.put import Put
from kvstore.store.verbs.removal import Removal
from kvstore.tiers.base import Arena, DeviceArena, DiskTier, DiskUsage
from kvstore.tiers.maintained import CompactReport, QuarantineEntry, SegmentUsage

EVENTS_LOOKED_AT: Final = 1024
"""Most events that one step of a reader looks at, under the lock."""


class Store:
    """Blocks in a list of tiers: DEVICE and HOST in memory, SSD, and ``colder`` storage behind it, eight at most.

    ``boot_id`` (16 bytes) is new in every process.
    """

    boot_id: bytes
    host: Arena
    device: DeviceArena | None
    disk: DiskTier | None

    def __init__(  # noqa: PLR0913  the tiers by what they are, and what every store has
        self,
        config: StoreConfig,
        *,
        host: Arena,
        device: DeviceArena | None = None,
        disk: DiskTier | None = None,
        colder: Sequence[DiskTier] = (),
        clock: Clock | None = None,
        on_job_done: JobDone | None = None,
    ) -> None:
        self.boot_id = os.urandom(16)
        self.host, self.device, self.disk = host, device, disk
        self._closed = False
        arenas: dict[Tier, Arena] = {Tier.HOST: host} if device is None else {Tier.DEVICE: device, Tier.HOST: host}
        self._state = State(config, arenas, [*([disk] if disk else []), *colder], clock or MonotonicClock())
        self._movement = Movement(self._state, Space(self._state), device)
        queues = Queues(self._state)
        promoter = Promoter(self._movement)
        persister = Persister(self._movement, promoter)
        durably = Durably(self._movement, persister)
        self._tenancy = Tenancy(self._state)
        self._movers = Movers(self._movement, persister, self._tenancy, queues)
        self._get = Get(self._state, self._tenancy, Loading(self._state, promoter), queues)
        self._get.on_job_done = on_job_done
        self._removal = Removal(self._movement)
        self._admin = Admin(self._state, self._get, self._movement.space, self.boot_id)
        self._maintenance = Maintenance(self._state, promoter, durably)
        self._verbs = Verbs(
            self._tenancy,
            Opening(self._state),
            Put(self._movement, self._tenancy, durably, queues),
            self._get,
            self._removal,
            self._maintenance,
            Plans(self._state, self._tenancy, Reading(self._state, promoter)),
        )
        self._movers.chores.append(self._verbs.plans.tick)

    def on_job_done(self, callback: JobDone) -> None:
        """Set what is told of finished jobs that nobody waits for."""
        self._get.on_job_done = callback

    @property
    def index_fd(self) -> int:
        """Memory that clients of this host map to match without a call; it stays the store's. -1 for none."""
        return self._state.index_fd

    def run_pending(self) -> None:
        """Do what waits for a mover, in the calling thread: for stores without threads."""
        self._movers.run_pending()

    def start(self) -> None:
        """Recover what is on SSD and start the movers. *Blocks* for the recovery."""
        for tier, storage in self._state.storages.items():
            recover(self._state, tier, storage)
            self._movement.look_at(tier)
        with self._state.locked() as book:
            self._state.tell_readers(book, serving=True)
        self._movers.start()

    def close(self) -> None:
        """Stop the movers, write what is in memory to SSD, end all sessions, close the tiers. *Blocks*. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._state.locked() as book:
            self._state.tell_readers(book, serving=False)
        self._maintenance.stop()
        self._verbs.plans.stop()
        self._movers.stop()
        if self._state.config.close_flush_ms:
            self._maintenance.flush(self._state.config.close_flush_ms)
        self._movers.recency.tell()
        with self._state.locked():
            owners = tuple(self._state.owners.sessions.values())
        self._tenancy.close_all()
        for owner in owners:
            self._verbs.plans.end_session(owner)
        for tier in (*self._state.storages.values(), self.device, self.host):
            if tier is not None:
                tier.close()

    def tick(self) -> None:
        """Expire leases and job answers, look at the disk's health. The housekeeper calls it every ``tick_ms``."""
        self._movers.tick()

    def open_session(
        self, name: str, *, buffer_bytes: int = 0, uid: int = 0, pid: int = 0, remote: bool = False, peer: str = ""
    ) -> Session:
        """Open a session with a private buffer of its own. Raises ResourceExhausted at the bound.

        ``uid`` and ``pid`` say on whose behalf, ``remote`` that no memory is shared with it; ``peer`` is who the
        bounds of one peer go by, "" for the uid. Faults the buffer in.
        """
        who = Who(uid, pid, remote, peer or f"uid {uid}")
        return Session(self._verbs, self._tenancy.open_session(name, buffer_bytes, who))

    def events_after(
        self, sequence: int, *, namespace_id: NamespaceId | None = None, limit: int = 1024
    ) -> list[BlockEvent]:
        """Events with a greater sequence, oldest first; begins with a GAP if some are no longer kept."""
        namespaces = None if namespace_id is None else (namespace_id,)
        with self._state.locked() as book:
            return book.events.after(sequence, namespaces, limit)[0]

    def read_events(
        self, sequence: int, namespaces: Container[NamespaceId] | None, limit: int
    ) -> tuple[list[BlockEvent], int]:
        """``events_after`` in steps, for one who reads on: at most ``limit`` events of these namespaces (None: of all),
        out of a bounded number that are looked at, and the sequence to go on from."""
        with self._state.locked() as book:
            return book.events.after(sequence, namespaces, limit, EVENTS_LOOKED_AT)

    @property
    def last_event(self) -> int:
        """Sequence of the newest event; the epoch before the first."""
        with self._state.locked() as book:
            return book.events.last

    def on_events(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` (outside the lock, from any thread) after new events; returns what unsubscribes it."""
        return self._state.listen(callback)

    def status(self) -> StatusReport:
        """Sizes, counters, health, the recovery report."""
        return self._admin.status()

    def namespaces(self) -> tuple[NamespaceReport, ...]:
        """Every namespace that is known."""
        return self._admin.namespaces()

    def list_blocks(
        self,
        *,
        namespace_id: NamespaceId | None = None,
        tier: Tier | None = None,
        limit: int = 100,
        page_token: str = "",
    ) -> BlockPage:
        """A page of blocks, coldest first."""
        return self._admin.list_blocks(namespace_id, tier, limit, page_token)

    def show_block(self, key_prefix: bytes, *, namespace_id: NamespaceId | None = None) -> BlockReport:
        """One block by key or an unambiguous prefix of at least 4 bytes. Raises UnknownBlock."""
        return self._admin.show_block(key_prefix, namespace_id)

    def why(
        self, namespace_id: NamespaceId, *, token_ids: Sequence[int] = (), keys: Sequence[BlockKey] = ()
    ) -> WhyReport:
        """Walk a chain and name the first block that would miss, and why."""
        return self._admin.why(namespace_id, token_ids, keys)

    def explain(self, namespace_id: NamespaceId, key_prefix: bytes) -> ExplainReport:
        """What keeps one block and what would become of its copies, or why it is a miss. Raises UnknownBlock for a
        start of a key that no resident block has."""
        return self._admin.explain(namespace_id, key_prefix)

    def tree(self, namespace_id: NamespaceId, limit: int = 40) -> TreeReport:
        """The chains of a namespace, runs of blocks as one node, the most used ones first."""
        return self._admin.tree(namespace_id, limit)

    def trace(self, after_sequence: int = 0) -> TraceReport:
        """What was asked for since ``after_sequence``; recorded for as long as this is called every minute."""
        return self._admin.trace(after_sequence)

    def forget(self, namespace_id: NamespaceId, limit: int, stop: Stop = never) -> ForgetReport:
        """Remove about ``limit`` blocks of a namespace from all tiers. *Blocks*, until ``stop()`` at the latest."""
        return self._removal.forget(namespace_id, limit, stop)

    def evict(
        self,
        tier: Tier,
        *,
        namespace_id: NamespaceId | None = None,
        keys: Sequence[BlockKey] = (),
        nbytes: int = 0,
        stop: Stop = never,
    ) -> EvictReport:
        """Demote or drop the named blocks from a tier, or the coldest until ``nbytes`` are free.

        *Blocks*, until ``stop()`` at the latest; what went until then is reported.
        """
        return self._removal.evict(tier, namespace_id, keys, nbytes, stop)

    def pin(self, name: str, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """Keep blocks from being dropped, under an operator's name: HIT held, MISS not resident."""
        return self._removal.pin(name, namespace_id, keys)

    def unpin(self, name: str, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()) -> int:
        """Undo ``pin`` for some keys, or for all under the name; returns how many were held."""
        return self._removal.unpin(name, namespace_id, keys)

    def leases(self) -> tuple[LeaseReport, ...]:
        """Every lease and every operator's pin."""
        return self._admin.leases()

    def sessions(self) -> tuple[SessionReport, ...]:
        """Every open session."""
        return self._admin.sessions()

    def verify(
        self,
        *,
        namespace_id: NamespaceId | None = None,
        keys: Sequence[BlockKey] = (),
        bytes_per_second: int = 0,
        stop: Stop = never,
    ) -> VerifyReport:
        """Read blocks back and compare checksums. *Blocks*, until ``stop()`` at the latest."""
        return self._maintenance.verify(namespace_id, keys, bytes_per_second, stop)

    def drain(self, *, resume: bool = False, timeout_ms: int = 30_000, stop: Stop = never) -> DrainReport:
        """Refuse new blocks and flush, or take new blocks again. Ends early if ``stop`` says so. *Blocks*."""
        return self._maintenance.drain(resume, timeout_ms, stop)

    def compact(self, fragmentation: float = 0.0, stop: Stop = never) -> CompactReport:
        """Rewrite SSD segments above this fragmentation. *Blocks*, until ``stop()`` at the latest.

        Raises Unavailable without a disk.
        """
        return self._maintenance.compact(fragmentation, stop)

    def disk_usage(self) -> DiskUsage:
        """The SSD tier's ledger. Raises Unavailable without a disk."""
        return self._maintenance.disk_usage()

    def segments(self) -> tuple[SegmentUsage, ...]:
        """Files of SSD; none where the storage there has no such files."""
        return self._maintenance.segments()

    def quarantine(self, *, empty: bool = False) -> tuple[QuarantineEntry, ...]:
        """What was set aside; with ``empty`` it is deleted after it was listed."""
        return self._maintenance.quarantine(empty)
