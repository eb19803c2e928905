"""Read, Write and Subscribe over gRPC: every chunk checked, nothing visible before the end, the flow controlled."""

from __future__ import annotations

import contextlib
import itertools
import threading

import grpc
import pytest

from kvstore.client import Client, ClientOptions, Control
from kvstore.client.payloads import PutPlan
from kvstore.client.streaming import write_messages
from kvstore.core.errors import InvalidArgument, KVStoreError, UnknownNamespace
from kvstore.core.types import Outcome, Tier
from kvstore.v1 import admin_pb2, cache_pb2, events_pb2
from kvstore.wire.errors import SESSION_METADATA
from tests.client.harness import blocks_of, chain, payload, small_spec, until

_salts = itertools.count()
WRITE, READ = "kvstore.v1.Cache/Write", "kvstore.v1.Cache/Read"


@pytest.fixture
def client(daemon, config):
    options = ClientOptions(strict=True, buffer_bytes=1 << 20, control=Control.GRPC)
    with Client(config.socket, options) as made:
        yield made


@pytest.fixture
def opened(client):
    return client.open_namespace(small_spec(salt=f"streams {next(_salts)}".encode()))


@pytest.fixture
def messages(client, opened):
    """The messages of a right Write of three blocks, parsed."""
    keys, tokens = chain(opened.namespace_id, 3)
    plan = PutPlan.of(opened.layout, blocks_of(opened.layout, keys, token_ids=tokens), 64 << 20)
    sent = [cache_pb2.WriteChunk.FromString(m) for m in write_messages(opened.namespace_id, plan, plan.parts[0])]
    return keys, sent


def upload(client, sent):
    reply = client.connection()[0].upload(WRITE, [message.SerializeToString() for message in sent], 20.0)
    return cache_pb2.CommitResponse.FromString(reply)


def download(client, **fields):
    stream = client.connection()[0].stream(READ, cache_pb2.ReadRequest(**fields).SerializeToString(), 20.0)
    return [cache_pb2.ReadChunk.FromString(message) for message in stream]


def status(client):
    reply = admin_pb2.StatusResponse.FromString(client.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0))
    return reply.sessions, reply.leases, reply.reservations, [t.reserved_bytes for t in reply.tiers]


def settled(client):
    """``status`` when the sessions of the tests before have ended, which they do in a thread."""
    until(lambda: status(client)[0] == 1)
    return status(client)


def test_write_then_read_with_a_layer_range(client, opened, messages):
    keys, sent = messages
    assert list(upload(client, sent).outcomes) == [1, 1, 1]
    chunks = download(client, namespace_id=opened.namespace_id, keys=b"".join(keys), layer_begin=1, layer_end=2)
    size = opened.layout.slice_bytes
    assert [bytes(chunk.data) for chunk in chunks] == [payload(opened.layout, key)[size : 2 * size] for key in keys]
    assert list(upload(client, sent).existed) == [1, 1, 1]


def drop_header(sent):
    return sent[1:]


def second_header(sent):
    sent[2].header.CopyFrom(sent[0].header)
    return sent


def flip_a_bit(sent):
    sent[2].data = bytes([sent[2].data[0] ^ 1]) + sent[2].data[1:]
    return sent


def wrong_sum(sent):
    sent[3].crc32c ^= 1
    return sent


def out_of_order(sent):
    return [sent[0], sent[2], sent[1], sent[3]]


def gap(sent):
    sent[1].offset = 512
    return sent


def too_short(sent):
    return sent[:-1]


def too_long(sent):
    return [*sent, sent[-1]]


def empty_chunk(sent):
    sent[1].data = b""
    return sent


def wrong_parents(sent):
    sent[0].header.parents = sent[0].header.parents[32:]
    return sent


def duplicate_keys(sent):
    sent[0].header.keys = sent[0].header.keys[:32] * 3
    return sent


def wrong_tokens(sent):
    sent[0].header.token_ids[0] += 1
    return sent


def wrong_durability(sent):
    sent[0].header.durability = 99
    return sent


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (drop_header, "header"),
        (second_header, "header"),
        (flip_a_bit, "crc32c"),
        (wrong_sum, "crc32c"),
        (out_of_order, "key_index"),
        (gap, "offset"),
        (too_short, "data"),
        (too_long, "key_index"),
        (empty_chunk, "data"),
        (wrong_parents, "header.parents"),
        (duplicate_keys, "header.keys"),
        (wrong_tokens, "keys[0]"),
        (wrong_durability, "header.durability"),
    ],
)
def test_a_bad_write_is_refused_and_leaves_nothing(client, opened, messages, damage, field):
    keys, sent = messages
    before = settled(client)
    with pytest.raises(InvalidArgument) as caught:
        upload(client, damage(sent))
    assert caught.value.field == field
    until(lambda: status(client) == before)
    assert client.match(opened.namespace_id, keys).matched == 0


