"""Coded chunks over real gRPC: who gets them, what they save, where they are made, and that bytes never change."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvstore.client import AsyncClient, ClientOptions, PutBlocks
from kvstore.core.keys import parents_of
from kvstore.core.types import Codec, Coding
from kvstore.wire import chunks
from kvstore.wire.framing import CHUNK_BYTES_MAX
from tests.rpc.coded import LZ4, chain, kv_of, noise_of, put, read_chunks, spec_of


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


def test_a_daemon_from_before_codings_is_sent_plain_bytes(connect, counters, monkeypatch):
    """Its OpenNamespace answers no codings, after a reconnect too."""
    client, spec = connect(), spec_of()
    opened = client.open_namespace(spec, policy=LZ4)
    monkeypatch.setattr("kvstore.wire.verbs.writes.codings_of", lambda policy: [])
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
            monkeypatch.setattr("kvstore.wire.verbs.writes.codings_of", lambda policy: [])
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
