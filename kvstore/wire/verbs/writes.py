"""Rows of the calls that bring blocks and take them away: OpenNamespace, Reserve, Commit, Abort, Remove, Flush."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from kvstore.cache import CommitEntry, CommitResult, OpenedNamespace, ReserveResult
from kvstore.core.errors import InvalidArgument, NamespaceMismatch
from kvstore.core.types import (
    BATCH_KEYS_MAX,
    BlockKey,
    Busy,
    Durability,
    LeaseId,
    NamespaceId,
    Outcome,
    Reason,
    ReservationId,
    Tier,
)  # fmt: skip
from kvstore.v1 import cache_pb2
from kvstore.wire import messages
from kvstore.wire.chunks import codings_of
from kvstore.wire.verbs.base import Asked, Ids, KnownNamespace, Runs, Verb
from kvstore.wire.verbs.checks import arena_tier, different, name_of, wait_of

FLUSH_MS: Final = 30_000
"""How long a flush that names no time may take."""

INLINE_THINGS_MAX: Final = 256
"""Most reservations that are made or given back on the daemon's loop; more of them take long, though a request that
asks for them is short."""

# ---------------------------------------------------------------- OpenNamespace


def _pack_open(_ids: Ids, known: KnownNamespace) -> cache_pb2.OpenNamespaceRequest:
    return cache_pb2.OpenNamespaceRequest(
        spec=messages.spec_message(known.spec),
        name=known.name,
        policy=None if known.policy is None else messages.policy_message(known.policy),
        expected_id=known.spec.namespace_id,
    )


def _open(call: Asked, request: cache_pb2.OpenNamespaceRequest) -> cache_pb2.OpenNamespaceResponse:
    if not request.HasField("spec"):
        raise InvalidArgument("spec", "unset", "a NamespaceSpec")
    spec, expected, session = messages.spec_of(request.spec), request.expected_id, call.session
    if expected and expected != spec.namespace_id:
        messages.namespace_of(expected, "expected_id")
        raise NamespaceMismatch(
            f"expected_id is {expected.hex()[:16]}; the spec's id is {spec.namespace_id.hex()[:16]}",
            field="expected_id",
            value=expected.hex(),
            expected=spec.namespace_id.hex(),
        )
    policy = messages.policy_of(request.policy) if request.HasField("policy") else None
    opened = session.open_namespace(spec, name=name_of("name", request.name), policy=policy)
    namespace = session.opened(opened.namespace_id)
    return cache_pb2.OpenNamespaceResponse(
        namespace_id=opened.namespace_id,
        layout=messages.layout_message(opened.layout),
        created=opened.created,
        near=messages.near_messages(opened.near),
        boot_id=call.boot_id,
        write_codings=codings_of(namespace.policy),  # type: ignore[arg-type]
        storage_bytes=opened.storage_bytes,
        number=namespace.number,
    )


def _opened(
    ids: Ids, arguments: tuple[Any, ...], reply: cache_pb2.OpenNamespaceResponse, _generation: int
) -> OpenedNamespace:
    known: KnownNamespace = arguments[0]
    ids.remember(known.spec.namespace_id, replace(known, write_codings=tuple(reply.write_codings), number=reply.number))
    near = messages.near_of(reply.near)
    return OpenedNamespace(NamespaceId(reply.namespace_id), known.layout, reply.created, near, reply.storage_bytes)


def _not_opened(ids: Ids, known: KnownNamespace) -> OpenedNamespace:
    # Id and layout follow from the spec; it is opened when the daemon is back.
    ids.remember(known.spec.namespace_id, known)
    return OpenedNamespace(known.spec.namespace_id, known.layout, False)


OPEN_NAMESPACE: Final = Verb(
    name="kvstore.v1.Cache/OpenNamespace",
    request=cache_pb2.OpenNamespaceRequest,
    reply=cache_pb2.OpenNamespaceResponse,
    serve=_open,
    runs=Runs.WORK,
    pack=_pack_open,
    unpack=_opened,
    fallback=_not_opened,
    again=True,
)

# ---------------------------------------------------------------- Reserve


def _pack_reserve(  # noqa: PLR0913, PLR0917  the arguments of Cache.reserve
    _ids: Ids,
    namespace_id: NamespaceId,
    tier: Tier,
    keys: Sequence[BlockKey],
    count: int,
    durability: Durability | None,
    standing: bool,
    whole: bool = False,
) -> cache_pb2.ReserveRequest:
    return cache_pb2.ReserveRequest(
        namespace_id=namespace_id,
        tier=int(tier),  # type: ignore[arg-type]
        keys=b"".join(keys),
        count=count,
        durability=0 if durability is None else int(durability),  # type: ignore[arg-type]
        standing=standing,
        whole=whole,
    )


def _reserve(
    call: Asked, request: cache_pb2.ReserveRequest
) -> cache_pb2.ReserveResponse | Callable[[], cache_pb2.ReserveResponse]:
    tier, count, packed = arena_tier(request.tier), request.count, request.keys
    namespace, keys = messages.target_of(request.namespace_id, packed)
    if bool(packed) == bool(count):
        held = f"{count} with {len(packed)} bytes of keys"
        raise InvalidArgument("count", held, "either keys, or a count of anonymous places")
    if count > BATCH_KEYS_MAX:
        raise InvalidArgument("count", count, f"at most {BATCH_KEYS_MAX}")
    durability = messages.enum_of("durability", request.durability, Durability) if request.durability else None

    def serve() -> cache_pb2.ReserveResponse:
        standing, whole = request.standing, request.whole
        return _reservations(
            call.session.reserve(
                namespace, tier, keys=keys, count=count, durability=durability, standing=standing, whole=whole
            )
        )

    return serve if max(count, len(keys)) > INLINE_THINGS_MAX else serve()


def _reservations(result: ReserveResult) -> cache_pb2.ReserveResponse:
    reply = cache_pb2.ReserveResponse(
        standing=result.standing,
        outcomes=result.outcomes,  # type: ignore[arg-type]
        reservation_ids=result.reservation_ids,
    )
    messages.fill_places(reply.places, result.places)
    if result.busy is not None:
        messages.fill_busy(reply, result.busy)
    return reply


def _reserved(
    ids: Ids, _arguments: tuple[Any, ...], reply: cache_pb2.ReserveResponse, generation: int
) -> ReserveResult:
    outcomes = messages.members(messages.OUTCOMES, reply.outcomes[:])
    return ReserveResult(
        outcomes,
        tuple([ReservationId(ids.outward(number, generation)) for number in reply.reservation_ids]),
        messages.places_of(reply.places, len(outcomes)),
        messages.busy_of(reply),
        reply.standing,
    )


def _full(
    _ids: Ids,
    _namespace_id: NamespaceId,
    tier: Tier,
    keys: Sequence[BlockKey],
    count: int,
    *_more: Any,
) -> ReserveResult:
    size = len(keys) or max(count, 0)
    return ReserveResult(
        (Outcome.BUSY,) * size,
        (ReservationId(0),) * size,
        (None,) * size,
        Busy(tier, 0, 0, 0, Reason.TIER_UNAVAILABLE),
    )


def _abort_of(reserved: ReserveResult) -> tuple[Verb[Any], tuple[Any, ...]] | None:
    made = [number for number in reserved.reservation_ids if number]
    return (ABORT, (made,)) if made else None


RESERVE: Final = Verb(
    name="kvstore.v1.Cache/Reserve",
    request=cache_pb2.ReserveRequest,
    reply=cache_pb2.ReserveResponse,
    serve=_reserve,
    waits=Runs.WORK,
    pack=_pack_reserve,
    unpack=_reserved,
    fallback=_full,
    undo=_abort_of,
)

# ---------------------------------------------------------------- Commit


_RESERVATION: Final[Callable[[CommitEntry], ReservationId]] = attrgetter("reservation_id")
_KEY: Final[Callable[[CommitEntry], BlockKey]] = attrgetter("key")
_PARENT: Final[Callable[[CommitEntry], BlockKey]] = attrgetter("parent")


def _pack_commit(
    ids: Ids,
    namespace_id: NamespaceId,
    entries: Sequence[CommitEntry],
    token_ids: Sequence[int],
    durability: Durability | None,
    lease_id: LeaseId | None,
) -> cache_pb2.CommitRequest:
    return cache_pb2.CommitRequest(
        namespace_id=namespace_id,
        reservation_ids=ids.reservations(map(_RESERVATION, entries)),
        keys=b"".join(map(_KEY, entries)),
        parents=b"".join(map(_PARENT, entries)),
        token_ids=token_ids,
        durability=int(durability or 0),  # type: ignore[arg-type]
        lease_id=0 if lease_id is None else ids.lease(lease_id),
    )


def _commit(call: Asked, request: cache_pb2.CommitRequest) -> cache_pb2.CommitResponse:
    namespace, keys = messages.target_of(request.namespace_id, request.keys)
    parents = messages.parents_of_entries(request.parents, len(keys))
    ids = request.reservation_ids
    if len(ids) != len(keys):
        raise InvalidArgument("reservation_ids", f"{len(ids)} ids", f"{len(keys)} ids, one for each of keys")
    if len(ids) > 1:
        different("reservation_ids", ids)
    durability = messages.enum_of("durability", request.durability, Durability) if request.durability else None
    result = call.session.commit(
        namespace,
        list(map(CommitEntry, map(ReservationId, ids), keys, parents)),
        token_ids=request.token_ids,
        durability=durability,
        lease_id=LeaseId(request.lease_id) if request.lease_id else None,
    )
    return commit_message(result)


def commit_message(result: CommitResult) -> cache_pb2.CommitResponse:
    """Message of a commit's result."""
    reply = cache_pb2.CommitResponse(
        outcomes=result.outcomes,  # type: ignore[arg-type]
        reasons=result.reasons,  # type: ignore[arg-type]
        existed=map(int, result.existed),
    )
    if result.places:
        messages.fill_places(reply.places, result.places)
    if result.busy is not None:
        messages.fill_busy(reply, result.busy)
    return reply


