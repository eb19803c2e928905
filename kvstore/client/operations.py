"""Every data call as a value: what to send, how to read the reply, and the answer if the cache fails.

Sans-I/O: ``Client`` and ``AsyncClient`` differ only in how they carry an ``Operation`` to the daemon. What a call is
stands in its row of ``kvstore.wire.verbs``; here a row and arguments become an ``Operation``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvstore.cache import (
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
from kvstore.client.payloads import slot_bytes
from kvstore.client.state import ClientState
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    BlockKey,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    PlanId,
    ReservationId,
    Target,
    Tier,
)  # fmt: skip
from kvstore.wire.verbs import Verb, leases, plans, reads, writes
from kvstore.wire.verbs.base import WAIT_MS_MAX, KnownNamespace
from kvstore.wire.verbs.reads import missed
from kvstore.wire.verbs.writes import commit_result

__all__ = ["Operation", "Operations", "check_wait", "commit_result", "missed", "request_of"]

T = TypeVar("T")


class Operation(Generic[T]):
    """One call: a row of the table of verbs, and its arguments."""

    __slots__ = ("build", "fallback", "method", "parse", "pure", "reply", "undo", "wait_ms")

    parse: Callable[[Any, int], T]
    fallback: Callable[[], T]
    undo: Callable[[Any, int], Operation[Any] | None] | None

    def __init__(self, verb: Verb[T], state: ClientState, *arguments: Any) -> None:
        self.method = verb.name
        self.build = partial(verb.pack, state, *arguments)
        """Makes the request. Runs when a connection is there, since ids must belong to its session."""
        self.reply = verb.reply
        self.parse = partial(verb.unpack, state, arguments)
        """Result of a reply and the generation of the connection that it came over."""
        self.fallback = partial(verb.fallback, state, *arguments)
        self.wait_ms: int = 0
        """Time that the daemon may take beyond the client's deadline for a call, because the caller asked for it."""
        if verb.wait is not None:
            wait_ms = arguments[verb.wait]
            if not isinstance(wait_ms, int) or not 0 <= wait_ms <= WAIT_MS_MAX:
                check_wait("wait_ms" if "wait_ms" in verb.request.DESCRIPTOR.fields_by_name else "timeout_ms", wait_ms)
            self.wait_ms = wait_ms
        self.pure = verb.again
        """May be sent again after a lost connection."""
        self.undo = None if verb.undo is None else partial(_undo, verb, state, arguments)
        """What gives back what the daemon did, from a reply (and its generation) that came after its caller had gone;
        None if it did nothing."""


def _undo(
    verb: Verb[Any], state: ClientState, arguments: tuple[Any, ...], reply: Any, generation: int
) -> Operation[Any] | None:
    found = verb.undo(verb.unpack(state, arguments, reply, generation)) if verb.undo is not None else None
    return None if found is None else Operation(found[0], state, *found[1])


