"""The session: the noun that meets ``kvstore.cache.Cache`` in the daemon and in process.

Whoever holds one makes its calls with it and ends it with ``close``; leases, reservations, jobs and the private buffer
are its own and end with it. Calls are synchronous and thread-safe. Only those marked *blocks* may wait for a copy
or the disk; all others are bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.cache import (
    Cache,
    CommitEntry,
    CommitResult,
    FetchResult,
    MatchResult,
    OpenedNamespace,
    PlanKeys,
    PlanOpened,
    PlanPass,
    ReserveResult,
)
from kvstore.core.errors import PermissionDenied, Unavailable
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.rights import Right, Rights
from kvstore.core.stop import Stop, never
from kvstore.core.types import (
    Area,
    BlockKey,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    Place,
    PlanId,
    ReservationId,
    SessionId,
    Target,
    Tier,
)  # fmt: skip
from kvstore.store.report import FlushReport
from kvstore.store.tables import validate
from kvstore.store.tables.namespaces import Namespace
from kvstore.store.tables.owners import Owner
from kvstore.store.tables.tenancy import Tenancy
from kvstore.store.verbs.get import Get
from kvstore.store.verbs.maintenance import Maintenance
from kvstore.store.verbs.opening import Opening
from kvstore.store.verbs.plans import Plans
from kvstore.store.verbs.put import Put
from kvstore.store.verbs.removal import Removal
from kvstore.tiers.versions import Versions


@dataclass(frozen=True, slots=True)
class Verbs:
    """The rooms that do a session's calls, the same for all sessions of a store."""

    tenancy: Tenancy
    opening: Opening
    put: Put
    get: Get
    removal: Removal
    maintenance: Maintenance
    plans: Plans


