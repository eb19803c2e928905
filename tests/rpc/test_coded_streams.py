"""Coded chunks over real gRPC: who gets them, what they save, where they are made, and that bytes never change."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore.client import AsyncClient, Client, ClientOptions, PutBlocks
from kvstore.client.payloads import PutPlan
from kvstore.client.streaming import write_messages
from kvstore.core.errors import CorruptBlock, InvalidArgument
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespacePolicy, NamespaceSpec
from kvstore.core.types import Codec, Coding, Outcome
from kvstore.rpc import chunks
from kvstore.rpc.framing import CHUNK_BYTES_MAX
from kvstore.v1 import admin_pb2, cache_pb2

_salts = itertools.count()
WRITE, READ = "kvstore.v1.Cache/Write", "kvstore.v1.Cache/Read"
LZ4 = NamespacePolicy(lossless="lz4")
TOKENS = 16


def spec_of(dtype="bfloat16", **changes) -> NamespaceSpec:
    """Blocks of three layers of 32 KiB each, of 16 bits a number."""
    fields = {"model": "coded", "layers": 3, "kv_heads": 4, "head_dim": 128, "block_tokens": TOKENS}
    return NamespaceSpec(dtype=dtype, salt=str(next(_salts)).encode(), **{**fields, **changes})


def kv_of(spec: NamespaceSpec, seed: int) -> bytes:
    """A block as a model makes it: channels of K keep near a mean of their own, V is noise around zero."""
    if spec.opaque_slice_bytes:
        return np.random.default_rng(seed).bytes(spec.layers * spec.opaque_slice_bytes)
    draw = np.random.default_rng(seed)
    shape = (spec.layers, spec.kv_heads, spec.head_dim, spec.block_tokens)
    keys = draw.normal(0, 3, (*shape[:3], 1)) + draw.normal(0, 0.3, shape)
    values = draw.normal(0, 0.5, shape)
    both = np.concatenate([part.reshape(*shape[:2], -1) for part in (keys, values)], axis=2).astype(np.float32)
    if spec.dtype == "bfloat16":
        return (both.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return both.astype(spec.dtype).tobytes()


def noise_of(spec: NamespaceSpec, seed: int) -> bytes:
    """Numbers of no kind: finite, since their top bit but one is clear, and without anything to save."""
    data = np.frombuffer(np.random.default_rng(seed).bytes(len(kv_of(spec, 0))), np.uint8).copy()
    data[1::2] &= 0xBF
    return data.tobytes()


def chain(namespace_id, count, seed=0):
    return chain_keys(namespace_id, range(seed * 100_000, seed * 100_000 + count * TOKENS), TOKENS)


@pytest.fixture
def connect(daemon):
    """Makes remote clients; ``lossless`` false is a client from before there were codings."""
    made = []

    def remote(lossless=True):
        made.append(Client(f"grpc://127.0.0.1:{daemon.grpc_port}", ClientOptions(strict=True, lossless=lossless)))
        return made[-1]

    yield remote
    for client in made:
        client.close()


@pytest.fixture
def counters(daemon, config):
    """What the counters of the wire have grown by since the last time."""
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=0)) as admin:
        last = {}

        def grown():
            reply = admin.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0)
            found = {n: v for n, v in admin_pb2.StatusResponse.FromString(reply).counters.items() if "wire_" in n}
            step = {name: value - last.get(name, 0) for name, value in found.items()}
            last.update(found)
            return step

        grown()
        yield grown


def read_chunks(client, namespace_id, keys, **fields):
    request = cache_pb2.ReadRequest(namespace_id=namespace_id, keys=b"".join(keys), **fields).SerializeToString()
    return [cache_pb2.ReadChunk.FromString(m) for m in client.connection()[0].stream(READ, request, 20.0)]


def put(client, opened, keys, payloads):
    blocks = PutBlocks(keys, parents_of(keys), payloads)
    assert client.put(opened.namespace_id, blocks).outcomes == (Outcome.HIT,) * len(keys)


def test_kv_in_bf16_goes_in_less_both_ways_and_noise_as_it_is(connect, counters):
    client, spec = connect(), spec_of()
    opened = client.open_namespace(spec, policy=LZ4)
    keys = chain(opened.namespace_id, 6)
    payloads = [kv_of(spec, n) for n in range(4)] + [noise_of(spec, n) for n in range(2)]
    put(client, opened, keys, payloads)
    each, written = len(payloads[0]), counters()
    assert written["wire_written_bytes"] == 6 * each
    assert 0.15 * 4 * each < written["wire_written_saved_bytes"] < 0.5 * 4 * each
    assert written["wire_read_bytes"] == 0
    got = client.get(opened.namespace_id, keys)
    assert [bytes(part) for part in got.payloads] == payloads
    read = counters()
    assert (read["wire_read_bytes"], read["wire_written_bytes"]) == (6 * each, 0)
    assert read["wire_read_saved_bytes"] == written["wire_written_saved_bytes"]
    sent = read_chunks(client, opened.namespace_id, keys, accept=[int(Coding.LZ4)])
    assert [chunk.HasField("coded") for chunk in sent] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("accept", [[], [0], [2, 99]])
def test_who_accepts_no_coding_that_there_is_gets_plain_bytes(connect, counters, accept):
    client, spec = connect(), spec_of()
    opened = client.open_namespace(spec, policy=LZ4)
    keys, payloads = chain(opened.namespace_id, 2), [kv_of(spec, n) for n in range(2)]
    put(client, opened, keys, payloads)
    counters()
    sent = read_chunks(client, opened.namespace_id, keys, accept=accept)
    assert [bytes(chunk.data) for chunk in sent] == payloads
    assert not any(chunk.HasField("coded") for chunk in sent)
    assert counters()["wire_read_saved_bytes"] == 0
    known = read_chunks(client, opened.namespace_id, keys, accept=[*accept, int(Coding.LZ4)])
    assert all(chunk.HasField("coded") for chunk in known)


def test_the_client_s_option_and_the_namespace_s_policy_both_have_to_ask(connect, counters):
    for lossless, policy, saves in ((True, None, False), (False, LZ4, False), (True, LZ4, True)):
        client, spec = connect(lossless), spec_of()
        opened = client.open_namespace(spec, policy=policy)
        keys, payloads = chain(opened.namespace_id, 2), [kv_of(spec, n) for n in range(2)]
        put(client, opened, keys, payloads)
        assert [bytes(part) for part in client.get(opened.namespace_id, keys).payloads] == payloads
        grown = counters()
        assert (grown["wire_read_saved_bytes"] > 0) is (grown["wire_written_saved_bytes"] > 0) is saves


def test_a_later_opener_s_policy_counts(connect, counters):
    client, spec = connect(), spec_of()
    client.open_namespace(spec)
    connect().open_namespace(spec, policy=LZ4)
    opened = client.open_namespace(spec)
    put(client, opened, chain(opened.namespace_id, 1), [kv_of(spec, 0)])
    assert counters()["wire_written_saved_bytes"] > 0


def test_messages_of_large_blocks_stay_within_a_mebibyte_and_layers_are_cut_right(connect):
    client, spec = connect(), spec_of(layers=10, kv_heads=16)
    opened = client.open_namespace(spec, policy=LZ4)
    (key,), data = chain(opened.namespace_id, 1), kv_of(spec, 1)
    put(client, opened, [key], [data])
    accept, each = [int(Coding.LZ4)], opened.layout.raw_slice_bytes
    for begin, end in ((0, 0), (0, 10), (3, 10), (9, 10)):
        sent = read_chunks(client, opened.namespace_id, [key], accept=accept, layer_begin=begin, layer_end=end)
        assert all(chunk.HasField("coded") and chunk.ByteSize() < CHUNK_BYTES_MAX for chunk in sent)
        wanted = data[begin * each : (end or 10) * each]
        assert b"".join(bytes(chunks.plain_data(chunk, len(wanted))) for chunk in sent) == wanted
        assert [chunk.offset for chunk in sent] == list(range(0, len(wanted), CHUNK_BYTES_MAX))


def test_coding_keeps_off_the_event_loops(connect, daemon, monkeypatch):
    threads = {"encode_slice": set(), "decode_slice": set()}
    for name, seen in threads.items():
        work = getattr(chunks, name)
        monkeypatch.setattr(chunks, name, lambda *a, w=work, s=seen: s.add(threading.current_thread().name) or w(*a))
    spec = spec_of()

    async def both_ways():
        async with AsyncClient(f"grpc://127.0.0.1:{daemon.grpc_port}", ClientOptions(strict=True)) as client:
            opened = await client.open_namespace(spec, policy=LZ4)
            keys, payloads = chain(opened.namespace_id, 2), [kv_of(spec, n) for n in range(2)]
            await client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), payloads))
            got = await client.get(opened.namespace_id, keys)
            assert [bytes(part) for part in got.payloads] == payloads

    asyncio.run(both_ways())
    for seen in threads.values():
        # The daemon's loop runs in the thread "daemon", the client's in this one.
        assert seen
        assert not seen & {"daemon", threading.current_thread().name}


# ---------------------------------------------------------------- damage


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
        client.open_namespace(writer.state.namespace(opened.namespace_id).spec)
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


def test_a_daemon_from_before_codings_is_sent_plain_bytes(connect, counters, monkeypatch):
    """Its OpenNamespace answers no codings, after a reconnect too."""
    client, spec = connect(), spec_of()
    opened = client.open_namespace(spec, policy=LZ4)
    monkeypatch.setattr("kvstore.rpc.handlers_cache.codings_of", lambda policy: [])
    client.connection()[0].close()
    keys, payloads = chain(opened.namespace_id, 1), [kv_of(spec, 0)]
    put(client, opened, keys, payloads)
    grown = counters()
    assert (grown["wire_written_bytes"], grown["wire_written_saved_bytes"]) == (len(payloads[0]), 0)


def test_the_asyncio_client_learns_it_after_a_reconnect_too(daemon, counters, monkeypatch):
    spec = spec_of()

    async def put_after_a_reconnect():
        async with AsyncClient(f"grpc://127.0.0.1:{daemon.grpc_port}", ClientOptions(strict=True)) as client:
            opened = await client.open_namespace(spec, policy=LZ4)
            monkeypatch.setattr("kvstore.rpc.handlers_cache.codings_of", lambda policy: [])
            (await client.connection())[0].close()
            keys = chain(opened.namespace_id, 1)
            await client.put(opened.namespace_id, PutBlocks(keys, parents_of(keys), [kv_of(spec, 0)]))

    asyncio.run(put_after_a_reconnect())
    grown = counters()
    assert (grown["wire_written_bytes"], grown["wire_written_saved_bytes"]) == (len(kv_of(spec, 0)), 0)


def test_codes_of_int8_are_bytes_and_no_numbers_of_two(connect):
    client, spec = connect(), spec_of("float16", codec="int8")
    opened = client.open_namespace(spec, policy=LZ4)
    keys = chain(opened.namespace_id, 1)
    put(client, opened, keys, [bytes(len(kv_of(spec, 0)))])
    (sent,) = read_chunks(client, opened.namespace_id, keys, accept=[int(Coding.LZ4)])
    assert (sent.codec, sent.coded.coding, sent.coded.planes) == (Codec.INT8, Coding.LZ4, 1)


# ---------------------------------------------------------------- a random model


@dataclass
class World:
    """Blocks as they were put, raw, by key."""

    opened: object
    spec: NamespaceSpec
    blocks: dict[bytes, bytes] = field(default_factory=dict)


SPECS = [
    ("bfloat16", {}),
    ("bfloat16", {"layers": 5, "kv_heads": 8, "head_dim": 256}),
    ("float16", {}),
    ("float32", {}),
    ("float16", {"codec": "int8"}),
    ("bfloat16", {"codec": "int8", "raw_layers": (1,)}),
    ("bytes", {"opaque_slice_bytes": 5001}),
]


@pytest.mark.parametrize("seed", range(4))
def test_random_puts_and_gets_with_mixed_codings(connect, seed):
    draw = random.Random(seed)
    clients, worlds = [connect(True), connect(False)], []
    for dtype, changes in draw.sample(SPECS, 4):
        spec = spec_of(dtype, **changes)
        policy = draw.choice([LZ4, LZ4, None])
        opened, _ = [client.open_namespace(spec, policy=policy) for client in clients]
        worlds.append(World(opened, spec))
    for step in range(12):
        world, client = draw.choice(worlds), draw.choice(clients)
        keys = chain(world.opened.namespace_id, draw.randint(1, 3), seed=draw.randint(0, 3))
        payloads = [draw.choice([kv_of, noise_of])(world.spec, 100 * seed + step) for _ in keys]
        fresh = [(key, data) for key, data in zip(keys, payloads, strict=True) if key not in world.blocks]
        client.put(world.opened.namespace_id, PutBlocks(keys, parents_of(keys), payloads))
        world.blocks |= dict(fresh)
        check(world, clients, keys, draw)


def check(world, clients, keys, draw):
    """What either client gets is what was put; where the daemon has encoded, both get the same."""
    got = [client.get(world.opened.namespace_id, keys) for client in clients]
    assert got[0].outcomes == got[1].outcomes == (Outcome.HIT,) * len(keys)
    assert got[0].codecs == got[1].codecs
    for key, codec, *parts in zip(keys, got[0].codecs, got[0].payloads, got[1].payloads, strict=True):
        assert bytes(parts[0]) == bytes(parts[1])
        if codec is Codec.RAW:
            assert bytes(parts[0]) == world.blocks[key]
    begin = draw.randrange(world.spec.layers)
    fields = {"layer_begin": begin, "layer_end": draw.randint(begin + 1, world.spec.layers)}
    answers = [
        joined(read_chunks(clients[0], world.opened.namespace_id, keys, accept=accept, **fields))
        for accept in ([], [int(Coding.LZ4)])
    ]
    assert answers[0] == answers[1]


def joined(sent):
    """Plain bytes by key."""
    found = {}
    for chunk in sent:
        assert chunk.offset == len(found.get(chunk.key_index, b""))
        found[chunk.key_index] = found.get(chunk.key_index, b"") + bytes(chunks.plain_data(chunk, 1 << 30))
    return found
