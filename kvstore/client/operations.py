"""Every data call as a value: what to send, how to read the reply, and the answer if the cache fails.

Sans-I/O: ``Client`` and ``AsyncClient`` differ only in how they carry an ``Operation`` to the daemon. A
fallback is the answer of an empty, full cache: all MISS, all BUSY, nothing held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from kvstore.cache import CommitEntry, CommitResult, FetchResult, MatchResult, OpenedNamespace, ReserveResult
from kvstore.client.payloads import slot_bytes
from kvstore.client.state import ClientState, KnownNamespace, outward
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import BlockLayout, NamespacePolicy, NamespaceSpec
from kvstore.core.types import (
    BlockKey,
    Busy,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    Outcome,
    Reason,
    ReservationId,
    Target,
    Tier,
)
from kvstore.v1 import cache_pb2, leases_pb2
from kvstore.wire import messages as convert

T = TypeVar("T")

WAIT_MS_MAX: Final = 600_000
"""Longest that a call may be asked to wait; the daemon refuses more."""


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One call. ``build`` runs when a connection is there, since ids must belong to its session."""

    method: str
    build: Callable[[], Message]
    reply: type[Message]
    parse: Callable[[Any, int], T]
    """Reply and generation of the connection that it came over."""
    fallback: Callable[[], T]
    wait_ms: int = 0
    """Time that the daemon may take beyond the client's deadline for a call, because the caller asked for a wait."""
    pure: bool = False
    """May be sent again after a lost connection."""
    undo: Callable[[Any, int], Operation[Any] | None] | None = None
    """What gives back what the daemon did, from a reply (and its generation) that came after its caller had gone."""


