"""Streams that nobody reads or feeds end and give back what they held; one peer never takes all calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import grpc
import pytest

from kvstore.core.types import Target
from kvstore.rpc import grpc_server, streams
from kvstore.rpc.context import Services
from kvstore.rpc.dispatch import Dispatcher
from kvstore.rpc.grpc_server import GrpcServer
from kvstore.rpc.sessions import Sessions
from kvstore.rpc.stream_blocks import Writer
from kvstore.rpc.table import METHODS
from kvstore.store.tables.tenancy import SECTION_THINGS
from kvstore.testing.world import SPEC, World
from kvstore.v1 import cache_pb2, common_pb2
from kvstore.wire.errors import ERROR_METADATA
from kvstore.wire.verbs.base import Runs


class AbortedError(Exception):
    """What ends a call with a status."""


class Far:
    """The server's side of a call whose caller takes no message until ``reads`` is set."""

    def __init__(self, token, peer="ipv4:10.0.0.1:4711"):
        self._token, self._peer = token, peer
        self.status = self.reason = None
        self.reads = asyncio.Event()

    def peer(self):
        return self._peer

    def invocation_metadata(self):
        return (("kvstore-session", self._token.hex()),)

    async def send_initial_metadata(self, _metadata):
        pass

    async def write(self, _message):
        await self.reads.wait()

    async def abort(self, code, _text, trailing_metadata):
        detail = common_pb2.ErrorDetail.FromString(dict(trailing_metadata)[ERROR_METADATA])
        self.status, self.reason = code, detail.reason
        raise AbortedError


@pytest.fixture
def world():
    made = World(host_blocks=16)
    yield made
    made.close()


@pytest.fixture
def sessions(world):
    return Sessions(world.store, world.clock)


@pytest.fixture
def server(world, sessions):
    dispatcher = Dispatcher(Services(world.store, sessions, "test", 1))
    yield GrpcServer(dispatcher, socket=None, idle_s=0.01)
    dispatcher.close()


@pytest.fixture
def remote(server, sessions):
    """Makes remote sessions which have opened the namespace; returns their tokens."""

    def make(peer):
        token = sessions.open_remote("far", 600_000, peer).token
        sessions.find(token)[0].open_namespace(SPEC)
        return token

    return make


def reading(server):
    return server._server_stream("kvstore.v1.Cache/Read", cache_pb2.ReadRequest, server._streams.read)


async def aborted(call):
    with pytest.raises(AbortedError):
        await call


