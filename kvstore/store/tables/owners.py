"""Who owns what: sessions, their reservations, buffers, leases and jobs. Guarded by the store's lock."""

from __future__ import annotations

import heapq
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.cache import FetchResult
from kvstore.core.errors import (
    InvalidArgument,
    ResourceExhausted,
    Unauthenticated,
    UnknownJob,
    UnknownNamespace,
    UnknownPlan,
    UnknownReservation,
)
from kvstore.core.types import (
    KEY_BYTES,
    Area,
    BlockKey,
    BlockName,
    JobId,
    LeaseId,
    NamespaceId,
    PlanId,
    ReservationId,
    SessionId,
    Tier,
)
from kvstore.store.columns.lifecycle import Copy
from kvstore.store.config import StoreConfig
from kvstore.store.tables.namespaces import Namespace
from kvstore.tiers.base import Arena

if TYPE_CHECKING:
    from kvstore.store.tables.plans import PlanRight

DEADLINES_SLACK = 64
"""Deadlines of leases that have gone may be kept up to here, so that few leases do not pay for the cleaning."""


@dataclass(frozen=True, slots=True)
class Who:
    """On whose behalf a session is opened; ``peer`` is what bounds go by: a local uid, or a remote address."""

    uid: int
    pid: int
    remote: bool
    peer: str


@dataclass(slots=True)
class Owner:
    """One session, and what is its own. ``buffer_io`` counts jobs that land bytes in the buffer, which outlives the
    session by them."""

    session_id: SessionId
    name: str
    uid: int
    pid: int
    remote: bool
    peer: str
    """Who it is on behalf of, as far as bounds go: a local uid, or a remote address."""
    buffer: Arena | None = None
    buffer_io: int = 0
    reservations: set[ReservationId] = field(default_factory=set)
    leases: set[LeaseId] = field(default_factory=set)
    jobs: set[JobId] = field(default_factory=set)
    plans: set[PlanId] = field(default_factory=set)
    bell: int = -1
    """The eventfd that it rings when its plans may go on; -1 before the first asks for it."""
    rings: bool = False
    """Whether it is listened to."""
    ended: bool = False
    weight: int = 0
    """What its namespaces and the names that it gave them count in the bound of its peer."""
    namespaces: dict[NamespaceId, Namespace] = field(default_factory=dict)
    """Those that it opened: they are not forgotten while it lives, and it has a right to these and no others."""

    def require_open(self) -> None:
        """Raises Unauthenticated once the session has ended."""
        if self.ended:
            raise Unauthenticated(f"session {self.session_id} has ended", field="session", value=self.session_id)

    def namespace(self, namespace_id: NamespaceId) -> Namespace:
        """One that the session has opened. Raises UnknownNamespace for all others, whether they exist or not, and
        Unauthenticated once the session has ended."""
        found = self.namespaces.get(namespace_id)
        if self.ended:
            self.require_open()
        if found is None:
            if len(namespace_id) != KEY_BYTES:
                raise InvalidArgument("namespace_id", f"{len(namespace_id)} bytes", f"{KEY_BYTES} bytes")
            raise UnknownNamespace(
                f"namespace {namespace_id.hex()[:16]} was not opened by this session",
                field="namespace_id",
                value=namespace_id.hex(),
                expected="an id that OpenNamespace answered to this session",
            )
        return found


@dataclass(frozen=True, slots=True)
class Reservation:
    """A place claimed for one block to be written: where ``area`` says, on its way to ``tier``.

    ``copy`` is the range that the session writes. Where sessions may write into DEVICE that is the block's place there;
    elsewhere it is a range of the session's buffer, and ``device`` the place in DEVICE that is kept for the block.
    """

    reservation_id: ReservationId
    owner: Owner
    namespace: Namespace
    area: Area
    copy: Copy
    key: BlockKey | None = None
    standing: bool = False
    """Reserved again once it was committed."""
    device: Copy | None = None

    @property
    def tier(self) -> Tier:
        """Where the block goes at commit."""
        return Tier.HOST if self.on_device is None else Tier.DEVICE

    @property
    def on_device(self) -> Copy | None:
        """The range of DEVICE that it keeps, if the block goes there."""
        return self.copy if self.area is Area.DEVICE else self.device