def commit_result(_ids: Ids, _arguments: object, reply: cache_pb2.CommitResponse, _generation: int) -> CommitResult:
    """Result of a Commit or Write reply."""
    outcomes = messages.members(messages.OUTCOMES, reply.outcomes[:])
    return CommitResult(
        outcomes,
        messages.members(messages.REASONS, reply.reasons[:]),
        tuple(map(bool, reply.existed)),
        messages.places_of(reply.places, len(outcomes)) if reply.HasField("places") else (None,) * len(outcomes),
        messages.busy_of(reply) if reply.HasField("busy") else None,
    )


def _dropped(_ids: Ids, _namespace_id: NamespaceId, entries: Sequence[CommitEntry], *_more: Any) -> CommitResult:
    size = len(entries)
    return CommitResult((Outcome.MISS,) * size, (Reason.DROPPED,) * size, (False,) * size, (None,) * size)


COMMIT: Final = Verb(
    name="kvstore.v1.Cache/Commit",
    request=cache_pb2.CommitRequest,
    reply=cache_pb2.CommitResponse,
    serve=_commit,
    runs=Runs.WORK,
    pack=_pack_commit,
    unpack=commit_result,
    fallback=_dropped,
)

# ---------------------------------------------------------------- Abort, Remove, Flush


def _abort(
    call: Asked, request: cache_pb2.AbortRequest
) -> cache_pb2.AbortResponse | Callable[[], cache_pb2.AbortResponse]:
    ids = [ReservationId(number) for number in request.reservation_ids]
    if not 1 <= len(ids) <= BATCH_KEYS_MAX:
        raise InvalidArgument("reservation_ids", f"{len(ids)} ids", f"1 to {BATCH_KEYS_MAX} ids")

    def serve() -> cache_pb2.AbortResponse:
        aborted = call.session.abort(ids)
        return cache_pb2.AbortResponse(aborted=aborted, unknown=len(ids) - aborted)

    return serve if len(ids) > INLINE_THINGS_MAX else serve()


