"""Over gRPC a client has no more calls and streams under way than the daemon takes; the others wait in line."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest

from kvstore.client import AsyncClient, Client, ClientOptions
from kvstore.client.aio_grpc import AsyncGrpcConnection
from kvstore.client.grpc_connection import RemoteConnection
from kvstore.client.session_connection import CALLS_MAX
from kvstore.core.errors import DeadlineExceeded, InternalError, KVStoreError, ResourceExhausted, Unavailable
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Outcome
from kvstore.rpc.stream_blocks import PEER_WRITES_MAX
from kvstore.v1 import session_pb2
from tests.client.harness import blocks_of, chain

_salts = itertools.count()
STRICT = ClientOptions(strict=True, timeout_s=30.0)
PUTS = 24


@pytest.fixture
def spec():
    """Blocks of 128 KiB: a stream is still sending when others begin."""
    return NamespaceSpec(
        model="turns", dtype="opaque", layers=2, kv_heads=1, head_dim=1, block_tokens=16,
        opaque_slice_bytes=1 << 16, salt=str(next(_salts)).encode(),
    )  # fmt: skip


def chains(spec, count, blocks=2):
    return [chain(spec.namespace_id, blocks, seed=i)[0] for i in range(count)]


@pytest.mark.parametrize("clients", [1, 2])
def test_puts_and_gets_of_asyncio_wait_for_their_turn(daemon, spec, clients):
    """Those of two clients on one host, too, which share the bound of one peer."""

    async def run():
        opened = [AsyncClient(f"grpc://127.0.0.1:{daemon.port}", STRICT) for _ in range(clients)]
        for client in opened:
            await client.open_namespace(spec)
        keys = chains(spec, PUTS)
        layout = BlockLayout.of(spec)
        puts = [opened[i % clients].put(spec.namespace_id, blocks_of(layout, k)) for i, k in enumerate(keys)]
        stored = await asyncio.gather(*puts)
        got = await asyncio.gather(*(opened[0].get(spec.namespace_id, k) for k in keys * 4))
        for client in opened:
            await client.close()
        return stored, got

    stored, got = asyncio.run(run())
    assert {outcome for result in stored + got for outcome in result.outcomes} == {Outcome.HIT}


def test_puts_of_threads_wait_for_their_turn(daemon, spec):
    layout = BlockLayout.of(spec)
    with Client(f"grpc://127.0.0.1:{daemon.port}", STRICT) as client, futures.ThreadPoolExecutor(PUTS) as pool:
        client.open_namespace(spec)
        ends = [pool.submit(client.put, spec.namespace_id, blocks_of(layout, k)) for k in chains(spec, PUTS)]
        assert {outcome for end in ends for outcome in end.result().outcomes} == {Outcome.HIT}


class Daemon:
    """A gRPC server that opens sessions, takes ``writes_max`` Write streams and holds them until it is let go."""

    def __init__(self, writes_max):
        self.writes_max = writes_max
        self.most = self.now = 0
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.answer = lambda _: b""
        self._lock = threading.Lock()

    def write(self, messages, context):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.begun.release()
        self.go.wait(30)
        with self._lock:
            self.now -= 1
        return self.answer(context)

    def open(self, _payload, _context):
        opened = session_pb2.OpenRemoteResponse(token=b"t" * 32, boot_id=b"b" * 16, ttl_ms=30_000)
        opened.writes_max = self.writes_max
        return opened.SerializeToString()

    @contextmanager
    def serve(self):
        server = grpc.server(futures.ThreadPoolExecutor(CALLS_MAX + 8))
        empty = grpc.unary_unary_rpc_method_handler(lambda _payload, _context: b"")
        match = grpc.unary_unary_rpc_method_handler(self.write)
        sessions = {"OpenRemote": grpc.unary_unary_rpc_method_handler(self.open), "CloseRemote": empty}
        cache = {"Write": grpc.stream_unary_rpc_method_handler(self.write), "Match": match}
        for name, handlers in (("Sessions", sessions), ("Cache", cache)):
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"kvstore.v1.{name}", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            self.go.set()
            server.stop(None)


WRITE = "kvstore.v1.Cache/Write"


def test_asyncio_has_as_many_streams_as_the_daemon_says_and_a_cancelled_one_gives_its_turn_back():
    daemon = Daemon(writes_max=3)

    async def run(address):
        link = AsyncGrpcConnection(address, None)
        await link.open(ClientOptions())
        calls = [asyncio.create_task(link.upload(WRITE, iter([b"x"]), 30.0)) for _ in range(9)]
        for _ in range(3):
            await asyncio.to_thread(daemon.begun.acquire)
        calls[0].cancel()
        calls[8].cancel()
        daemon.go.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        link.close()
        await link.wait_closed()
        return ends

    with daemon.serve() as address:
        ends = asyncio.run(run(address))
    assert [end for end in ends if end != b""] == [ends[0], ends[8]]
    assert all(isinstance(end, asyncio.CancelledError) for end in (ends[0], ends[8]))
    assert daemon.most <= 4, "the server may see the end of the cancelled one late"


def test_a_session_whose_daemon_has_gone_leaves_no_channel_that_would_find_the_next_one():
    daemon = Daemon(writes_max=1)

    async def run():
        with daemon.serve() as address:
            link = AsyncGrpcConnection(address, None)
            await link.open(ClientOptions())
        with pytest.raises(Unavailable):
            await link.call("kvstore.v1.Sessions/Keepalive", b"", 5.0)
        assert link.closed
        link.close()
        await link.wait_closed()
        return link._channel.get_state()

    assert asyncio.run(run()) is grpc.ChannelConnectivity.SHUTDOWN


def test_calls_beyond_the_turns_are_not_sent_and_a_cancelled_one_never_is():
    daemon = Daemon(writes_max=1)

    async def run(address):
        link = AsyncGrpcConnection(address, None)
        await link.open(ClientOptions())
        calls = [asyncio.create_task(link.call("kvstore.v1.Cache/Match", b"", 30.0)) for _ in range(CALLS_MAX + 20)]
        for _ in range(CALLS_MAX):
            await asyncio.to_thread(daemon.begun.acquire)
        assert len(link._sent) == CALLS_MAX
        for call in calls[CALLS_MAX:]:
            call.cancel()
        daemon.go.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        link.close()
        await link.wait_closed()
        return ends

    with daemon.serve() as address:
        ends = asyncio.run(run(address))
    assert ends[:CALLS_MAX] == [b""] * CALLS_MAX
    assert daemon.most == CALLS_MAX
    assert not daemon.begun.acquire(blocking=False)


def test_threads_have_as_many_streams_as_the_daemon_says():
    daemon = Daemon(writes_max=3)
    with daemon.serve() as address, futures.ThreadPoolExecutor(9) as pool:
        link = RemoteConnection(address, ClientOptions())
        ends = [pool.submit(link.upload, WRITE, iter([b"x"]), 30.0) for _ in range(9)]
        for _ in range(3):
            daemon.begun.acquire()
        daemon.go.set()
        assert [end.result() for end in ends] == [b""] * 9
        link.close()
    assert daemon.most == 3


def test_who_has_no_turn_in_time_is_told_so():
    daemon = Daemon(writes_max=1)

    async def run(address):
        link = AsyncGrpcConnection(address, None)
        await link.open(ClientOptions())
        first = asyncio.create_task(link.upload(WRITE, iter([b"x"]), 30.0))
        await asyncio.to_thread(daemon.begun.acquire)
        with pytest.raises(DeadlineExceeded, match="no turn"):
            await link.upload(WRITE, iter([b"x"]), 0.01)
        daemon.go.set()
        assert await first == b""
        link.close()
        await link.wait_closed()

    with daemon.serve() as address:
        asyncio.run(run(address))


def test_a_stream_that_the_daemon_ends_while_it_is_sent_has_the_daemons_word():
    """gRPC's asyncio API says INTERNAL there, in one of some tries."""
    daemon = Daemon(writes_max=6)
    daemon.go.set()
    daemon.answer = lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")

    async def run(address):
        link = AsyncGrpcConnection(address, None)
        await link.open(ClientOptions())
        messages = [bytes(1 << 20)] * 4
        calls = (link.upload(WRITE, iter(messages), 30.0) for _ in range(100))
        ends = await asyncio.gather(*calls, return_exceptions=True)
        link.close()
        await link.wait_closed()
        return ends

    with daemon.serve() as address:
        ends = asyncio.run(run(address))
    assert {type(end) for end in ends} == {ResourceExhausted}


def test_what_grpc_itself_breaks_off_is_not_a_bug_of_the_daemon():
    daemon = Daemon(writes_max=1)
    daemon.go.set()
    daemon.answer = lambda context: context.abort(grpc.StatusCode.INTERNAL, "stream was reset")
    with daemon.serve() as address:
        link = RemoteConnection(address, ClientOptions())
        with pytest.raises(KVStoreError) as raised:
            link.upload(WRITE, iter([b"x"]), 30.0)
        assert isinstance(raised.value, Unavailable)
        assert not isinstance(raised.value, InternalError)
        assert not link.closed, "the session is as it was"
        link.close()


def test_the_daemon_says_how_many_streams_a_peer_has(daemon):
    with Client(f"grpc://127.0.0.1:{daemon.port}", STRICT) as client:
        turns = client.connection()[0]._calls._uploads
        assert turns._value == PEER_WRITES_MAX
