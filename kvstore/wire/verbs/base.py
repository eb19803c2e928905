"""What a row of the table of verbs is, and what it may ask of either end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from kvstore.cache import Cache, FetchResult
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import BlockKey, JobId, LeaseId, NamespaceId, PlanId, ReservationId, Target

T = TypeVar("T")

WAIT_MS_MAX = 600_000
"""Longest wait that one call may ask for."""


class Runs(Enum):
    """Where the daemon runs a call."""

    INLINE = "on the event loop: bookkeeping that takes microseconds"
    WORK = "in the pool for copies, encodes and disk I/O"
    WAIT = "in the pool for calls that mostly wait, so that they never keep work from a thread"
    ADMIN = "in the pool for operators' calls, which may take minutes and end with their caller"


class Served(Cache, Protocol):
    """The session of a caller, as the daemon's half of a row sees it: ``Cache``, and calls up to where they wait."""

    def count_mapped(self, keys: int) -> None:
        """This session's client has found so many keys by itself, in the index that it maps."""

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
        """``fetch`` up to where it would wait: the result, or what waits for it."""

    def begin_release(self, lease_id: LeaseId) -> int | Callable[[], int]:
        """``release`` of a whole lease up to where it takes long: the result, or what does the rest and returns it."""

    def flush_report(self, timeout_ms: int = ..., stop: Callable[[], bool] = ...) -> Any:
        """``flush``, saying blocks and bytes."""

    def opened(self, namespace_id: NamespaceId) -> Any:
        """Policy and layout of a namespace that it has opened."""


class Asked(Protocol):
    """One call, as the daemon's half of a row sees it."""

    @property
    def session(self) -> Served:
        """The caller's session. Raises Unauthenticated without one."""

    @property
    def gone(self) -> threading.Event:
        """Set when nobody waits for the answer any more."""

    @property
    def boot_id(self) -> bytes:
        """Which process of the daemon this is."""


@dataclass(frozen=True, slots=True)
class KnownNamespace:
    """What is needed to open a namespace again after a restart of the daemon."""

    spec: NamespaceSpec
    name: str
    policy: NamespacePolicy | None
    layout: BlockLayout
    slot_bytes: int = 0
    """Bytes that hold any payload of it."""
    write_codings: tuple[int, ...] = ()
    """Numbers of the codings that the daemon takes in Write streams of this namespace."""
    number: int | None = None
    """Of one that the daemon has opened: what it is in the index, as a client maps it; there its id says whether it
    still is."""


class Ids(Protocol):
    """What a client knows, as its half of a row sees it: ids go out in the daemon's form, and come back in the
    caller's, which carries the generation of the connection."""

    def lease(self, lease_id: LeaseId) -> int:
        """The daemon's form. Raises UnknownLease for another connection's."""

    def job(self, job_id: JobId) -> int:
        """The daemon's form. Raises UnknownJob for another connection's."""

    def plan(self, plan_id: PlanId) -> int:
        """The daemon's form. Raises UnknownPlan for another connection's."""

    def reservations(self, ids: Iterable[ReservationId]) -> list[int]:
        """The daemon's form. Raises UnknownReservation if any is another connection's."""

    def present_reservations(self, ids: Sequence[ReservationId]) -> list[int]:
        """The daemon's form of those that are of the present connection."""

    def outward(self, wire_id: int, generation: int) -> int:
        """The caller's form; 0 stays 0."""

    def job_began(self, job_id: JobId, result: FetchResult) -> None:
        """A call was answered PENDING under this job."""

    def lose_job(self, job_id: JobId) -> int:
        """Forget a job that can not end any more; returns how many keys it had."""

    def take_mapped(self) -> int:
        """Keys that were found in the mapped index and not told of yet; they are told now."""

    def remember(self, namespace_id: NamespaceId, known: KnownNamespace) -> None:
        """Keep what opens a namespace again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One unary call, as the daemon sees it."""

    name: str
    """Full name: "kvstore.v1.Cache/Match"."""
    request: type[Message]
    reply: type[Message]
    serve: Callable[[Any, Any], Message | Callable[[], Message]]
    """Call and request to reply: unpacks, asks the session, packs. On the loop it may answer what waits for the reply
    instead, which is then called where ``waits`` says."""
    runs: Runs = Runs.INLINE
    waits: Runs = Runs.WAIT
    admin: bool = False
    session: bool = True

    @property
    def service(self) -> str:
        """Full name of the service."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb(Method, Generic[T]):
    """One data call, as both ends see it. ``T`` is what the client's method returns."""

    pack: Callable[..., Message]
    """``Ids`` and arguments to request. Runs when a connection is there, since ids must belong to its session."""
    unpack: Callable[[Ids, tuple[Any, ...], Any, int], T]
    """``Ids``, arguments, reply, and generation of the connection that it came over, to result."""
    fallback: Callable[..., T]
    """``Ids`` and arguments to the answer of an empty, full cache: all MISS, all BUSY, nothing held."""
    undo: Callable[[T], tuple[Verb[Any], tuple[Any, ...]] | None] | None = None
    """What gives back what the daemon did, if its reply comes after the caller has gone: a verb and its arguments."""
    again: bool = False
    """Whether it may be sent again after a lost connection."""
    wait: int | None = None
    """Which argument is the time in ms that the caller asks the daemon to wait, if one is."""
