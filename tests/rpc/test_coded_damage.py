"""Coded chunks that are not what was sent are refused with the field's name, or a miss: no wrong bytes, no crash."""

from __future__ import annotations

import pytest

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.client.payloads import PutPlan
from kvstore.client.streaming import write_messages
from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.keys import parents_of
from kvstore.core.types import Outcome
from kvstore.v1 import cache_pb2
from tests.rpc.coded import LZ4, WRITE, chain, kv_of, spec_of


@pytest.fixture
def written(connect):
    """A client, its namespace, and the messages of a right and coded Write of two blocks."""
    client, spec = connect(), spec_of()
    opened = client.open_namespace(spec, policy=LZ4)
    keys = chain(opened.namespace_id, 2)
    blocks = PutBlocks(keys, parents_of(keys), [kv_of(spec, n) for n in range(2)])
    plan = PutPlan.of(opened.layout, blocks, 64 << 20)
    messages = write_messages(opened.namespace_id, plan, plan.parts[0], 2)
    return client, opened, keys, [cache_pb2.WriteChunk.FromString(message) for message in messages]


def upload(client, sent):
    reply = client.connection()[0].upload(WRITE, [message.SerializeToString() for message in sent], 20.0)
    return cache_pb2.CommitResponse.FromString(reply)


def unknown_coding(chunk):
    chunk.coded.coding = 99


def no_coding(chunk):
    chunk.coded.coding = 0


def wrong_planes(chunk):
    chunk.coded.planes = 3


def other_planes(chunk):
    chunk.coded.planes = 1


def a_bomb(chunk):
    chunk.coded.plain_bytes = 2**31


def more_than_is_left(chunk):
    chunk.coded.plain_bytes *= 2


def too_few(chunk):
    chunk.coded.plain_bytes -= 2


def cut_short(chunk):
    chunk.data = chunk.data[:-9]


def garbage(chunk):
    chunk.data = b"\xff" * len(chunk.data)


def wrong_sum(chunk):
    chunk.crc32c ^= 1


def said_to_be_plain(chunk):
    chunk.ClearField("coded")


@pytest.mark.parametrize(
    ("damage", "field", "expected"),
    [
        (unknown_coding, "coded.coding", "one of 1 (LZ4); or coded unset, for plain bytes"),
        (no_coding, "coded.coding", "1 (LZ4)"),
        (wrong_planes, "coded.planes", "one of 1, 2, 4"),
        (other_planes, "crc32c", "the CRC-32C of the plain bytes"),
        (a_bomb, "coded.plain_bytes", "1 to 1048576"),
        (more_than_is_left, "data", "which the key has left"),
        (too_few, "data", "an LZ4 block of"),
        (cut_short, "data", "an LZ4 block of"),
        (garbage, "data", "an LZ4 block of"),
        (wrong_sum, "crc32c", "the CRC-32C of the plain bytes"),
        (said_to_be_plain, "crc32c", "the CRC-32C of the plain bytes"),
    ],
)
def test_a_damaged_coded_write_is_refused_and_leaves_nothing(written, damage, field, expected):
    client, opened, keys, sent = written
    assert all(chunk.HasField("coded") for chunk in sent[1:])
    damage(sent[2])
    with pytest.raises(InvalidArgument) as caught:
        upload(client, sent)
    assert caught.value.field == field
    assert expected in caught.value.expected
    assert caught.value.value
    assert client.match(opened.namespace_id, keys).matched == 0


@pytest.mark.parametrize("damage", [unknown_coding, other_planes, a_bomb, more_than_is_left, cut_short, garbage])
@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_coded_read_is_corrupt_and_never_wrong_bytes(daemon, written, monkeypatch, damage, strict):
    writer, opened, keys, sent = written
    upload(writer, sent)
    options = ClientOptions(strict=strict)
    with Client(f"grpc://127.0.0.1:{daemon.grpc_port}", options) as client:
        client.open_namespace(writer.state.namespaces[opened.namespace_id].spec)
        connection = client.connection()[0]
        stream = connection.stream

        def spoiled(*arguments):
            for message in stream(*arguments):
                chunk = cache_pb2.ReadChunk.FromString(message)
                if chunk.key_index == 1:
                    damage(chunk)
                yield chunk.SerializeToString()

        monkeypatch.setattr(connection, "stream", spoiled)
        if strict:
            with pytest.raises(CorruptBlock):
                client.get(opened.namespace_id, keys)
            return
        got = client.get(opened.namespace_id, keys)
        assert got.outcomes == (Outcome.MISS,) * 2
        assert got.payloads == (None, None)
        assert client.failures() == {"Read:CORRUPT_BLOCK": 1}