def test_a_write_into_an_unknown_namespace(client, messages):
    _, sent = messages
    sent[0].header.namespace_id = bytes([7]) * 32
    with pytest.raises(UnknownNamespace):
        upload(client, sent)


def test_an_empty_write(client):
    with pytest.raises(InvalidArgument) as caught:
        upload(client, [])
    assert caught.value.field == "header"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"keys": bytes(31)}, "INVALID_ARGUMENT"),
        ({"keys": bytes(64)}, "INVALID_ARGUMENT"),
        ({"keys": b""}, "INVALID_ARGUMENT"),
        ({"namespace_id": bytes(31)}, "INVALID_ARGUMENT"),
        ({"namespace_id": bytes(32)}, "UNKNOWN_NAMESPACE"),
        ({"layer_begin": 2, "layer_end": 1}, "INVALID_ARGUMENT"),
        ({"layer_begin": 0, "layer_end": 4}, "INVALID_ARGUMENT"),
    ],
)
def test_a_bad_read_is_refused(client, opened, fields, reason):
    before = settled(client)
    with pytest.raises(KVStoreError) as caught:
        download(client, **{"namespace_id": opened.namespace_id, "keys": bytes(32), **fields})
    assert caught.value.reason == reason
    until(lambda: status(client) == before)


def test_a_reader_that_goes_away_lets_its_pins_go(client, opened, messages):
    keys, sent = messages
    upload(client, sent)
    before = settled(client)
    request = cache_pb2.ReadRequest(namespace_id=opened.namespace_id, keys=b"".join(keys)).SerializeToString()
    stream = client.connection()[0].stream(READ, request, 20.0)
    assert next(stream)
    stream.close()
    until(lambda: status(client) == before)
    assert client.remove(opened.namespace_id, keys) == (Outcome.HIT,) * 3


def test_subscribers_see_what_comes_and_goes_in_order(client, config, opened, messages):
    keys, sent = messages
    events = []
    began = threading.Event()

    def subscribe(channel):
        token = client.connection()[0].welcome.token.hex()
        call = channel.unary_stream("/kvstore.v1.Events/Subscribe")
        request = events_pb2.SubscribeRequest(namespace_id=opened.namespace_id).SerializeToString()
        stream = call(request, timeout=30.0, metadata=((SESSION_METADATA, token),))
        stream.initial_metadata()
        began.set()
        # Closing the channel ends the stream with an error.
        with contextlib.suppress(grpc.RpcError):
            for message in stream:
                events.append(events_pb2.BlockEvent.FromString(message))

    channel = grpc.insecure_channel(f"unix:{config.grpc_socket}")
    thread = threading.Thread(target=subscribe, args=(channel,))
    thread.start()
    assert began.wait(20)
    upload(client, sent)

    def told(kind, tier):
        return {
            key
            for event in events
            if (event.kind, event.tier) == (kind, tier)
            for key in (event.keys[i : i + 32] for i in range(0, len(event.keys), 32))
        }

    until(lambda: told(events_pb2.EVENT_KIND_STORED, int(Tier.HOST)) == set(keys))
    client.flush()
    client.remove(opened.namespace_id, keys)
    until(lambda: told(events_pb2.EVENT_KIND_REMOVED, int(Tier.HOST)) == set(keys))
    channel.close()
    thread.join()
    numbers = [event.sequence for event in events]
    assert numbers == sorted(numbers)
    assert {event.namespace_id for event in events} == {opened.namespace_id}


def test_subscribing_from_the_future_begins_with_a_gap(client, config):
    """A number above all of this run is one of a run whose clock was ahead."""
    request = events_pb2.SubscribeRequest(after_sequence=2**62).SerializeToString()
    events = client.connection()[0].stream("kvstore.v1.Events/Subscribe", request, 10.0)
    first = events_pb2.BlockEvent.FromString(next(iter(events)))
    assert first.kind == events_pb2.EVENT_KIND_GAP
    assert first.sequence < 2**62
