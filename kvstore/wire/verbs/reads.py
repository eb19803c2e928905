"""Rows of the calls that find blocks and make them readable: Match, Fetch, WaitJob, Prefetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvstore.cache import FetchResult, MatchResult
from kvstore.core.types import BlockKey, JobId, LeaseId, NamespaceId, Outcome, Reason, Target
from kvstore.v1 import cache_pb2
from kvstore.wire import messages
from kvstore.wire.verbs.base import WAIT_MS_MAX, Asked, Ids, Verb
from kvstore.wire.verbs.checks import arena_tier, lease_of, wait_of

# ---------------------------------------------------------------- Match


def _match(call: Asked, request: cache_pb2.MatchRequest) -> cache_pb2.MatchResponse:
    namespace, keys = messages.target_of(request.namespace_id, request.keys)
    result = call.session.match(namespace, keys)
    if request.mapped:
        call.session.count_mapped(request.mapped)
    near = result.near
    return cache_pb2.MatchResponse(
        matched=result.matched,
        residency=result.residency,
        reason=result.reason,  # type: ignore[arg-type]
        near=messages.near_messages(near) if near else None,
    )


def _matched(_ids: Ids, _arguments: tuple[Any, ...], reply: cache_pb2.MatchResponse, _generation: int) -> MatchResult:
    near = reply.near
    return MatchResult(
        reply.matched, tuple(reply.residency), messages.REASONS[reply.reason], messages.near_of(near) if near else ()
    )


MATCH: Final = Verb(
    name="kvstore.v1.Cache/Match",
    request=cache_pb2.MatchRequest,
    reply=cache_pb2.MatchResponse,
    serve=_match,
    pack=lambda ids, namespace_id, keys: cache_pb2.MatchRequest(
        namespace_id=namespace_id, keys=b"".join(keys), mapped=ids.take_mapped()
    ),
    unpack=_matched,
    fallback=lambda _ids, _namespace_id, _keys: MatchResult(0, (), Reason.TIER_UNAVAILABLE),
    again=True,
)

# ---------------------------------------------------------------- Fetch, WaitJob, Prefetch


def fetch_message(result: FetchResult) -> cache_pb2.FetchResponse:
    """Message of the result of a fetch, a prefetch or a job."""
    reply = cache_pb2.FetchResponse(
        job_id=result.job_id,
        outcomes=result.outcomes,  # type: ignore[arg-type]
        reasons=result.reasons,  # type: ignore[arg-type]
    )
    messages.fill_places(reply.places, result.places)
    if result.busy is not None:
        messages.fill_busy(reply, result.busy)
    return reply


def fetch_result(ids: Ids, _arguments: object, reply: cache_pb2.FetchResponse, generation: int) -> FetchResult:
    """Result of a reply or of a JobDone. One that is still under way is a job of the client's from now on."""
    outcomes, job = messages.members(messages.OUTCOMES, reply.outcomes[:]), reply.job_id
    result = FetchResult(
        outcomes,
        messages.members(messages.REASONS, reply.reasons[:]),
        messages.places_of(reply.places, len(outcomes)),
        JobId(ids.outward(job, generation) if job else 0),
        messages.busy_of(reply) if reply.HasField("busy") else None,
    )
    if job and Outcome.PENDING in outcomes:
        ids.job_began(result.job_id, result)
    return result


def missed(count: int) -> FetchResult:
    """The answer of a cache that has nothing: ``count`` misses."""
    return FetchResult((Outcome.MISS,) * count, (Reason.TIER_UNAVAILABLE,) * count, (None,) * count)


def _told(wait: Callable[[], FetchResult]) -> cache_pb2.FetchResponse:
    return fetch_message(wait())


def _pack_fetch(  # noqa: PLR0913, PLR0917  the arguments of Cache.fetch
    ids: Ids,
    namespace_id: NamespaceId,
    keys: Sequence[BlockKey],
    target: Target,
    lease_id: LeaseId,
    layers: tuple[int, int] | None,
    wait_ms: int,
) -> cache_pb2.FetchRequest:
    begin, end = layers or (0, 0)
    return cache_pb2.FetchRequest(
        namespace_id=namespace_id,
        keys=b"".join(keys),
        target=int(target),  # type: ignore[arg-type]
        layer_begin=begin,
        layer_end=end,
        lease_id=ids.lease(lease_id),
        wait_ms=wait_ms,
    )


def _fetch(
    call: Asked, request: cache_pb2.FetchRequest
) -> cache_pb2.FetchResponse | Callable[[], cache_pb2.FetchResponse]:
    """What waits, if bytes have to move first and the caller wants to wait for them."""
    namespace, keys = messages.target_of(request.namespace_id, request.keys)
    begin, end, lease, wait_ms = request.layer_begin, request.layer_end, request.lease_id, request.wait_ms
    begun = call.session.begin_fetch(
        namespace,
        keys,
        messages.enum_of("target", request.target, Target),
        lease_id=LeaseId(lease) if lease else lease_of(lease),
        layers=messages.layers_of(begin, end) if begin or end else None,
        wait_ms=wait_ms if wait_ms <= WAIT_MS_MAX else wait_of("wait_ms", wait_ms),
    )
    return fetch_message(begun) if isinstance(begun, FetchResult) else partial(_told, begun)


FETCH: Final = Verb(
    name="kvstore.v1.Cache/Fetch",
    request=cache_pb2.FetchRequest,
    reply=cache_pb2.FetchResponse,
    serve=_fetch,
    pack=_pack_fetch,
    unpack=fetch_result,
    fallback=lambda _ids, _namespace_id, keys, *_more: missed(len(keys)),
    wait=5,
)


def _wait_job(
    call: Asked, request: cache_pb2.WaitJobRequest
) -> cache_pb2.FetchResponse | Callable[[], cache_pb2.FetchResponse]:
    timeout_ms = wait_of("timeout_ms", request.timeout_ms)
    wait = partial(call.session.wait_job, JobId(request.job_id), timeout_ms)
    return partial(_told, wait) if timeout_ms else _told(wait)


WAIT_JOB: Final = Verb(
    name="kvstore.v1.Cache/WaitJob",
    request=cache_pb2.WaitJobRequest,
    reply=cache_pb2.FetchResponse,
    serve=_wait_job,
    pack=lambda ids, job_id, timeout_ms: cache_pb2.WaitJobRequest(job_id=ids.job(job_id), timeout_ms=timeout_ms),
    unpack=fetch_result,
    fallback=lambda ids, job_id, _timeout_ms: missed(ids.lose_job(job_id)),
    wait=1,
)


def _prefetch(call: Asked, request: cache_pb2.PrefetchRequest) -> cache_pb2.FetchResponse:
    namespace, keys = messages.target_of(request.namespace_id, request.keys)
    return fetch_message(call.session.prefetch(namespace, keys, arena_tier(request.tier)))


PREFETCH: Final = Verb(
    name="kvstore.v1.Cache/Prefetch",
    request=cache_pb2.PrefetchRequest,
    reply=cache_pb2.FetchResponse,
    serve=_prefetch,
    pack=lambda _ids, namespace_id, keys, tier: cache_pb2.PrefetchRequest(
        namespace_id=namespace_id,
        keys=b"".join(keys),
        tier=int(tier),  # type: ignore[arg-type]
    ),
    unpack=fetch_result,
    fallback=lambda _ids, _namespace_id, keys, _tier: missed(len(keys)),
)

VERBS: Final[tuple[Verb[Any], ...]] = (MATCH, FETCH, WAIT_JOB, PREFETCH)
