"""Handlers of the lease service and of remote sessions."""

from __future__ import annotations

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import LeaseId
from kvstore.rpc.context import CallContext
from kvstore.v1 import leases_pb2, session_pb2
from kvstore.wire import messages as convert

NAME_BYTES_MAX = 256
"""Longest name of a lease, a session or a pin."""


def grant_lease(ctx: CallContext, request: leases_pb2.GrantLeaseRequest) -> leases_pb2.GrantLeaseResponse:
    """Leases/GrantLease."""
    name = name_of("name", request.name)
    lease_id = ctx.session.grant_lease(name, request.ttl_ms)
    # What was granted, which may be less than what was asked for.
    return leases_pb2.GrantLeaseResponse(lease_id=lease_id, ttl_ms=ctx.session.renew_lease(lease_id))


def renew_lease(ctx: CallContext, request: leases_pb2.RenewLeaseRequest) -> leases_pb2.RenewLeaseResponse:
    """Leases/RenewLease."""
    return leases_pb2.RenewLeaseResponse(ttl_ms=ctx.session.renew_lease(lease_of(request.lease_id)))


def hold_lease(ctx: CallContext, request: leases_pb2.HoldLeaseRequest) -> leases_pb2.HoldLeaseResponse:
    """Leases/HoldLease."""
    held = ctx.session.hold(
        lease_of(request.lease_id),
        convert.namespace_of(request.namespace_id),
        convert.keys_of(request.keys, empty=True),
    )
    return leases_pb2.HoldLeaseResponse(held=map(int, held))


def release_lease(ctx: CallContext, request: leases_pb2.ReleaseLeaseRequest) -> leases_pb2.ReleaseLeaseResponse:
    """Leases/ReleaseLease."""
    keys = convert.keys_of(request.keys, empty=True)
    if request.namespace_id and not keys:
        raise InvalidArgument("keys", "empty", "the keys to release; or no namespace_id, to end the whole lease")
    namespace = convert.namespace_of(request.namespace_id) if keys else None
    released = ctx.session.release(lease_of(request.lease_id), namespace, keys)
    return leases_pb2.ReleaseLeaseResponse(released=released)


def open_remote(ctx: CallContext, request: session_pb2.OpenRemoteRequest) -> session_pb2.OpenRemoteResponse:
    """Sessions/OpenRemote."""
    sessions = ctx.services.sessions
    session = sessions.open_remote(name_of("name", request.name), request.ttl_ms, ctx.peer)
    return session_pb2.OpenRemoteResponse(
        token=session.token, boot_id=ctx.services.store.boot_id, ttl_ms=session.ttl_ms
    )


def keepalive(ctx: CallContext, _request: session_pb2.KeepaliveRequest) -> session_pb2.KeepaliveResponse:
    """Sessions/Keepalive."""
    return session_pb2.KeepaliveResponse(ttl_ms=ctx.services.sessions.keep_alive(ctx.session.session_id))


def close_remote(ctx: CallContext, _request: session_pb2.CloseRemoteRequest) -> session_pb2.CloseRemoteResponse:
    """Sessions/CloseRemote."""
    ctx.services.sessions.close_remote(ctx.session.session_id)
    return session_pb2.CloseRemoteResponse()


def lease_of(number: int) -> LeaseId:
    """A lease id that is not 0."""
    if not number:
        raise InvalidArgument("lease_id", 0, "the id of a lease of this session, from GrantLease")
    return LeaseId(number)


def name_of(field: str, name: str, *, empty: bool = True) -> str:
    """A name for people, bounded."""
    size = len(name.encode())
    if size > NAME_BYTES_MAX:
        raise InvalidArgument(field, f"{size} bytes", f"at most {NAME_BYTES_MAX} bytes")
    if not name and not empty:
        raise InvalidArgument(field, "empty", f"1 to {NAME_BYTES_MAX} bytes")
    return name