@dataclass(slots=True)
class Lease:
    """An owned, named right. ``pins`` are copy numbers, ``holds`` slots, ``buffers`` ranges by block.

    Its time runs out at ``deadline``; one that a stream of the daemon owns has no time and ends with the stream.
    """

    lease_id: LeaseId
    owner: Owner
    name: str
    ttl_ms: int = 0
    deadline: float = math.inf
    pins: dict[int, None] = field(default_factory=dict)
    """In the order in which they came, parents first; they go the other way round, so that parents end up hotter."""
    holds: set[int] = field(default_factory=set)
    jobs: set[JobId] = field(default_factory=set)
    """Jobs that are to pin for it."""
    buffers: dict[BlockName, list[tuple[int, int]]] = field(default_factory=dict)
    ended: bool = False

    @property
    def timed(self) -> bool:
        """Whether it ends by itself when its time is up."""
        return self.deadline < math.inf

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the session's buffer that this lease keeps."""
        return sum(nbytes for ranges in self.buffers.values() for _, nbytes in ranges)


@dataclass(slots=True)
class Job:
    """A fetch or prefetch under way; ``result`` is its answer so far, ``done`` is set when it is final."""

    job_id: JobId
    owner: Owner
    result: FetchResult
    lease: Lease | None = None
    cancel: Callable[[], None] = field(default=lambda: None)
    """Ends the job at once if it has not begun."""
    done: threading.Event = field(default_factory=threading.Event)
    announce: bool = False
    """Whether its end is told to ``on_job_done``: set when nobody waits for it."""
    finished_at: float | None = None


