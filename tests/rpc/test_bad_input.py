"""Bad input on every RPC, generated over all fields: the right status, reason and field, and the state unchanged."""

from __future__ import annotations

import grpc
import pytest

from kvstore.cache import CommitEntry
from kvstore.client import Client, ClientOptions, Control
from kvstore.client.grpc_errors import domain_error
from kvstore.core.errors import KVStoreError, Unauthenticated
from kvstore.core.types import Outcome, Target, Tier
from kvstore.rpc.table import METHODS
from kvstore.v1 import admin_pb2
from kvstore.wire import messages as convert
from kvstore.wire.framing import MESSAGE_BYTES_MAX
from tests.client.harness import blocks_of, chain, small_spec
from tests.rpc.bad_values import FREE, INVALID, RULES

MESSAGES = ("NamespaceSpec", "NamespacePolicy")


def fields_of(descriptor, path=()):
    """Every field of a request, nested messages included: (path, "Message.field")."""
    for field in descriptor.fields:
        yield (*path, field.name), f"{descriptor.name}.{field.name}"
        if field.message_type is not None and field.message_type.name in MESSAGES:
            yield from fields_of(field.message_type, (*path, field.name))


CASES = [
    (method, path, bad)
    for method in METHODS.values()
    for path, name in fields_of(method.request.DESCRIPTOR)
    for bad in RULES.get(name, [])
]


def test_every_field_of_every_request_has_a_rule():
    names = {name for method in METHODS.values() for _, name in fields_of(method.request.DESCRIPTOR)}
    assert names == RULES.keys() | FREE.keys()
    assert not RULES.keys() & FREE.keys()


class World:
    """A store with four blocks, and one valid request for each method."""

    def __init__(self, client, stranger, clock):
        self.client = client
        self.spec = small_spec()
        opened = client.open_namespace(self.spec, name="bound")
        self.namespace = opened.namespace_id
        self.keys, self.tokens = chain(self.namespace, 6)
        assert client.put(self.namespace, blocks_of(opened.layout, self.keys[:4])).outcomes == (Outcome.HIT,) * 4
        client.flush()
        self.ids = {"expired": client.grant_lease("short", 10)}
        clock.advance(1.0)
        self.lease = client.grant_lease("long", 600_000)
        self.ids["foreign"] = stranger.grant_lease("stranger's", 600_000)
        stranger.open_namespace(self.spec)
        foreign = stranger.reserve(self.namespace, Tier.HOST, keys=[self.keys[5]])
        done = client.reserve(self.namespace, Tier.HOST, keys=[self.keys[4]])
        client.abort(done.reservation_ids)
        self.done, self.foreign = list(done.reservation_ids), list(foreign.reservation_ids)
        open_place = client.reserve(self.namespace, Tier.DEVICE, count=1)
        job = client.prefetch(self.namespace, self.keys[:1], Tier.DEVICE)
        client.wait_job(job.job_id, 10_000)
        self.reservation = open_place.reservation_ids[0]
        self.plan = client.open_plan(self.namespace, self.keys[:1], piece_bytes=8192, pieces=1).plan_id

    def request(self, method):
        """A request that is right but for what a case changes."""
        packed = b"".join(self.keys[:1])
        values = {
            "namespace_id": self.namespace,
            "keys": packed,
            "tier": int(Tier.HOST),
            "target": int(Target.IN_PLACE),
            "lease_id": self.lease,
            "name": "n",
            "ttl_ms": 5_000,
            "key_prefix": self.keys[0],
            "fragmentation": 0.9,
            "plan_id": self.plan,
            "piece_bytes": 8192,
            "pieces": 1,
        }
        if method.request.__name__ == "CommitRequest":
            values.update(keys=self.keys[4], parents=self.keys[3], reservation_ids=[self.reservation])
        if method.request.__name__ == "AbortRequest":
            values["reservation_ids"] = [self.reservation]
        if method.request.__name__ == "OpenNamespaceRequest":
            values = {"spec": convert.spec_message(small_spec(model="other"))}
        known = {field.name for field in method.request.DESCRIPTOR.fields}
        return method.request(**{name: value for name, value in values.items() if name in known})

    def spoil(self, request, path, bad):
        """Put a bad value where it belongs."""
        message = request
        for name in path[:-1]:
            message = getattr(message, name)
            message.SetInParent()
        value = self.value(path[-1], bad.value)
        put(message, path[-1], value)
        for name, other in bad.also:
            put(request, name, other)

    def value(self, field, value):
        if field == "lease_id" and isinstance(value, str):
            return self.ids[value]
        if field == "reservation_ids" and isinstance(value, str):
            return {"done": self.done, "foreign": self.foreign}[value]
        return value

    def state(self):
        """Everything in Status that a refused call must not change."""
        reply = self.client.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0)
        status = admin_pb2.StatusResponse.FromString(reply)
        status.ClearField("uptime_seconds")
        # How long something took is no state: on a busy machine any turn of the loop may be a long one.
        for name in [name for name in status.counters if name.startswith(("loop_turn", "loop_work", "locked_"))]:
            del status.counters[name]
        return status


