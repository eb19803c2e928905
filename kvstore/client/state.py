"""What a client knows between calls, without doing any I/O: ids by generation, namespaces, backoff, failures.

Every connection is one *generation*. Ids of leases, reservations and jobs carry their generation in their
upper bits, so an id from before a restart of the daemon can never be taken for one of the present session:
it raises UnknownLease, UnknownReservation or UnknownJob here, before anything is sent.

One lock guards the fields of ``ClientState``.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvstore.cache import FetchResult
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import KVStoreError, UnknownJob, UnknownLease, UnknownPlan, UnknownReservation
from kvstore.core.types import JobId, LeaseId, NamespaceId, Outcome, PlanId, Reason, ReservationId
from kvstore.wire.verbs.base import KnownNamespace

GENERATION_SHIFT: Final = 48
_ID_MASK: Final = (1 << GENERATION_SHIFT) - 1
_GENERATIONS: Final = 1 << 15
"""Generations wrap after this many reconnects, so that ids stay positive 64-bit integers."""

_JOBS_KEPT: Final = 4096


@dataclass(frozen=True, slots=True)
class Completion:
    """A job that has ended, and its final result."""

    job_id: JobId
    result: FetchResult


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts to connect: doubled from ``first_s`` to ``last_s``, with up to a quarter of jitter."""

    first_s: float = 0.05
    last_s: float = 2.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row (at least 1)."""
        pause = min(self.last_s, self.first_s * 2.0 ** min(failures - 1, 16))
        return pause * (1.0 + 0.25 * random.random())


class ClientState:
    """The client's memory. Thread-safe."""

    def __init__(self, backoff: Backoff, clock: Clock | None = None, job_timeout_s: float = 60.0) -> None:
        self._lock = threading.Lock()
        self._backoff = backoff
        self._clock = clock or MonotonicClock()
        self._job_timeout_s = job_timeout_s
        self._job_deadlines: dict[JobId, float] = {}
        """Of jobs that are under way: past it a job ends as misses, whatever the daemon does."""
        self._generation = -1
        self._boot_id = b""
        self.namespaces: dict[NamespaceId, KnownNamespace] = {}
        self.mapped = 0
        """Keys that were found in the mapped index and not told of; a guess among threads, for counters alone."""
        """Those that the caller opened, by id; ``remember`` enters them."""
        self._pending: OrderedDict[JobId, FetchResult] = OrderedDict()
        self._finished: OrderedDict[JobId, FetchResult] = OrderedDict()
        self._early: OrderedDict[JobId, FetchResult] = OrderedDict()
        self._claimed: Counter[JobId] = Counter()
        self._connect_failures = 0
        self._next_attempt = 0.0
        self._failures: Counter[str] = Counter()

    # ------------------------------------------------------------ connections

    @property
    def generation(self) -> int:
        """Number of the present connection, from 0 on; -1 before the first one."""
        return self._generation

    @property
    def next_generation(self) -> int:
        """Number that the next connection will have."""
        return (self._generation + 1) % _GENERATIONS

    @property
    def boot_id(self) -> bytes:
        """Boot id of the daemon last connected to; empty before."""
        return self._boot_id

    def connected(self, boot_id: bytes) -> bool:
        """Note a new connection; True if the daemon is another process than before."""
        with self._lock:
            self._generation = self.next_generation
            fresh = boot_id != self._boot_id
            self._boot_id = boot_id
            self._connect_failures = 0
            self._next_attempt = 0.0
            return fresh

    def connect_failed(self, now: float) -> float:
        """Note a failed attempt; returns the time before which no other one shall be made."""
        with self._lock:
            self._connect_failures += 1
            self._next_attempt = now + self._backoff.pause_s(self._connect_failures)
            return self._next_attempt

    def seconds_to_attempt(self, now: float) -> float:
        """Seconds until the next attempt to connect is allowed; 0 if it is."""
        return max(0.0, self._next_attempt - now)

    # ------------------------------------------------------------ namespaces

    def take_mapped(self) -> int:
        """Keys that were found in the mapped index since the last Match, which tells the daemon of them."""
        found, self.mapped = self.mapped, 0
        return min(found, 0xFFFFFFFF)

    def remember(self, namespace_id: NamespaceId, known: KnownNamespace) -> None:
        """Keep what opens this namespace again."""
        with self._lock:
            self.namespaces[namespace_id] = known

    def known_namespaces(self) -> list[KnownNamespace]:
        """Namespaces that the caller opened, in order."""
        with self._lock:
            return list(self.namespaces.values())

    # ------------------------------------------------------------ ids

    def lease(self, lease_id: LeaseId) -> int:
        """The daemon's form of a lease id. Raises UnknownLease for another generation's."""
        if lease_id >> GENERATION_SHIFT != self._generation or not lease_id & _ID_MASK:
            raise UnknownLease(
                f"lease {lease_id} ended with the connection that granted it", field="lease_id", value=lease_id
            )
        return lease_id & _ID_MASK

    def job(self, job_id: JobId) -> int:
        """The daemon's form of a job id. Raises UnknownJob for another generation's."""
        if job_id >> GENERATION_SHIFT != self._generation or not job_id & _ID_MASK:
            raise UnknownJob(f"job {job_id} ended with the connection that began it", field="job_id", value=job_id)
        return job_id & _ID_MASK

    def plan(self, plan_id: PlanId) -> int:
        """The daemon's form of a plan id. Raises UnknownPlan for another generation's."""
        if plan_id >> GENERATION_SHIFT != self._generation or not plan_id & _ID_MASK:
            raise UnknownPlan(
                f"plan {plan_id} ended with the connection that opened it", field="plan_id", value=plan_id
            )
        return plan_id & _ID_MASK

    def outward(self, wire_id: int, generation: int) -> int:
        """See ``outward``."""
        return outward(wire_id, generation)

    def reservations(self, ids: Iterable[ReservationId]) -> list[int]:
        """The daemon's form of reservation ids. Raises UnknownReservation if any is another generation's."""
        generation = self._generation
        wire: list[int] = []
        for number in ids:
            if number >> GENERATION_SHIFT != generation or not number & _ID_MASK:
                raise UnknownReservation(
                    f"reservation {number} ended with the connection that made it",
                    field="reservation_ids",
                    value=number,
                )
            wire.append(number & _ID_MASK)
        return wire

    def present_reservations(self, ids: Iterable[ReservationId]) -> list[int]:
        """The daemon's form of those ids that are of the present generation."""
        generation = self._generation
        return [n & _ID_MASK for n in ids if n >> GENERATION_SHIFT == generation and n & _ID_MASK]

    # ------------------------------------------------------------ jobs

    def job_began(self, job_id: JobId, result: FetchResult) -> None:
        """A call was answered PENDING under this job. Its end may have been pushed before the answer came."""
        with self._lock:
            early = self._early.pop(job_id, None)
            _keep(self._pending if early is None else self._finished, job_id, early or result)
            if early is None:
                self._job_deadlines[job_id] = self._clock.now() + self._job_timeout_s

    def job_done(self, job_id: JobId, result: FetchResult) -> None:
        """A job has ended. Jobs that nobody waits for yet are kept until their PENDING answer comes."""
        with self._lock:
            known = self._forget(job_id) is not None
            _keep(self._finished if known else self._early, job_id, result)

    def is_finished(self, job_id: JobId) -> bool:
        """Whether the job has ended and its result was not taken."""
        return job_id in self._finished

    def claim(self, job_id: JobId) -> FetchResult | None:
        """Keep ``take_finished`` from handing out this job; returns its PENDING result (None if it is not pending)."""
        with self._lock:
            self._claimed[job_id] += 1
            return self._pending.get(job_id)

    def unclaim(self, job_id: JobId) -> FetchResult | None:
        """Undo ``claim`` and take the job's result, None if it is still under way."""
        with self._lock:
            self._claimed[job_id] -= 1
            if not self._claimed[job_id]:
                del self._claimed[job_id]
            return self._finished.pop(job_id, None)

    def take_finished(self) -> list[tuple[JobId, FetchResult]]:
        """Results of jobs that have ended and that nobody waits for; each is handed out once."""
        with self._lock:
            taken = [(j, r) for j, r in self._finished.items() if j not in self._claimed]
            for job_id, _ in taken:
                del self._finished[job_id]
            return taken

    def pending_jobs(self) -> list[JobId]:
        """Jobs of the present generation that are under way."""
        with self._lock:
            return [j for j in self._pending if j >> GENERATION_SHIFT == self._generation]

    def lose_job(self, job_id: JobId) -> int:
        """Forget a job that can not end any more; returns how many keys it had (0 if it is not known)."""
        with self._lock:
            result = self._forget(job_id)
            return 0 if result is None else len(result.outcomes)

    def _forget(self, job_id: JobId) -> FetchResult | None:
        """Take a job out of those under way. Lock held."""
        self._job_deadlines.pop(job_id, None)
        return self._pending.pop(job_id, None)

    def all_jobs_lost(self) -> None:
        """There is no connection: no job that is under way can end any more, so each ends now, as misses."""
        with self._lock:
            for job_id in list(self._pending):
                self._lose(job_id, Reason.TIER_UNAVAILABLE)

    def end_overdue(self, now: float) -> None:
        """End the jobs that are past their deadline, as misses."""
        with self._lock:
            for job_id in [j for j, deadline in self._job_deadlines.items() if deadline <= now]:
                self._lose(job_id, Reason.DEADLINE)

    def overdue(self, job_id: JobId, now: float) -> FetchResult | None:
        """The misses of a job that is past its deadline, which ends it; None while it is not."""
        with self._lock:
            if self._job_deadlines.get(job_id, now + 1) > now:
                return None
            self._lose(job_id, Reason.DEADLINE)
            return self._finished.pop(job_id, None)

    def _lose(self, job_id: JobId, reason: Reason) -> None:
        """End a job under way as misses for a reason. Lock held."""
        result = self._forget(job_id)
        if result is not None:
            count = len(result.outcomes)
            _keep(self._finished, job_id, FetchResult((Outcome.MISS,) * count, (reason,) * count, (None,) * count))

    def job_lost(self, job_id: JobId, result: FetchResult) -> None:
        """A job of an earlier connection ends here with ``result``, its misses."""
        with self._lock:
            _keep(self._finished, job_id, result)

    def lost_jobs(self) -> list[tuple[JobId, int]]:
        """Jobs of earlier generations and how many keys each had; they are forgotten here."""
        with self._lock:
            lost = [(j, len(r.outcomes)) for j, r in self._pending.items() if j >> GENERATION_SHIFT != self._generation]
            for job_id, _ in lost:
                self._forget(job_id)
            return lost

    def forked(self) -> None:
        """In the child of a fork: a lock that another thread held is new, and what the parent began is another's."""
        self._lock = threading.Lock()
        self._generation = self.next_generation
        self._connect_failures = 0
        self._next_attempt = 0.0
        self._early.clear()
        self._claimed.clear()

    # ------------------------------------------------------------ failures

    def failed(self, method: str, error: KVStoreError) -> int:
        """Count a failure that the caller did not see; returns how often this one has happened."""
        name = f"{method.rpartition('/')[2]}:{error.reason}"
        with self._lock:
            self._failures[name] += 1
            return self._failures[name]

    def failures(self) -> dict[str, int]:
        """Failures that were answered as misses, by "Method:REASON"."""
        with self._lock:
            return dict(self._failures)


def _keep(table: OrderedDict[JobId, FetchResult], job_id: JobId, result: FetchResult) -> None:
    table[job_id] = result
    if len(table) > _JOBS_KEPT:
        table.popitem(last=False)


def outward(wire_id: int, generation: int) -> int:
    """The caller's form of an id that came over the connection of this generation; 0 stays 0."""
    return wire_id | (generation << GENERATION_SHIFT) if wire_id else 0