class Operations:
    """Builds the operations of one client."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    def open_namespace(
        self, spec: NamespaceSpec, name: str, policy: NamespacePolicy | None
    ) -> Operation[OpenedNamespace]:
        """Cache/OpenNamespace. The fallback computes id and layout here; it is opened when the daemon is back."""
        layout = BlockLayout.of(spec)
        known = KnownNamespace(spec, name, policy, layout, slot_bytes(layout))

        def parse(reply: cache_pb2.OpenNamespaceResponse, generation: int) -> OpenedNamespace:
            self._state.remember(spec.namespace_id, replace(known, write_codings=tuple(reply.write_codings)))
            return OpenedNamespace(
                NamespaceId(reply.namespace_id), known.layout, reply.created, convert.near_of(reply.near)
            )

        def fallback() -> OpenedNamespace:
            self._state.remember(spec.namespace_id, known)
            return OpenedNamespace(spec.namespace_id, known.layout, False)

        return Operation(
            "kvstore.v1.Cache/OpenNamespace",
            lambda: open_request(known),
            cache_pb2.OpenNamespaceResponse,
            parse,
            fallback,
            pure=True,
        )

    def reopen(self) -> Iterator[Operation[OpenedNamespace]]:
        """What opens each known namespace again on a new connection, perhaps to another release of the daemon."""
        for known in self._state.known_namespaces():
            yield self.open_namespace(known.spec, known.name, known.policy)

    def match(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Operation[MatchResult]:
        """Cache/Match; a failed cache matches nothing."""
        return Operation(
            "kvstore.v1.Cache/Match",
            lambda: cache_pb2.MatchRequest(namespace_id=namespace_id, keys=b"".join(keys)),
            cache_pb2.MatchResponse,
            lambda r, _: MatchResult(
                r.matched, tuple(r.residency), convert.REASONS[r.reason], convert.near_of(r.near) if r.near else ()
            ),
            lambda: MatchResult(0, (), Reason.TIER_UNAVAILABLE),
            pure=True,
        )

    def reserve(
        self,
        namespace_id: NamespaceId,
        tier: Tier,
        keys: Sequence[BlockKey],
        count: int,
        durability: Durability | None = None,
        standing: bool = False,
    ) -> Operation[ReserveResult]:
        """Cache/Reserve; a failed cache is full."""
        size = len(keys) or max(count, 0)

        def parse(reply: cache_pb2.ReserveResponse, generation: int) -> ReserveResult:
            return ReserveResult(
                convert.outcomes_of(reply.outcomes),
                tuple([ReservationId(outward(number, generation)) for number in reply.reservation_ids]),
                convert.places_of(reply.places, len(reply.outcomes)),
                convert.busy_of(reply),
                reply.standing,
            )

        return Operation(
            "kvstore.v1.Cache/Reserve",
            lambda: cache_pb2.ReserveRequest(
                namespace_id=namespace_id,
                tier=int(tier),  # type: ignore[arg-type]
                keys=b"".join(keys),
                count=count,
                durability=0 if durability is None else int(durability),  # type: ignore[arg-type]
                standing=standing,
            ),
            cache_pb2.ReserveResponse,
            parse,
            lambda: ReserveResult(
                (Outcome.BUSY,) * size,
                (ReservationId(0),) * size,
                (None,) * size,
                Busy(tier, 0, 0, 0, Reason.TIER_UNAVAILABLE),
            ),
            undo=lambda reply, generation: self._abort_of(parse(reply, generation)),
        )

    def _abort_of(self, reserved: ReserveResult) -> Operation[int] | None:
        made = [number for number in reserved.reservation_ids if number]
        return self.abort(made) if made else None

    def commit(
        self,
        namespace_id: NamespaceId,
        entries: Sequence[CommitEntry],
        token_ids: Sequence[int],
        durability: Durability | None,
        lease_id: LeaseId | None,
    ) -> Operation[CommitResult]:
        """Cache/Commit; a failed cache drops what was written."""
        size = len(entries)

        def build() -> Message:
            return cache_pb2.CommitRequest(
                namespace_id=namespace_id,
                reservation_ids=self._state.reservations([entry.reservation_id for entry in entries]),
                keys=b"".join([entry.key for entry in entries]),
                parents=b"".join([entry.parent for entry in entries]),
                token_ids=token_ids,
                durability=int(durability or 0),  # type: ignore[arg-type]
                lease_id=0 if lease_id is None else self._state.lease(lease_id),
            )

        return Operation(
            "kvstore.v1.Cache/Commit",
            build,
            cache_pb2.CommitResponse,
            commit_result,
            lambda: CommitResult((Outcome.MISS,) * size, (Reason.DROPPED,) * size, (False,) * size, (None,) * size),
        )

    def abort(self, reservation_ids: Sequence[ReservationId]) -> Operation[int]:
        """Cache/Abort. Reservations of earlier connections are gone already and are not sent."""
        return Operation(
            "kvstore.v1.Cache/Abort",
            lambda: cache_pb2.AbortRequest(reservation_ids=self._state.present_reservations(reservation_ids)),
            cache_pb2.AbortResponse,
            lambda r, _: int(r.aborted),
            lambda: 0,
        )

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
        """Cache/Fetch; a failed cache has nothing."""
        begin, end = layers or (0, 0)
        check_wait("wait_ms", wait_ms)

        def build() -> Message:
            return cache_pb2.FetchRequest(
                namespace_id=namespace_id,
                keys=b"".join(keys),
                target=int(target),  # type: ignore[arg-type]
                layer_begin=begin,
                layer_end=end,
                lease_id=self._state.lease(lease_id),
                wait_ms=wait_ms,
            )

        return Operation(
            "kvstore.v1.Cache/Fetch",
            build,
            cache_pb2.FetchResponse,
            self.fetch_result,
            lambda: missed(len(keys)),
            wait_ms=wait_ms,
        )

    def wait_job(self, job_id: JobId, timeout_ms: int) -> Operation[FetchResult]:
        """Cache/WaitJob; a lost job is answered with misses."""
        check_wait("timeout_ms", timeout_ms)
        return Operation(
            "kvstore.v1.Cache/WaitJob",
            lambda: cache_pb2.WaitJobRequest(job_id=self._state.job(job_id), timeout_ms=timeout_ms),
            cache_pb2.FetchResponse,
            self.fetch_result,
            lambda: missed(self._state.lose_job(job_id)),
            wait_ms=timeout_ms,
        )

    def prefetch(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], tier: Tier) -> Operation[FetchResult]:
        """Cache/Prefetch; a failed cache has nothing."""
        return Operation(
            "kvstore.v1.Cache/Prefetch",
            lambda: cache_pb2.PrefetchRequest(
                namespace_id=namespace_id,
                keys=b"".join(keys),
                tier=int(tier),  # type: ignore[arg-type]
            ),
            cache_pb2.FetchResponse,
            self.fetch_result,
            lambda: missed(len(keys)),
        )

    def remove(self, namespace_id: NamespaceId, keys: Sequence[BlockKey]) -> Operation[tuple[Outcome, ...]]:
        """Cache/Remove; a failed cache removes nothing and says BUSY."""
        return Operation(
            "kvstore.v1.Cache/Remove",
            lambda: cache_pb2.RemoveRequest(namespace_id=namespace_id, keys=b"".join(keys)),
            cache_pb2.RemoveResponse,
            lambda r, _: convert.outcomes_of(r.outcomes),
            lambda: (Outcome.BUSY,) * len(keys),
        )

    def flush(self, timeout_ms: int) -> Operation[int]:
        """Cache/Flush."""
        check_wait("timeout_ms", timeout_ms)
        return Operation(
            "kvstore.v1.Cache/Flush",
            lambda: cache_pb2.FlushRequest(timeout_ms=timeout_ms),
            cache_pb2.FlushResponse,
            lambda r, _: int(r.blocks),
            lambda: 0,
            wait_ms=timeout_ms,
        )

    def grant_lease(self, name: str, ttl_ms: int) -> Operation[LeaseId]:
        """Leases/GrantLease; lease 0 of a failed cache holds nothing, and what names it misses."""
        return Operation(
            "kvstore.v1.Leases/GrantLease",
            lambda: leases_pb2.GrantLeaseRequest(name=name, ttl_ms=ttl_ms),
            leases_pb2.GrantLeaseResponse,
            lambda r, generation: LeaseId(outward(r.lease_id, generation)),
            lambda: LeaseId(0),
            undo=lambda r, generation: self.release(LeaseId(outward(r.lease_id, generation)), None, ()),
        )

    def renew_lease(self, lease_id: LeaseId) -> Operation[int]:
        """Leases/RenewLease."""
        return Operation(
            "kvstore.v1.Leases/RenewLease",
            lambda: leases_pb2.RenewLeaseRequest(lease_id=self._state.lease(lease_id)),
            leases_pb2.RenewLeaseResponse,
            lambda r, _: int(r.ttl_ms),
            lambda: 0,
        )

    def hold(
        self, lease_id: LeaseId, namespace_id: NamespaceId, keys: Sequence[BlockKey]
    ) -> Operation[tuple[bool, ...]]:
        """Leases/HoldLease; a failed cache holds nothing."""
        return Operation(
            "kvstore.v1.Leases/HoldLease",
            lambda: leases_pb2.HoldLeaseRequest(
                lease_id=self._state.lease(lease_id), namespace_id=namespace_id, keys=b"".join(keys)
            ),
            leases_pb2.HoldLeaseResponse,
            lambda r, _: tuple([bool(held) for held in r.held]),
            lambda: (False,) * len(keys),
        )

    def release(self, lease_id: LeaseId, namespace_id: NamespaceId | None, keys: Sequence[BlockKey]) -> Operation[int]:
        """Leases/ReleaseLease."""
        return Operation(
            "kvstore.v1.Leases/ReleaseLease",
            lambda: leases_pb2.ReleaseLeaseRequest(
                lease_id=self._state.lease(lease_id), namespace_id=namespace_id or b"", keys=b"".join(keys)
            ),
            leases_pb2.ReleaseLeaseResponse,
            lambda r, _: int(r.released),
            lambda: 0,
        )

    def fetch_result(self, reply: cache_pb2.FetchResponse, generation: int) -> FetchResult:
        """Result of a Fetch, Prefetch or WaitJob reply; a job that is under way is remembered."""
        result = fetch_result(reply, generation)
        if result.job_id and Outcome.PENDING in result.outcomes:
            self._state.job_began(result.job_id, result)
        return result


def fetch_result(reply: cache_pb2.FetchResponse, generation: int) -> FetchResult:
    """Result of a reply or of a JobDone."""
    outcomes = convert.outcomes_of(reply.outcomes)
    job = reply.job_id
    return FetchResult(
        outcomes,
        convert.reasons_of(reply.reasons),
        convert.places_of(reply.places, len(outcomes)),
        JobId(outward(job, generation) if job else 0),
        convert.busy_of(reply) if reply.HasField("busy") else None,
    )


def open_request(known: KnownNamespace) -> cache_pb2.OpenNamespaceRequest:
    """The request that opens a namespace, now or again."""
    return cache_pb2.OpenNamespaceRequest(
        spec=convert.spec_message(known.spec),
        name=known.name,
        policy=None if known.policy is None else convert.policy_message(known.policy),
        expected_id=known.spec.namespace_id,
    )


def commit_result(reply: cache_pb2.CommitResponse, _generation: int = 0) -> CommitResult:
    """Result of a Commit or Write reply."""
    return CommitResult(
        convert.outcomes_of(reply.outcomes),
        convert.reasons_of(reply.reasons),
        tuple([bool(existed) for existed in reply.existed]),
        convert.places_of(reply.places, len(reply.outcomes)),
        convert.busy_of(reply),
    )


def missed(count: int) -> FetchResult:
    """The answer of a cache that has nothing: ``count`` misses."""
    return FetchResult((Outcome.MISS,) * count, (Reason.TIER_UNAVAILABLE,) * count, (None,) * count)


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
