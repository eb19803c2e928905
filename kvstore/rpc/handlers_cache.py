"""Handlers of the cache service: message in, store call, message out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.cache import CommitEntry, CommitResult, FetchResult
from kvstore.core.errors import InvalidArgument, NamespaceMismatch
from kvstore.core.types import (
    BATCH_KEYS_MAX,
    BlockKey,
    Durability,
    JobId,
    LeaseId,
    NamespaceId,
    ReservationId,
    Target,
    Tier,
)
from kvstore.rpc.context import CallContext
from kvstore.rpc.handlers_lease import lease_of, name_of
from kvstore.v1 import cache_pb2
from kvstore.wire import messages as convert
from kvstore.wire.chunks import codings_of

WAIT_MS_MAX = 600_000
"""Longest wait that one call may ask for."""


def open_namespace(ctx: CallContext, request: cache_pb2.OpenNamespaceRequest) -> cache_pb2.OpenNamespaceResponse:
    """Cache/OpenNamespace."""
    if not request.HasField("spec"):
        raise InvalidArgument("spec", "unset", "a NamespaceSpec")
    spec = convert.spec_of(request.spec)
    if request.expected_id and request.expected_id != spec.namespace_id:
        _refuse_expected(ctx, request.expected_id, spec.namespace_id)
    policy = convert.policy_of(request.policy) if request.HasField("policy") else None
    opened = ctx.session.open_namespace(spec, name=name_of("name", request.name), policy=policy)
    return cache_pb2.OpenNamespaceResponse(
        namespace_id=opened.namespace_id,
        layout=convert.layout_message(opened.layout),
        created=opened.created,
        near=convert.near_messages(opened.near),
        boot_id=ctx.store.boot_id,
        write_codings=codings_of(ctx.session.opened(opened.namespace_id).policy),  # type: ignore[arg-type]
    )


def _refuse_expected(ctx: CallContext, expected: bytes, actual: NamespaceId) -> None:
    convert.namespace_of(expected, "expected_id")
    raise NamespaceMismatch(
        f"expected_id is {expected.hex()[:16]}; the spec's id is {actual.hex()[:16]}",
        field="expected_id",
        value=expected.hex(),
        expected=actual.hex(),
    )


def match(ctx: CallContext, request: cache_pb2.MatchRequest) -> cache_pb2.MatchResponse:
    """Cache/Match."""
    namespace, keys = _target(request.namespace_id, request.keys)
    result = ctx.session.match(namespace, keys)
    return cache_pb2.MatchResponse(
        matched=result.matched,
        residency=result.residency,
        reason=int(result.reason),  # type: ignore[arg-type]
        near=convert.near_messages(result.near),
    )


def reserve(ctx: CallContext, request: cache_pb2.ReserveRequest) -> cache_pb2.ReserveResponse:
    """Cache/Reserve."""
    namespace = convert.namespace_of(request.namespace_id)
    tier = _arena_tier(request.tier)
    if bool(request.keys) == bool(request.count):
        held = f"{request.count} with {len(request.keys)} bytes of keys"
        raise InvalidArgument("count", held, "either keys, or a count of anonymous places")
    if request.count > BATCH_KEYS_MAX:
        raise InvalidArgument("count", request.count, f"at most {BATCH_KEYS_MAX}")
    keys = convert.keys_of(request.keys, empty=True)
    durability = convert.enum_of("durability", request.durability, Durability) if request.durability else None
    result = ctx.session.reserve(
        namespace,
        tier,
        keys=keys,
        count=request.count,
        durability=durability,
        standing=request.standing,
    )
    reply = cache_pb2.ReserveResponse(standing=result.standing)
    reply.outcomes.extend(result.outcomes)  # type: ignore[arg-type]
    reply.reservation_ids.extend(result.reservation_ids)
    convert.fill_places(reply.places, result.places)
    convert.fill_busy(reply, result.busy)
    return reply


def commit(ctx: CallContext, request: cache_pb2.CommitRequest) -> cache_pb2.CommitResponse:
    """Cache/Commit."""
    namespace, keys = _target(request.namespace_id, request.keys)
    parents = convert.parents_of_entries(request.parents, len(keys))
    ids = [ReservationId(number) for number in request.reservation_ids]
    if len(ids) != len(keys):
        raise InvalidArgument("reservation_ids", f"{len(ids)} ids", f"{len(keys)} ids, one for each of keys")
    if len(set(ids)) != len(ids):
        raise InvalidArgument("reservation_ids", "one id twice", "different ids")
    durability = convert.enum_of("durability", request.durability, Durability) if request.durability else None
    result = ctx.session.commit(
        namespace,
        [CommitEntry(*entry) for entry in zip(ids, keys, parents, strict=True)],
        token_ids=request.token_ids,
        durability=durability,
        lease_id=LeaseId(request.lease_id) if request.lease_id else None,
    )
    return commit_message(result)


def commit_message(result: CommitResult) -> cache_pb2.CommitResponse:
    """Message of a commit's result."""
    reply = cache_pb2.CommitResponse()
    reply.outcomes.extend(result.outcomes)  # type: ignore[arg-type]
    reply.reasons.extend(result.reasons)  # type: ignore[arg-type]
    reply.existed.extend(map(int, result.existed))
    convert.fill_places(reply.places, result.places)
    convert.fill_busy(reply, result.busy)
    return reply