class Operations:
    """Builds the operations of one client; ``of`` for any verb, the others with the types of theirs."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    def of(self, verb: Verb[T], *arguments: Any) -> Operation[T]:
        """A call of any verb, one that was registered at run time, too. Arguments as its row's ``pack`` takes them."""
        return Operation(verb, self._state, *arguments)

    def open_namespace(
        self, spec: NamespaceSpec, name: str, policy: NamespacePolicy | None
    ) -> Operation[OpenedNamespace]:
        """Cache/OpenNamespace."""
        layout = BlockLayout.of(spec)
        known = KnownNamespace(spec, name, policy, layout, slot_bytes(layout))
        return Operation(writes.OPEN_NAMESPACE, self._state, known)

    def reopen(self) -> Iterator[Operation[OpenedNamespace]]:
        """What opens each known namespace again on a new connection, perhaps to another release of the daemon."""
        for known in self._state.known_namespaces():
            yield self.open_namespace(known.spec, known.name, known.policy)

    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Operation[MatchResult]:
        """Cache/Match."""
        return Operation(reads.MATCH, self._state, namespace_id, keys)

    def reserve(
        self,
        namespace_id: NamespaceId,
        tier: Tier,
        keys: Sequence[BlockKey],
        count: int,
        durability: Durability | None = None,
        standing: bool = False,
    ) -> Operation[ReserveResult]:
        """Cache/Reserve."""
        return Operation(writes.RESERVE, self._state, namespace_id, tier, keys, count, durability, standing)

    def commit(
        self,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        token_ids: Sequence[int],
        durability: Durability | None,
        lease_id: LeaseId | None,
    ) -> Operation[CommitResult]:
        """Cache/Commit."""
        return Operation(writes.COMMIT, self._state, namespace_id, entries, token_ids, durability, lease_id)

    def abort(self, reservation_ids: Sequence[ReservationId]) -> Operation[int]:
        """Cache/Abort. Reservations of earlier connections are gone already and are not sent."""
        return Operation(writes.ABORT, self._state, reservation_ids)

    def fetch(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        target: Target,
        *,
        lease_id: LeaseId,
        layers: tuple[int, int] | None,
        wait_ms: int,
    ) -> Operation[FetchResult]:
        """Cache/Fetch."""
        return Operation(reads.FETCH, self._state, namespace_id, keys, target, lease_id, layers, wait_ms)

    def wait_job(self, job_id: JobId, timeout_ms: int) -> Operation[FetchResult]:
        """Cache/WaitJob; a lost job is answered with misses."""
        return Operation(reads.WAIT_JOB, self._state, job_id, timeout_ms)

    def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> Operation[FetchResult]:
        """Cache/Prefetch."""
        return Operation(reads.PREFETCH, self._state, namespace_id, keys, tier)

    def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Operation[tuple[Outcome, ...]]:
        """Cache/Remove."""
        return Operation(writes.REMOVE, self._state, namespace_id, keys)

    def flush(self, timeout_ms: int) -> Operation[int]:
        """Cache/Flush."""
        return Operation(writes.FLUSH, self._state, timeout_ms)

    def grant_lease(self, name: str, ttl_ms: int) -> Operation[LeaseId]:
        """Leases/GrantLease."""
        return Operation(leases.GRANT, self._state, name, ttl_ms)

    def renew_lease(self, lease_id: LeaseId) -> Operation[int]:
        """Leases/RenewLease."""
        return Operation(leases.RENEW, self._state, lease_id)

    def hold(
        self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]
    ) -> Operation[tuple[bool, ...]]:
        """Leases/HoldLease."""
        return Operation(leases.HOLD, self._state, lease_id, namespace_id, keys)

    def release(self, lease_id: LeaseId, namespace_id: NamespaceId | None, keys: Sequence[BlockKey]) -> Operation[int]:
        """Leases/ReleaseLease."""
        return Operation(leases.RELEASE, self._state, lease_id, namespace_id, keys)

    def open_plan(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        layers: tuple[int, int] | None,
        sizes: tuple[int, int],
        idle_ms: int,
    ) -> Operation[PlanOpened]:
        """Plans/OpenPlan; ``sizes`` is bytes of a piece, and pieces."""
        return Operation(plans.OPEN_PLAN, self._state, namespace_id, keys, layers, *sizes, idle_ms)

    def extend_plan(self, plan_id: PlanId, keys: Sequence[BlockKey]) -> Operation[PlanKeys]:
        """Plans/ExtendPlan."""
        return Operation(plans.EXTEND_PLAN, self._state, plan_id, keys)

    def advance_plan(
        self, plan_id: PlanId, layers: tuple[int, int] | None, blocks: Sequence[int] | None, drop: bool
    ) -> Operation[PlanPass]:
        """Plans/AdvancePlan."""
        return Operation(plans.ADVANCE_PLAN, self._state, plan_id, layers, blocks, drop)

    def close_plan(self, plan_id: PlanId) -> Operation[bool]:
        """Plans/ClosePlan."""
        return Operation(plans.CLOSE_PLAN, self._state, plan_id)


def check_wait(field: str, milliseconds: int) -> None:
    """InvalidArgument unless a call may be asked to wait that long."""
    if not isinstance(milliseconds, int) or not 0 <= milliseconds <= WAIT_MS_MAX:
        raise InvalidArgument(field, milliseconds, f"0 to {WAIT_MS_MAX}")


def request_of(operation: Operation[Any]) -> bytes:
    """The request as bytes. InvalidArgument where an argument is of a type or size that no message takes."""
    try:
        built: Message = operation.build()
        return built.SerializeToString()
    except (TypeError, ValueError, AttributeError) as error:
        name = operation.method.rpartition("/")[2]
        raise InvalidArgument(f"arguments of {name}", str(error)[:200], "values that its message takes") from error