def test_a_read_that_nobody_reads_ends(world, server, remote):
    keys = world.chain(0, 2)
    world.put(keys)
    request = cache_pb2.ReadRequest(namespace_id=world.namespace_id, keys=b"".join(keys)).SerializeToString()

    async def run():
        far = Far(remote("ipv4:10.0.0.1:1"))
        await aborted(reading(server)(request, far))
        assert (far.status, far.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")

    asyncio.run(run())
    assert not world.store.leases()
    assert not server._calls


def test_a_write_that_nobody_feeds_ends(world, server, remote):
    header = cache_pb2.WriteHeader(namespace_id=world.namespace_id, keys=bytes(32), parents=bytes(32))

    async def run():
        async def chunks():
            yield cache_pb2.WriteChunk(header=header).SerializeToString()
            await asyncio.Event().wait()

        far = Far(remote("ipv4:10.0.0.1:1"))
        await aborted(server._write(chunks(), far))
        assert far.status is grpc.StatusCode.DEADLINE_EXCEEDED

    before = len(world.store.sessions())
    asyncio.run(run())
    assert len(world.store.sessions()) == before + 1, "the remote one; that of the stream has gone"
    assert not server._calls
    assert not server._streams._writers


def test_one_peer_never_takes_all_calls_or_writes(world, server, remote, monkeypatch):
    """Ports do not tell peers apart: another connection of the same host is the same peer."""
    monkeypatch.setattr(grpc_server, "PEER_CALLS_MAX", 2)
    monkeypatch.setattr(streams, "PEER_WRITES_MAX", 1)

    async def run():
        server._idle_s = 60.0
        begun, ended = asyncio.Semaphore(0), asyncio.Event()

        async def chunks():
            begun.release()
            await ended.wait()
            return
            yield

        def write(peer):
            far = Far(remote(peer), peer)
            return far, asyncio.create_task(server._write(chunks(), far))

        _, first = write("ipv4:10.0.0.1:1")
        await begun.acquire()
        second, call = write("ipv4:10.0.0.1:2")
        await aborted(call)
        assert second.reason == "RESOURCE_EXHAUSTED"
        _, other = write("ipv4:10.0.0.2:1")
        await begun.acquire()

        far = [Far(remote("ipv4:10.0.0.1:3"), "ipv4:10.0.0.1:3") for _ in range(2)]
        keys = world.chain(0, 1)
        world.put(keys)
        request = cache_pb2.ReadRequest(namespace_id=world.namespace_id, keys=keys[0]).SerializeToString()
        reader = asyncio.create_task(reading(server)(request, far[0]))
        while sum(server._calls.values()) < 3:
            await asyncio.sleep(0)
        await aborted(reading(server)(request, far[1]))
        assert far[1].reason == "RESOURCE_EXHAUSTED"
        far[0].reads.set()
        await reader
        ended.set()
        done = await asyncio.gather(first, other, return_exceptions=True)
        assert {type(one) for one in done} == {AbortedError}, "no header ever came"

    asyncio.run(run())
    assert not server._calls


@pytest.mark.parametrize("how", ["refused", "cancelled"])
def test_the_end_of_a_write_unmaps_its_buffer_off_the_loop(world, server, remote, monkeypatch, how):
    ended, close = [], Writer.close

    def recorded(writer):
        if writer._session is not None:
            ended.append(threading.get_ident())
        close(writer)

    monkeypatch.setattr(Writer, "close", recorded)
    header = cache_pb2.WriteHeader(namespace_id=world.namespace_id, keys=bytes(32), parents=bytes(32))

    async def run():
        begun = asyncio.Event()

        async def chunks():
            yield cache_pb2.WriteChunk(header=header).SerializeToString()
            begun.set()
            if how == "cancelled":
                await asyncio.Event().wait()

        call = asyncio.create_task(server._write(chunks(), Far(remote("ipv4:10.0.0.1:1"))))
        await begun.wait()
        if how == "cancelled":
            call.cancel()
        with contextlib.suppress(AbortedError, asyncio.CancelledError):
            await call
        return threading.get_ident()

    loop = asyncio.run(run())
    assert len(ended) == 1
    assert loop not in ended
    assert len(world.store.sessions()) == 2, "the fixture's and the remote one"


def test_what_ends_a_whole_session_is_not_called_on_the_loop():
    assert METHODS["kvstore.v1.Sessions/CloseRemote"].runs is Runs.WORK


def test_a_read_ends_its_own_pins_and_leaves_those_of_others_to_their_threads(world):
    """A large lease is being given back in sections by a thread: a stream that ends meanwhile is no part of it."""
    keys = world.chain(1, 8)
    world.put(keys)
    session = world.session("reader")
    leases = world.store._state.owners
    with session.pins("read stream") as lease_id:
        session.fetch(world.namespace_id, keys, Target.HOST, lease_id=lease_id)
        large = session.grant_lease("large", 60_000)
        leases.leases[large].pins.update(dict.fromkeys(range(1 << 40, (1 << 40) + 3 * SECTION_THINGS)))
        unpinned = []
        book = world.store._state._book
        real, book.unpin_all = book.unpin_all, unpinned.extend
        rest = session.begin_release(large)
        unpinned.clear()
    assert len(unpinned) <= SECTION_THINGS
    assert callable(rest)
    rest()
    book.unpin_all = real
    session.close()