def abort(ctx: CallContext, request: cache_pb2.AbortRequest) -> cache_pb2.AbortResponse:
    """Cache/Abort."""
    ids = [ReservationId(number) for number in request.reservation_ids]
    if not 1 <= len(ids) <= BATCH_KEYS_MAX:
        raise InvalidArgument("reservation_ids", f"{len(ids)} ids", f"1 to {BATCH_KEYS_MAX} ids")
    aborted = ctx.session.abort(ids)
    return cache_pb2.AbortResponse(aborted=aborted, unknown=len(ids) - aborted)


def fetch(
    ctx: CallContext, request: cache_pb2.FetchRequest
) -> cache_pb2.FetchResponse | Callable[[], cache_pb2.FetchResponse]:
    """Cache/Fetch. What waits, if bytes have to move first and the caller wants to wait for them."""
    namespace, keys = _target(request.namespace_id, request.keys)
    begun = ctx.session.begin_fetch(
        namespace,
        keys,
        convert.enum_of("target", request.target, Target),
        lease_id=lease_of(request.lease_id),
        layers=convert.layers_of(request.layer_begin, request.layer_end),
        wait_ms=_wait("wait_ms", request.wait_ms),
    )
    if isinstance(begun, FetchResult):
        return fetch_message(begun)
    return lambda: fetch_message(begun())


def fetch_message(result: FetchResult) -> cache_pb2.FetchResponse:
    """Message of the result of a fetch, a prefetch or a job."""
    reply = cache_pb2.FetchResponse(job_id=result.job_id)
    reply.outcomes.extend(result.outcomes)  # type: ignore[arg-type]
    reply.reasons.extend(result.reasons)  # type: ignore[arg-type]
    convert.fill_places(reply.places, result.places)
    convert.fill_busy(reply, result.busy)
    return reply


def wait_job(ctx: CallContext, request: cache_pb2.WaitJobRequest) -> cache_pb2.FetchResponse:
    """Cache/WaitJob."""
    timeout_ms = _wait("timeout_ms", request.timeout_ms)
    return fetch_message(ctx.session.wait_job(JobId(request.job_id), timeout_ms))


def prefetch(ctx: CallContext, request: cache_pb2.PrefetchRequest) -> cache_pb2.FetchResponse:
    """Cache/Prefetch."""
    namespace, keys = _target(request.namespace_id, request.keys)
    return fetch_message(ctx.session.prefetch(namespace, keys, _arena_tier(request.tier)))


def remove(ctx: CallContext, request: cache_pb2.RemoveRequest) -> cache_pb2.RemoveResponse:
    """Cache/Remove."""
    namespace, keys = _target(request.namespace_id, request.keys)
    return cache_pb2.RemoveResponse(outcomes=ctx.session.remove(namespace, keys))  # type: ignore[arg-type]


def flush(ctx: CallContext, request: cache_pb2.FlushRequest) -> cache_pb2.FlushResponse:
    """Cache/Flush."""
    timeout_ms = _wait("timeout_ms", request.timeout_ms) or 30_000
    report = ctx.session.flush_report(timeout_ms, ctx.gone.is_set)
    return cache_pb2.FlushResponse(blocks=report.blocks, bytes=report.bytes)


def _target(namespace_id: bytes, keys: bytes) -> tuple[NamespaceId, Sequence[BlockKey]]:
    return convert.namespace_of(namespace_id), convert.keys_of(keys, empty=True)


def _arena_tier(number: int) -> Tier:
    tier = convert.enum_of("tier", number, Tier)
    if tier is Tier.SSD:
        raise InvalidArgument("tier", f"{number} (SSD)", "TIER_DEVICE or TIER_HOST")
    return tier


def _wait(field: str, value: int) -> int:
    if value > WAIT_MS_MAX:
        raise InvalidArgument(field, value, f"at most {WAIT_MS_MAX} ms")
    return value