class Owners:
    """Tables of everything that belongs to a session."""

    def __init__(self) -> None:
        self.sessions: dict[SessionId, Owner] = {}
        self.reservations: dict[ReservationId, Reservation] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.ending: deque[Lease] = deque()
        """Leases that have ended, of which something is still to be given back."""
        self.jobs: dict[JobId, Job] = {}
        self.plans: dict[PlanId, PlanRight] = {}
        self.uncommitted: dict[BlockName, int] = {}
        """Blocks that someone reserved and has not committed yet, with how many did."""
        self.peers: Counter[tuple[str, str]] = Counter()
        """What each peer has open, by its name and the name of the bound."""
        self.operator_pins: dict[str, dict[NamespaceId, set[int]]] = {}
        self._deadlines: list[tuple[float, LeaseId]] = []
        self._last = 0

    def next_id(self) -> int:
        """A number that was not used before in this process; ids of all kinds share it, so none passes for another."""
        self._last += 1
        return self._last

    def add_lease(self, lease: Lease) -> None:
        """Enter a new lease."""
        self.leases[lease.lease_id] = lease
        lease.owner.leases.add(lease.lease_id)
        if lease.timed:
            heapq.heappush(self._deadlines, (lease.deadline, lease.lease_id))
        self._count(lease.owner, "leases", 1)

    def take_lease(self, lease: Lease) -> None:
        """Take a lease off the tables. Its deadline goes with it, as soon as most deadlines are of leases that went."""
        del self.leases[lease.lease_id]
        lease.owner.leases.discard(lease.lease_id)
        self._count(lease.owner, "leases", -1)
        if len(self._deadlines) > 2 * len(self.leases) + DEADLINES_SLACK:
            self._deadlines = [(known.deadline, number) for number, known in self.leases.items() if known.timed]
            heapq.heapify(self._deadlines)

    @property
    def deadlines(self) -> int:
        """Entries of the heap of deadlines: at most twice as many as leases, and a few."""
        return len(self._deadlines)

    def add_session(self, owner: Owner) -> None:
        """Enter a new session."""
        self.sessions[owner.session_id] = owner
        self._count(owner, "sessions", 1)

    def take_session(self, owner: Owner) -> None:
        """Take a session off the tables."""
        del self.sessions[owner.session_id]
        self._count(owner, "sessions", -1)

    def add_job(self, job: Job) -> None:
        """Enter a new job."""
        self.jobs[job.job_id] = job
        job.owner.jobs.add(job.job_id)
        self._count(job.owner, "jobs", 1)

    def charge_namespaces(self, owner: Owner, weight: int) -> None:
        """A session has opened namespaces, or names of them, of this weight more; they are its peer's until it ends."""
        owner.weight += weight
        self._count(owner, "namespaces", weight)

    def _count(self, owner: Owner, what: str, change: int) -> None:
        mine = (owner.peer, what)
        self.peers[mine] += change
        if not self.peers[mine]:
            del self.peers[mine]

    def expired(self, now: float) -> Iterator[Lease]:
        """Leases whose time has run out; the caller ends each before it takes the next."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.leases.get(lease_id)
            if lease is None:
                continue
            if lease.deadline > now:
                # Renewed since it was put here: its entry moves to the time it has now.
                heapq.heappush(self._deadlines, (lease.deadline, lease_id))
            else:
                yield lease

    def reservation(self, owner: Owner, reservation_id: ReservationId) -> Reservation:
        """The session's own open reservation; raises UnknownReservation."""
        found = self.reservations.get(reservation_id)
        if found is None or found.owner is not owner:
            raise UnknownReservation(
                f"reservation {reservation_id} is unknown or finished", field="reservation_ids", value=reservation_id
            )
        return found

    def add_reservation(self, reservation: Reservation) -> None:
        """Enter a new reservation."""
        self.reservations[reservation.reservation_id] = reservation
        reservation.owner.reservations.add(reservation.reservation_id)
        self._count(reservation.owner, "reservations", 1)
        if reservation.key is not None:
            name = reservation.namespace.namespace_id, reservation.key
            self.uncommitted[name] = self.uncommitted.get(name, 0) + 1

    def take_reservation(self, reservation: Reservation) -> None:
        """Take a reservation off the tables: it can not be committed or aborted any more."""
        self.take_reservations(reservation.owner, (reservation,))

    def take_reservations(self, owner: Owner, reservations: Sequence[Reservation]) -> None:
        """``take_reservation`` for many of one session; calls nothing for each: a commit takes all in one step."""
        mine, uncommitted = owner.reservations, self.uncommitted
        for reservation in reservations:
            number, key = reservation.reservation_id, reservation.key
            del self.reservations[number]
            mine.discard(number)
            if key is not None:
                name = reservation.namespace.namespace_id, key
                if uncommitted[name] > 1:
                    uncommitted[name] -= 1
                else:
                    del uncommitted[name]
        self._count(owner, "reservations", -len(reservations))

    def job(self, owner: Owner, job_id: JobId) -> Job:
        """The session's own job; raises UnknownJob."""
        found = self.jobs.get(job_id)
        if found is None or found.owner is not owner:
            raise UnknownJob(f"job {job_id} is unknown or its answer was read", field="job_id", value=job_id)
        return found

    def take_job(self, job: Job) -> None:
        """Forget a job."""
        if self.jobs.pop(job.job_id, None) is not None:
            job.owner.jobs.discard(job.job_id)
            self._count(job.owner, "jobs", -1)

    def plan(self, owner: Owner, plan_id: PlanId) -> PlanRight:
        """The session's own living plan; raises UnknownPlan."""
        found = self.plans.get(plan_id)
        if found is None or found.owner is not owner:
            raise UnknownPlan(f"plan {plan_id} is unknown or has ended", field="plan_id", value=plan_id)
        return found

    def add_plan(self, plan: PlanRight) -> None:
        """Enter a new plan."""
        self.plans[plan.plan_id] = plan
        plan.owner.plans.add(plan.plan_id)
        self._count(plan.owner, "plans", 1)

    def take_plan(self, plan: PlanRight) -> None:
        """Take a plan off the tables."""
        del self.plans[plan.plan_id]
        plan.owner.plans.discard(plan.plan_id)
        self._count(plan.owner, "plans", -1)
        self._count(plan.owner, "plan_units", -plan.units)

    def count_units(self, plan: PlanRight, units: int) -> None:
        """A plan names so many units more."""
        plan.units += units
        self._count(plan.owner, "plan_units", units)

    def has_room(self, what: str, peer: str, config: StoreConfig) -> bool:
        """Whether one more is within the bounds of all and of this peer."""
        limit: int = getattr(config, f"{what}_max")
        return len(getattr(self, what)) < limit and self.peers[peer, what] < config.peer_bound(limit)

    def require_room(self, what: str, peer: str, config: StoreConfig, *, more: int = 1) -> None:
        """Raise ResourceExhausted where ``more`` sessions, leases, reservations or jobs are above a bound.

        The bound of all is ``config.{what}_max``; one peer may have a share of it, so that others are never shut out.
        """
        limit: int = getattr(config, f"{what}_max")
        present = len(getattr(self, what))
        if present + more > limit:
            raise ResourceExhausted(f"{present} {what} are open; the bound is store.{what}_max = {limit}", field=what)
        self.require_share(what, peer, config, more=more)

    def require_share(self, what: str, peer: str, config: StoreConfig, *, more: int) -> None:
        """Raise ResourceExhausted where ``more`` are above the share of one peer."""
        mine, share = self.peers[peer, what], config.peer_bound(getattr(config, f"{what}_max"))
        if mine + more > share:
            raise ResourceExhausted(
                f"{peer} has {mine} {what} open; the bound of one peer is {share}, store.peer_share of {what}_max",
                field=what,
                value=mine + more,
                expected=f"at most {share}",
            )