class Session:
    """One session of a store in this process; meets ``Cache``. Closing it ends the session, not the store.

    Every call raises Unauthenticated once the session has ended, but for ``close``, which may be called again.
    """

    generation = 0
    """See ``Cache.generation``: a session in process never connects again."""

    def __init__(self, verbs: Verbs, owner: Owner) -> None:
        self._verbs = verbs
        self._owner = owner
        self._rights: Rights | None = None
        self._only_read: set[NamespaceId] = set()
        self.name = owner.name
        """Its name for people."""
        self.uid, self.pid = owner.uid, owner.pid
        """The user and the process that opened it, as far as is known."""
        self.remote = owner.remote
        """Whether it is on behalf of a caller that shares no memory."""
        self.peer = owner.peer
        """Who the bounds of one peer go by."""
        self.buffer_bytes = owner.buffer.capacity_bytes if owner.buffer is not None else 0
        """Size of the private buffer; 0 without one."""
        self.buffer_fd: int = getattr(owner.buffer, "fd", -1)
        """Descriptor of the private buffer, or -1. It belongs to the store and stays open until the session has ended
        and no I/O lands in the buffer; whoever passes it on passes a duplicate."""

    @property
    def session_id(self) -> SessionId:
        """The number that reports and events name it by; no right goes with it."""
        return self._owner.session_id

    @property
    def ended(self) -> bool:
        """Whether it was closed."""
        return self._owner.ended

    def open_namespace(
        self, spec: NamespaceSpec, *, name: str = "", policy: NamespacePolicy | None = None
    ) -> OpenedNamespace:
        """See ``Cache.open_namespace``. *Blocks* on the first opening if there is a disk."""
        if self._rights is not None:
            self._check_right(spec, self._rights(spec), policy)
        return self._verbs.opening.open(self._owner, spec, name, policy)

    def restrict(self, rights: Rights) -> None:
        """From here on it opens only what ``rights`` gives, and writes only where that says so."""
        self._rights = rights

    def _check_right(self, spec: NamespaceSpec, right: Right, policy: NamespacePolicy | None) -> None:
        if right is Right.READ and policy is not None:
            raise PermissionDenied("how a namespace is kept is for those who may write it", field="policy")
        if right is Right.NONE:
            raise PermissionDenied(
                "the policy gives this caller no right to this namespace", field="spec", expected="a pattern that fits"
            )
        if right is Right.READ:
            self._only_read.add(spec.namespace_id)

    def check_writes(self, namespace_id: NamespaceId) -> None:
        """Raise PermissionDenied where the rights are to read only: for who writes on its behalf."""
        if namespace_id in self._only_read:
            raise PermissionDenied(
                "the policy lets this caller read this namespace and not write it",
                field="namespace_id",
                expected="the role data-write",
            )

    def opened(self, namespace_id: NamespaceId) -> Namespace:
        """Spec, policy and layout of a namespace that it has opened, to be looked at. Raises UnknownNamespace."""
        self._verbs.tenancy.require(self._owner)
        return self._owner.namespace(namespace_id)

    @property
    def namespaces(self) -> Container[NamespaceId]:
        """Those that it has opened, as they are at any moment: it has a right to these and no others."""
        return self._owner.namespaces.keys()

    def count_mapped(self, keys: int) -> None:
        """This session's client has found so many keys by itself, in the index that it maps."""
        self._verbs.get.count_mapped(keys)

    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> MatchResult:
        """See ``Cache.match``."""
        return self._verbs.get.match(self._owner, namespace_id, keys)

    def reserve(  # noqa: PLR0913  a keyword a field of the request
        self,
        namespace_id: NamespaceId,
        tier: Tier,
        *,
        keys: Sequence[BlockKey] = (),
        count: int = 0,
        durability: Durability | None = None,
        standing: bool = False,
        whole: bool = False,
    ) -> ReserveResult:
        """See ``Cache.reserve``."""
        self.check_writes(namespace_id)
        return self._verbs.put.reserve(
            self._owner, namespace_id, tier, keys, count, durability, standing=standing, whole=whole
        )

    def commit(
        self,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        *,
        token_ids: Sequence[int] = (),
        durability: Durability | None = None,
        lease_id: LeaseId | None = None,
    ) -> CommitResult:
        """See ``Cache.commit``. *Blocks*."""
        self.check_writes(namespace_id)
        return self._verbs.put.commit(self._owner, namespace_id, entries, token_ids, durability, lease_id)

    def abort(self, reservation_ids: Sequence[ReservationId]) -> int:
        """See ``Cache.abort``."""
        return self._verbs.put.abort(self._owner, reservation_ids)

    def fetch(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        target: Target,
        *,
        lease_id: LeaseId,
        layers: tuple[int, int] | None = None,
        wait_ms: int = 0,
    ) -> FetchResult:
        """See ``Cache.fetch``. *Blocks* for ``wait_ms`` at most."""
        begun = self.begin_fetch(namespace_id, keys, target, lease_id=lease_id, layers=layers, wait_ms=wait_ms)
        return begun if isinstance(begun, FetchResult) else begun()

    def begin_fetch(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        target: Target,
        *,
        lease_id: LeaseId,
        layers: tuple[int, int] | None = None,
        wait_ms: int = 0,
    ) -> FetchResult | Callable[[], FetchResult]:
        """``fetch`` up to where it would wait: the result, or what waits for it and returns it. Call that once."""
        if not 0 <= wait_ms <= validate.WAIT_MS_MAX:
            validate.check_wait("wait_ms", wait_ms)
        get = self._verbs.get
        result, job = get.fetch(self._owner, namespace_id, keys, target, lease_id, layers)
        if job is None:
            return result
        return partial(get.wait, job, wait_ms / 1000) if wait_ms else get.wait(job, 0)

    def wait_job(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache.wait_job``. *Blocks* for ``timeout_ms`` at most."""
        return self._verbs.get.wait_job(self._owner, job_id, timeout_ms)

    def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> FetchResult:
        """See ``Cache.prefetch``."""
        return self._verbs.get.prefetch(self._owner, namespace_id, keys, tier)

    def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[Outcome, ...]:
        """See ``Cache.remove``."""
        self.check_writes(namespace_id)
        return self._verbs.removal.remove(self._owner, namespace_id, keys)

    def flush(self, timeout_ms: int = 30_000) -> int:
        """See ``Cache.flush``. *Blocks*."""
        return self.flush_report(timeout_ms).blocks

    def flush_report(self, timeout_ms: int = 30_000, stop: Stop = never) -> FlushReport:
        """``flush`` until ``stop`` says to stop, saying blocks and bytes. *Blocks*."""
        self._verbs.tenancy.require(self._owner)
        report = self._verbs.maintenance.flush(timeout_ms, stop)
        if report.failure:
            raise Unavailable(f"not all is durable: {report.failure}")
        return report

    def grant_lease(self, name: str, ttl_ms: int) -> LeaseId:
        """See ``Cache.grant_lease``."""
        return self._verbs.tenancy.grant(self._owner, name, ttl_ms)

    def renew_lease(self, lease_id: LeaseId) -> int:
        """See ``Cache.renew_lease``."""
        return self._verbs.tenancy.renew(self._owner, lease_id)

    def hold(self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> tuple[bool, ...]:
        """See ``Cache.hold``."""
        return self._verbs.tenancy.hold(self._owner, lease_id, namespace_id, keys)

    def release(self, lease_id: LeaseId, namespace_id: NamespaceId | None = None, keys: Sequence[BlockKey] = ()) -> int:
        """See ``Cache.release``."""
        return self._verbs.tenancy.release(self._owner, lease_id, namespace_id, keys)

    def begin_release(self, lease_id: LeaseId) -> int | Callable[[], int]:
        """``release`` of a whole lease, which is over at once. What it held is given back in one locked section, or,
        where that is too much for one, by the function that is returned. Call that once."""
        return self._verbs.tenancy.begin_release(self._owner, lease_id)

    @contextmanager
    def pins(self, name: str) -> Iterator[LeaseId]:
        """A lease for what the daemon itself reads on the session's behalf: it has no clock.

        It ends with the block of the ``with`` statement, or with the session. Raises ResourceExhausted at the bound.
        """
        lease = self._verbs.tenancy.grant_untimed(self._owner, name)
        try:
            yield lease.lease_id
        finally:
            self._verbs.tenancy.end(lease)

    def held(self, place: Place) -> bool:
        """Whether bytes that were copied from a place since it was told are the block's. Raises Unauthenticated."""
        return self._verbs.tenancy.held(self._owner, place)

    def open_plan(  # noqa: PLR0913  a keyword a field of the request
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        layers: tuple[int, int] | None = None,
        piece_bytes: int = 4 << 20,
        pieces: int = 4,
        idle_ms: int = 60_000,
    ) -> PlanOpened:
        """See ``Cache.open_plan``. *Blocks*."""
        return self._verbs.plans.open(self._owner, namespace_id, keys, layers, piece_bytes, pieces, idle_ms)

    def extend_plan(self, plan_id: PlanId, keys: Sequence[BlockKey]) -> PlanKeys:
        """See ``Cache.extend_plan``. *Blocks*."""
        return self._verbs.plans.extend(self._owner, plan_id, keys)

    def advance_plan(
        self,
        plan_id: PlanId,
        *,
        layers: tuple[int, int] | None = None,
        blocks: Sequence[int] | None = None,
        drop: bool = False,
    ) -> PlanPass:
        """See ``Cache.advance_plan``."""
        return self._verbs.plans.advance(self._owner, plan_id, layers, blocks, drop=drop)

    def close_plan(self, plan_id: PlanId) -> bool:
        """See ``Cache.close_plan``."""
        return self._verbs.plans.close(self._owner, plan_id)

    def plan_bell(self) -> int:
        """See ``Cache.plan_bell``."""
        return self._verbs.plans.bell(self._owner)

    def memory(self, area: Area) -> memoryview:
        """See ``Cache.memory``."""
        return self._verbs.tenancy.memory(self._owner, area)

    def versions(self, area: Area) -> Versions:
        """See ``Cache.versions``."""
        return self._verbs.tenancy.versions(self._owner, area)

    def alive(self, generation: int) -> bool:
        """See ``Cache.alive``."""
        return generation == self.generation and not self._owner.ended

    def device_tensor(self) -> Any:
        """See ``Cache.device_tensor``. In process DEVICE is shared memory, so there is none."""
        self.memory(Area.DEVICE)

    def close(self) -> None:
        """See ``Cache.close``."""
        plans = self._verbs.plans
        # What is being opened meanwhile is found by the second look.
        plans.end_session(self._owner)
        self._verbs.tenancy.close_session(self._owner)
        plans.end_session(self._owner)


if TYPE_CHECKING:

    def _meets(session: Session) -> Cache:
        return session
