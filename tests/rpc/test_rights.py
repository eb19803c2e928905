"""Who may do what over gRPC: rights come with a token, admin rights only with an admin's on the Unix socket."""

from __future__ import annotations

import grpc
import pytest

from kvstore.client import Client, ClientOptions
from kvstore.client.grpc_errors import domain_error
from kvstore.core.errors import PermissionDenied, Unauthenticated, UnknownNamespace
from kvstore.rpc.table import METHODS
from kvstore.v1 import admin_pb2, cache_pb2, events_pb2, leases_pb2, plans_pb2, session_pb2
from kvstore.wire.messages import spec_message
from tests.client.harness import blocks_of, chain, small_spec

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


# ---------------------------------------------------------------- namespaces


def small(path, **changes):
    client = Client(path, ClientOptions(strict=True, buffer_bytes=0))
    return client, client.open_namespace(small_spec(**changes)) if changes else None


NAMED = {
    "kvstore.v1.Cache/Match": cache_pb2.MatchRequest(keys=bytes(32)),
    "kvstore.v1.Cache/Reserve": cache_pb2.ReserveRequest(count=1, tier=2),
    "kvstore.v1.Cache/Commit": cache_pb2.CommitRequest(keys=bytes(32), parents=bytes(32), reservation_ids=[1]),
    "kvstore.v1.Cache/Fetch": cache_pb2.FetchRequest(keys=bytes(32), target=2, lease_id=1),
    "kvstore.v1.Cache/Prefetch": cache_pb2.PrefetchRequest(keys=bytes(32), tier=2),
    "kvstore.v1.Cache/Remove": cache_pb2.RemoveRequest(keys=bytes(32)),
    "kvstore.v1.Cache/Read": cache_pb2.ReadRequest(keys=bytes(32)),
    "kvstore.v1.Plans/OpenPlan": plans_pb2.OpenPlanRequest(keys=bytes(32), piece_bytes=1 << 20, pieces=2),
    "kvstore.v1.Leases/HoldLease": leases_pb2.HoldLeaseRequest(keys=bytes(32)),
    "kvstore.v1.Leases/ReleaseLease": leases_pb2.ReleaseLeaseRequest(keys=bytes(32)),
}
"""Every call that names a namespace."""


def test_every_data_call_that_names_a_namespace_is_here():
    named = {
        name for name, method in METHODS.items()
        if not method.admin and "namespace_id" in method.request.DESCRIPTOR.fields_by_name
    }  # fmt: skip
    assert named == set(NAMED) - {"kvstore.v1.Cache/Read"}


@pytest.mark.parametrize("name", NAMED)
def test_a_namespace_that_others_opened_is_unknown(config, daemon, name):
    """Its id is no secret: what gives the right to it is to have opened it, and an admin's session is no exception."""
    owner, opened = small(config.socket, revision="tenant A")
    other, _ = small(config.socket)
    request = type(NAMED[name])()
    request.CopyFrom(NAMED[name])
    request.namespace_id = opened.namespace_id
    with owner, other, grpc.insecure_channel(f"unix:{config.grpc_socket}") as channel:
        if "lease_id" in request.DESCRIPTOR.fields_by_name:
            request.lease_id = other.grant_lease("x", 1000)
        with pytest.raises(UnknownNamespace):
            call(channel, name, request.SerializeToString(), other.connection()[0].welcome.token)


def test_a_write_stream_needs_its_namespace_open(config, daemon):
    owner, opened = small(config.socket, revision="tenant B")
    other, _ = small(config.socket)
    header = cache_pb2.WriteHeader(namespace_id=opened.namespace_id, keys=bytes(32), parents=bytes(32))
    with owner, other, grpc.insecure_channel(f"unix:{config.grpc_socket}") as channel:
        token = other.connection()[0].welcome.token
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary("/kvstore.v1.Cache/Write")(
                iter([cache_pb2.WriteChunk(header=header).SerializeToString()]),
                timeout=10.0,
                metadata=(("kvstore-session", token.hex()),),
            )
        assert isinstance(domain_error(caught.value, "Write", 10.0)[0], UnknownNamespace)


def test_a_subscriber_without_admin_rights_is_told_of_what_it_opened(channel, config, daemon):
    """Events of other tenants, with the tokens of their prompts, are not even counted out to it."""
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=1 << 20)) as client:
        theirs, mine = (client.open_namespace(small_spec(revision=r)) for r in ("theirs", "mine"))
        before = after_sequence(client)
        for opened in (theirs, mine):
            keys, tokens = chain(opened.namespace_id, 1)
            client.put(opened.namespace_id, blocks_of(opened.layout, keys, token_ids=tokens))
        token = remote_token(channel)
        request = events_pb2.SubscribeRequest(after_sequence=before, namespace_id=theirs.namespace_id)
        with pytest.raises(UnknownNamespace):
            call(channel, SUBSCRIBE, request.SerializeToString(), token)
        spec = spec_message(small_spec(revision="mine"))
        call(
            channel,
            "kvstore.v1.Cache/OpenNamespace",
            cache_pb2.OpenNamespaceRequest(spec=spec).SerializeToString(),
            token,
        )
        request = events_pb2.SubscribeRequest(after_sequence=before)
        event = events_pb2.BlockEvent.FromString(call(channel, SUBSCRIBE, request.SerializeToString(), token))
        assert event.namespace_id == mine.namespace_id


def after_sequence(client):
    """A sequence that is kept, below all that comes."""
    opened = client.open_namespace(small_spec(revision="first"))
    keys, _ = chain(opened.namespace_id, 1, seed=1)
    client.put(opened.namespace_id, blocks_of(opened.layout, keys))
    with grpc.insecure_channel(f"unix:{client._address.socket}.grpc") as channel:
        request = events_pb2.SubscribeRequest(after_sequence=1, namespace_id=opened.namespace_id)
        token = client.connection()[0].welcome.token
        return events_pb2.BlockEvent.FromString(call(channel, SUBSCRIBE, request.SerializeToString(), token)).sequence
