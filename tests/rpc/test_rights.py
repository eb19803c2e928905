"""Who may do what over gRPC: rights come with a token, admin rights only with an admin's on the Unix socket."""

from __future__ import annotations

import grpc
import pytest

from kvstore.client import Client, ClientOptions
from kvstore.client.grpc_errors import domain_error
from kvstore.core.errors import PermissionDenied, Unauthenticated
from kvstore.rpc.table import METHODS
from kvstore.v1 import admin_pb2, events_pb2, session_pb2

SUBSCRIBE = "kvstore.v1.Events/Subscribe"
OPEN = {"kvstore.v1.Sessions/OpenRemote"}
"""What needs no session, since it makes one."""


@pytest.fixture(params=["unix", "tcp"])
def channel(request, config, daemon):
    """Both ways to gRPC."""
    unix = request.param == "unix"
    with grpc.insecure_channel(f"unix:{config.grpc_socket}" if unix else f"127.0.0.1:{daemon.grpc_port}") as made:
        made.unix = unix
        yield made


@pytest.fixture
def admin(config, daemon):
    """A session that the kernel vouched for: the daemon runs as the same user."""
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        yield client.connection()[0].welcome.token


def call(channel, name, payload=b"", token=b""):
    metadata = (("kvstore-session", token.hex()),) if token else ()
    try:
        if name == SUBSCRIBE:
            return next(channel.unary_stream(f"/{name}")(payload, timeout=10.0, metadata=metadata))
        return channel.unary_unary(f"/{name}")(payload, timeout=10.0, metadata=metadata)
    except grpc.RpcError as error:
        raise domain_error(error, name, 10.0)[0] from error


def remote_token(channel):
    reply = call(
        channel, "kvstore.v1.Sessions/OpenRemote", session_pb2.OpenRemoteRequest(ttl_ms=600_000).SerializeToString()
    )
    return session_pb2.OpenRemoteResponse.FromString(reply).token


def test_without_a_token_nothing_is_done_and_nothing_shown(channel):
    for name in {*METHODS, SUBSCRIBE} - OPEN:
        with pytest.raises((PermissionDenied, Unauthenticated)):
            call(channel, name)


def test_a_remote_session_is_never_admin(channel):
    token = remote_token(channel)
    for name, method in METHODS.items():
        if method.admin:
            with pytest.raises(PermissionDenied):
                call(channel, name, token=token)


def test_an_admin_s_token_gives_admin_rights_on_the_unix_socket_only(channel, admin):
    if channel.unix:
        assert admin_pb2.StatusResponse.FromString(call(channel, "kvstore.v1.Admin/Status", token=admin)).pid
        return
    for name, method in METHODS.items():
        if method.admin:
            with pytest.raises(PermissionDenied):
                call(channel, name, token=admin)


def test_a_subscription_needs_a_session(channel):
    with pytest.raises(Unauthenticated):
        call(channel, SUBSCRIBE, events_pb2.SubscribeRequest(after_sequence=1).SerializeToString())
