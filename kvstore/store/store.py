"""The store's front: every call on one class, each delegated to the room that does it.

Calls are synchronous and thread-safe and take the calling session first. They have the meaning that
``api.Cache`` writes down. Only those marked *blocks* may wait for a copy or the disk; all others are bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.core.clock import Clock
from kvstore.core.errors import Unavailable
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    Area, BlockKey, Durability, JobId, LeaseId, NamespaceId, Outcome, ReservationId, SessionId, Target, Tier,
)  # fmt: skip
from kvstore.store.api import CommitEntry, CommitResult, FetchResult, MatchResult, OpenedNamespace, ReserveResult
from kvstore.store.config import StoreConfig
from kvstore.store.report import (
    BlockEvent, BlockPage, BlockReport, DrainReport, EvictReport, FlushReport, LeaseReport, NamespaceReport,
    SessionHandle, SessionReport, StatusReport, VerifyReport, WhyReport,
)  # fmt: skip
from kvstore.tiers.base import Arena, CompactReport, DeviceArena, DiskTier, DiskUsage, QuarantineEntry

JobDone = Callable[[SessionId, JobId, FetchResult], None]
"""Called outside the lock, from a mover's thread, when a job has its final answer. Must not block."""


class Store:
    """Blocks in three tiers. ``boot_id`` (16 bytes) is new in every process."""

    boot_id: bytes
    host: Arena
    device: DeviceArena | None
    disk: DiskTier | None

    def __init__(
        self,
        config: StoreConfig,
        *,
        host: Arena,
        device: DeviceArena | None = None,
        disk: DiskTier | None = None,
        clock: Clock | None = None,
        on_job_done: JobDone | None = None,
    ) -> None:
        raise Unavailable("the store is being laid")

    def start(self) -> None:
        """Recover what is on SSD and start the movers. *Blocks* for the recovery."""
        raise Unavailable

    def close(self) -> None:
        """Stop the movers, end all sessions, close the tiers. *Blocks*. Idempotent."""
        raise Unavailable

    def tick(self) -> None:
        """Expire leases and job answers, look at the disk's health. The housekeeper calls it every ``tick_ms``."""
        raise Unavailable

    def open_session(
        self, name: str, *, buffer_bytes: int = 0, uid: int = 0, pid: int = 0, remote: bool = False
    ) -> SessionHandle:
        """Open a session with a private buffer of its own. Raises ResourceExhausted at the bound."""
        raise Unavailable

    def close_session(self, session: SessionId) -> None:
        """End a session: leases, reservations, jobs and buffer go with it. Idempotent."""
        raise Unavailable

    def memory(self, session: SessionId, area: Area) -> memoryview:
        """An area as the session may see it: HOST read-only, DEVICE and BUFFER writable. Raises Unavailable if none."""
        raise Unavailable

    def open_namespace(
        self, session: SessionId, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> OpenedNamespace:
        """See ``Cache.open_namespace``. *Blocks* on the first opening if there is a disk."""
        raise Unavailable

    def match(self, session: SessionId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """See ``Cache.match``."""
        raise Unavailable

    def reserve(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        tier: Tier,
        *,
        keys: Sequence[BlockKey] = (),
        count: int = 0,
    ) -> ReserveResult:
        """See ``Cache.reserve``."""
        raise Unavailable

    def commit(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        *,
        token_ids: Sequence[int] = (),
        durability: Durability | None = None,
        lease_id: LeaseId | None = None,
    ) -> CommitResult:
        """See ``Cache.commit``. *Blocks*."""
        raise Unavailable

    def abort(self, session: SessionId, reservation_ids: Sequence[ReservationId]) -> int:
        """See ``Cache.abort``."""
        raise Unavailable

    def fetch(
        self,
        session: SessionId,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        target: Target,
        *,
        lease_id: LeaseId,
        layers: tuple[int, int] | None = None,
        wait_ms: int = 0,
    ) -> FetchResult:
        """See ``Cache.fetch``. *Blocks* for ``wait_ms`` at most."""
        raise Unavailable

    def wait_job(self, session: SessionId, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache.wait_job``. *Blocks* for ``timeout_ms`` at most."""
        raise Unavailable

    def prefetch(
        self, session: SessionId, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier
    ) -> FetchResult:
        """See ``Cache.prefetch``."""
        raise Unavailable

    def remove(self, session: SessionId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Cache.remove``."""
        raise Unavailable

    def flush(self, session: SessionId, timeout_ms: int = 30_000) -> FlushReport:
        """Make every block committed so far durable. *Blocks*."""
        raise Unavailable

    def grant_lease(self, session: SessionId, name: str, ttl_ms: int) -> LeaseId:
        """See ``Cache.grant_lease``."""
        raise Unavailable

    def renew_lease(self, session: SessionId, lease_id: LeaseId) -> int:
        """Set the time left back to the ttl; returns the ttl in ms."""
        raise Unavailable

    def hold(
        self, session: SessionId, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]
    ) -> tuple[bool, ...]:
        """See ``Cache.hold``."""
        raise Unavailable

    def release(
        self,
        session: SessionId,
        lease_id: LeaseId,
        namespace_id: NamespaceId | None = None,
        keys: Sequence[BlockKey] = (),
    ) -> int:
        """See ``Cache.release``."""
        raise Unavailable

    def events_after(
        self, sequence: int, *, namespace_id: NamespaceId | None = None, limit: int = 1024
    ) -> list[BlockEvent]:
        """Events with a greater sequence, oldest first; begins with a GAP if some are no longer kept."""
        raise Unavailable

    @property
    def last_event(self) -> int:
        """Sequence of the newest event; 0 before the first."""
        raise Unavailable

    def on_events(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` (outside the lock, from any thread) after new events; returns what unsubscribes it."""
        raise Unavailable

    def status(self) -> StatusReport:
        """Sizes, counters, health, the recovery report."""
        raise Unavailable

    def namespaces(self) -> tuple[NamespaceReport, ...]:
        """Every namespace that is known."""
        raise Unavailable

    def list_blocks(
        self,
        *,
        namespace_id: NamespaceId | None = None,
        tier: Tier | None = None,
        limit: int = 100,
        page_token: str = "",
    ) -> BlockPage:
        """A page of blocks, coldest first."""
        raise Unavailable

    def show_block(self, key_prefix: bytes, *, namespace_id: NamespaceId | None = None) -> BlockReport:
        """One block by key or an unambiguous prefix of at least 4 bytes. Raises UnknownBlock."""
        raise Unavailable

    def why(
        self, namespace_id: NamespaceId, *, token_ids: Sequence[int] = (), keys: Sequence[BlockKey] = ()
    ) -> WhyReport:
        """Walk a chain and name the first block that would miss, and why."""
        raise Unavailable

    def evict(
        self, tier: Tier, *, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = (), nbytes: int = 0
    ) -> EvictReport:
        """Demote or drop the named blocks from a tier, or the coldest until ``nbytes`` are free. *Blocks*."""
        raise Unavailable

    def pin(self, name: str, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """Keep blocks from being dropped, under an operator's name: HIT held, MISS not resident."""
        raise Unavailable

    def unpin(self, name: str, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()) -> int:
        """Undo ``pin`` for some keys, or for all under the name; returns how many were held."""
        raise Unavailable

    def leases(self) -> tuple[LeaseReport, ...]:
        """Every lease and every operator's pin."""
        raise Unavailable

    def sessions(self) -> tuple[SessionReport, ...]:
        """Every open session."""
        raise Unavailable

    def verify(
        self, *, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = (), bytes_per_second: int = 0
    ) -> VerifyReport:
        """Read blocks back and compare checksums. *Blocks*."""
        raise Unavailable

    def drain(self, *, resume: bool = False, timeout_ms: int = 30_000) -> DrainReport:
        """Refuse new blocks and flush, or take new blocks again. *Blocks*."""
        raise Unavailable

    def compact(self, fragmentation: float = 0.0) -> CompactReport:
        """Rewrite SSD segments above this fragmentation. *Blocks*. Raises Unavailable without a disk."""
        raise Unavailable

    def disk_usage(self) -> DiskUsage:
        """The SSD tier's ledger. Raises Unavailable without a disk."""
        raise Unavailable

    def quarantine(self, *, empty: bool = False) -> tuple[QuarantineEntry, ...]:
        """What was set aside; with ``empty`` it is deleted after it was listed."""
        raise Unavailable