def put(message, name, value):
    if value is None:
        message.ClearField(name)
    elif isinstance(value, list):
        del getattr(message, name)[:]
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


@pytest.fixture(scope="module")
def world(daemon, config, clock):
    options = ClientOptions(strict=True, buffer_bytes=1 << 20)
    with Client(config.socket, options) as client, Client(config.socket, options) as stranger:
        yield World(client, stranger, clock)


@pytest.fixture(scope="module")
def over_grpc(daemon, config):
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=4096, control=Control.GRPC)) as client:
        yield client


def case_name(case):
    method, path, bad = case
    return f"{method.name.rpartition('.')[2]}-{'.'.join(path)}-{str(bad.value)[:20]}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_bad_field_is_refused_and_changes_nothing(world, case):
    method, path, bad = case
    request = world.request(method)
    world.spoil(request, path, bad)
    before = world.state()
    with pytest.raises(KVStoreError) as caught:
        world.client.connection()[0].call(method.name, request.SerializeToString(), 10.0)
    error = caught.value
    assert error.reason == bad.reason
    wanted = bad.field or (".".join(path) if path[0] in ("spec", "policy") else path[0])
    # A spec may be wrong as a whole: many layers that are each allowed make a block that is too large.
    assert wanted in error.field or (error.field == "spec" and path[0] == "spec")
    assert error.message
    if bad.reason == INVALID:
        assert error.expected
    assert world.state() == before


@pytest.mark.parametrize("name", METHODS)
def test_bytes_that_are_no_message_are_refused(world, over_grpc, name):
    before = world.state()
    for client in (world.client, over_grpc):
        with pytest.raises(KVStoreError) as caught:
            client.connection()[0].call(name, b"\xff\xff\xff", 10.0)
        assert (caught.value.reason, caught.value.field) == (INVALID, "message")
    assert world.state() == before


def test_one_bad_value_a_method_gives_the_same_error_over_grpc(world, over_grpc):
    seen = set()
    for method, path, bad in CASES:
        if method.name in seen or "lease_id" in path or "reservation_ids" in path:
            continue
        seen.add(method.name)
        request = world.request(method)
        world.spoil(request, path, bad)
        errors = []
        for client in (world.client, over_grpc):
            with pytest.raises(KVStoreError) as caught:
                client.connection()[0].call(method.name, request.SerializeToString(), 10.0)
            errors.append(caught.value)
        socket_error, grpc_error = errors
        assert type(socket_error) is type(grpc_error), method.name
        assert vars(socket_error) == vars(grpc_error)
    assert len(seen) >= 20


def test_an_unknown_method_is_refused(world):
    with pytest.raises(KVStoreError) as caught:
        world.client.connection()[0].call("kvstore.v1.Cache/Nothing", b"", 10.0)
    assert (caught.value.reason, caught.value.field) == (INVALID, "method")


def test_too_long_a_message_is_refused_before_it_is_sent(world):
    with pytest.raises(KVStoreError) as caught:
        world.client.connection()[0].call("kvstore.v1.Cache/Match", bytes(MESSAGE_BYTES_MAX), 10.0)
    assert (caught.value.reason, caught.value.field) == (INVALID, "message")


def test_double_commit(world):
    client = world.client
    held = client.reserve(world.namespace, Tier.HOST, keys=[world.keys[4]])
    entry = CommitEntry(held.reservation_ids[0], world.keys[4], world.keys[3])
    assert client.commit(world.namespace, [entry]).outcomes == (Outcome.HIT,)
    client.flush()
    before = world.state()
    with pytest.raises(KVStoreError) as caught:
        client.commit(world.namespace, [entry])
    assert caught.value.reason == "UNKNOWN_RESERVATION"
    assert world.state() == before
    assert client.remove(world.namespace, [world.keys[4]]) == (Outcome.HIT,)


class TestRights:
    def test_data_calls_need_a_session(self, config, over_grpc):
        controlled = over_grpc.connection()[0]
        for name, method in METHODS.items():
            if method.session:
                with pytest.raises(Unauthenticated) as caught:
                    bare_call(config, name)
                assert "OpenRemote" in str(caught.value)
        assert controlled.call("kvstore.v1.Admin/Status", b"", 10.0)

    def test_a_wrong_token_is_refused(self, config):
        for token in ("00" * 32, "no hexadecimal"):
            with pytest.raises(Unauthenticated):
                bare_call(config, "kvstore.v1.Cache/Match", token=token)


def bare_call(config, name, *, token=None):
    """A gRPC call without a session of ours."""
    with grpc.insecure_channel(f"unix:{config.grpc_socket}") as channel:
        metadata = () if token is None else (("kvstore-session", token),)
        try:
            return channel.unary_unary(f"/{name}")(b"", timeout=10.0, metadata=metadata)
        except grpc.RpcError as error:
            raise domain_error(error, name, 10.0)[0] from error
