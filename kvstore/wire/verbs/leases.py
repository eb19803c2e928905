"""Rows of the calls about leases: GrantLease, RenewLease, HoldLease, ReleaseLease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import LeaseId
from kvstore.v1 import leases_pb2
from kvstore.wire import messages
from kvstore.wire.verbs.base import Asked, Runs, Verb
from kvstore.wire.verbs.checks import lease_of, name_of


def _grant(call: Asked, request: leases_pb2.GrantLeaseRequest) -> leases_pb2.GrantLeaseResponse:
    session = call.session
    lease_id = session.grant_lease(name_of("name", request.name), request.ttl_ms)
    # What was granted, which may be less than what was asked for.
    return leases_pb2.GrantLeaseResponse(lease_id=lease_id, ttl_ms=session.renew_lease(lease_id))


def _release_of(lease_id: LeaseId) -> tuple[Verb[Any], tuple[Any, ...]]:
    return RELEASE, (lease_id, None, ())


GRANT: Final = Verb(
    name="kvstore.v1.Leases/GrantLease",
    request=leases_pb2.GrantLeaseRequest,
    reply=leases_pb2.GrantLeaseResponse,
    serve=_grant,
    pack=lambda _ids, name, ttl_ms: leases_pb2.GrantLeaseRequest(name=name, ttl_ms=ttl_ms),
    unpack=lambda ids, _arguments, reply, generation: LeaseId(ids.outward(reply.lease_id, generation)),
    # Lease 0 of a failed cache holds nothing, and what names it misses.
    fallback=lambda _ids, _name, _ttl_ms: LeaseId(0),
    undo=_release_of,
)


def _renew(call: Asked, request: leases_pb2.RenewLeaseRequest) -> leases_pb2.RenewLeaseResponse:
    return leases_pb2.RenewLeaseResponse(ttl_ms=call.session.renew_lease(lease_of(request.lease_id)))


RENEW: Final = Verb(
    name="kvstore.v1.Leases/RenewLease",
    request=leases_pb2.RenewLeaseRequest,
    reply=leases_pb2.RenewLeaseResponse,
    serve=_renew,
    pack=lambda ids, lease_id: leases_pb2.RenewLeaseRequest(lease_id=ids.lease(lease_id)),
    unpack=lambda _ids, _arguments, reply, _generation: int(reply.ttl_ms),
    fallback=lambda _ids, _lease_id: 0,
)


def _hold(call: Asked, request: leases_pb2.HoldLeaseRequest) -> leases_pb2.HoldLeaseResponse:
    namespace, keys = messages.target_of(request.namespace_id, request.keys)
    return leases_pb2.HoldLeaseResponse(held=map(int, call.session.hold(lease_of(request.lease_id), namespace, keys)))


HOLD: Final = Verb(
    name="kvstore.v1.Leases/HoldLease",
    request=leases_pb2.HoldLeaseRequest,
    reply=leases_pb2.HoldLeaseResponse,
    serve=_hold,
    pack=lambda ids, lease_id, namespace_id, keys: leases_pb2.HoldLeaseRequest(
        lease_id=ids.lease(lease_id), namespace_id=namespace_id, keys=b"".join(keys)
    ),
    unpack=lambda _ids, _arguments, reply, _generation: tuple(map(bool, reply.held)),
    fallback=lambda _ids, _lease_id, _namespace_id, keys: (False,) * len(keys),
)


def _release(
    call: Asked, request: leases_pb2.ReleaseLeaseRequest
) -> leases_pb2.ReleaseLeaseResponse | Callable[[], leases_pb2.ReleaseLeaseResponse]:
    number, packed = request.lease_id, request.keys
    lease = LeaseId(number) if number else lease_of(number)
    if packed:
        namespace, keys = messages.target_of(request.namespace_id, packed)
        return leases_pb2.ReleaseLeaseResponse(released=call.session.release(lease, namespace, keys))
    if request.namespace_id:
        raise InvalidArgument("keys", "empty", "the keys to release; or no namespace_id, to end the whole lease")
    released = call.session.begin_release(lease)
    if isinstance(released, int):
        return leases_pb2.ReleaseLeaseResponse(released=released)
    # It held very much: the rest is given back where nobody waits for it but the caller.
    return lambda: leases_pb2.ReleaseLeaseResponse(released=released())


RELEASE: Final[Verb[int]] = Verb(
    name="kvstore.v1.Leases/ReleaseLease",
    request=leases_pb2.ReleaseLeaseRequest,
    reply=leases_pb2.ReleaseLeaseResponse,
    serve=_release,
    waits=Runs.WORK,
    pack=lambda ids, lease_id, namespace_id, keys: leases_pb2.ReleaseLeaseRequest(
        lease_id=ids.lease(lease_id), namespace_id=namespace_id or b"", keys=b"".join(keys)
    ),
    unpack=lambda _ids, _arguments, reply, _generation: int(reply.released),
    fallback=lambda _ids, _lease_id, _namespace_id, _keys: 0,
)

VERBS: Final[tuple[Verb[Any], ...]] = (GRANT, RENEW, HOLD, RELEASE)
