"""Handlers of remote sessions, which have no connection that they end with."""

from __future__ import annotations

from kvstore.rpc.context import CallContext
from kvstore.rpc.stream_blocks import PEER_WRITES_MAX
from kvstore.v1 import session_pb2
from kvstore.wire.verbs.checks import name_of


def open_remote(ctx: CallContext, request: session_pb2.OpenRemoteRequest) -> session_pb2.OpenRemoteResponse:
    """Sessions/OpenRemote."""
    sessions = ctx.services.sessions
    session = sessions.open_remote(name_of("name", request.name), request.ttl_ms, ctx.peer, ctx.bearer)
    return session_pb2.OpenRemoteResponse(
        token=session.token, boot_id=ctx.boot_id, ttl_ms=session.ttl_ms, writes_max=PEER_WRITES_MAX
    )


def keepalive(ctx: CallContext, _request: session_pb2.KeepaliveRequest) -> session_pb2.KeepaliveResponse:
    """Sessions/Keepalive."""
    return session_pb2.KeepaliveResponse(ttl_ms=ctx.services.sessions.keep_alive(ctx.session.session_id))


def close_remote(ctx: CallContext, _request: session_pb2.CloseRemoteRequest) -> session_pb2.CloseRemoteResponse:
    """Sessions/CloseRemote."""
    ctx.services.sessions.close_remote(ctx.session.session_id)
    return session_pb2.CloseRemoteResponse()