ABORT: Final = Verb(
    name="kvstore.v1.Cache/Abort",
    request=cache_pb2.AbortRequest,
    reply=cache_pb2.AbortResponse,
    serve=_abort,
    waits=Runs.WORK,
    # Reservations of earlier connections are gone already and are not sent.
    pack=lambda ids, reservations: cache_pb2.AbortRequest(reservation_ids=ids.present_reservations(reservations)),
    unpack=lambda _ids, _arguments, reply, _generation: int(reply.aborted),
    fallback=lambda _ids, _reservations: 0,
)


def _remove(call: Asked, request: cache_pb2.RemoveRequest) -> cache_pb2.RemoveResponse:
    namespace, keys = messages.target_of(request.namespace_id, request.keys)
    return cache_pb2.RemoveResponse(outcomes=call.session.remove(namespace, keys))  # type: ignore[arg-type]


REMOVE: Final = Verb(
    name="kvstore.v1.Cache/Remove",
    request=cache_pb2.RemoveRequest,
    reply=cache_pb2.RemoveResponse,
    serve=_remove,
    # Copies on SSD are dropped with the tier's own lock, which its writers hold for longer than a turn of the loop.
    runs=Runs.WORK,
    pack=lambda _ids, namespace_id, keys: cache_pb2.RemoveRequest(namespace_id=namespace_id, keys=b"".join(keys)),
    unpack=lambda _ids, _arguments, reply, _generation: messages.members(messages.OUTCOMES, reply.outcomes[:]),
    fallback=lambda _ids, _namespace_id, keys: (Outcome.BUSY,) * len(keys),
)


def _flush(call: Asked, request: cache_pb2.FlushRequest) -> cache_pb2.FlushResponse:
    timeout_ms = wait_of("timeout_ms", request.timeout_ms) or FLUSH_MS
    report = call.session.flush_report(timeout_ms, call.gone.is_set)
    return cache_pb2.FlushResponse(blocks=report.blocks, bytes=report.bytes)


FLUSH: Final = Verb(
    name="kvstore.v1.Cache/Flush",
    request=cache_pb2.FlushRequest,
    reply=cache_pb2.FlushResponse,
    serve=_flush,
    runs=Runs.WAIT,
    pack=lambda _ids, timeout_ms: cache_pb2.FlushRequest(timeout_ms=timeout_ms),
    unpack=lambda _ids, _arguments, reply, _generation: int(reply.blocks),
    fallback=lambda _ids, _timeout_ms: 0,
    wait=0,
)

VERBS: Final[tuple[Verb[Any], ...]] = (OPEN_NAMESPACE, RESERVE, COMMIT, ABORT, REMOVE, FLUSH)
