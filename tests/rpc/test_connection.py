"""One connection of the session socket: its bounds, its back pressure, its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import pytest

from kvstore.core.errors import ResourceExhausted, Unavailable
from kvstore.core.types import SessionId
from kvstore.rpc import connection
from kvstore.rpc.connection import CALLS_MAX, UID_CALLS_MAX, Connection, Shares
from kvstore.rpc.context import CallContext
from kvstore.rpc.sessions import peer_name
from kvstore.v1 import leases_pb2, session_pb2
from kvstore.wire.errors import from_detail
from kvstore.wire.framing import FrameDecoder, FrameKind, pack_frame


class StalledDispatcher:
    """Begins calls and never ends them."""

    def __init__(self):
        self.done = []

    def begin(self, name, ctx, payload, loop, done):
        self.done.append(done)

    def takes_place(self, frame):
        return frame.name != "free"


class Peer:
    """The client's end of a connection, on the loop."""

    def __init__(self, dispatcher, shares, uid=7):
        self.left = []
        ctx = CallContext(None, SimpleNamespace(session_id=SessionId(1), uid=uid), False, "test")
        self.end, served = socket.socketpair()
        for one in (self.end, served):
            one.setblocking(False)
        self.connection = Connection(dispatcher, ctx, served, self.left.append, shares)
        self.connection.begin(b"")
        self._decoder = FrameDecoder()

    def request(self, *numbers, kind=FrameKind.REQUEST, name=b"x"):
        self.end.sendall(b"".join(pack_frame(number, kind, b"", name=name) for number in numbers))

    async def frames(self, count):
        found = []
        while len(found) < count:
            found += self._decoder.feed(
                await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.end, 65536), 30)
            )
        return found


@contextlib.asynccontextmanager
async def peers(dispatcher, *uids):
    shares = Shares()
    made = [Peer(dispatcher, shares, uid) for uid in uids or (7,)]
    yield made if uids else made[0]
    for peer in made:
        peer.connection.abort()
        peer.end.close()


def test_a_session_may_have_so_many_calls_under_way():
    async def run():
        async with peers(StalledDispatcher()) as peer:
            peer.request(*range(1, CALLS_MAX + 2))
            (refused,) = await peer.frames(1)
            assert (refused.call_id, refused.kind) == (CALLS_MAX + 1, FrameKind.ERROR)
            assert isinstance(from_detail(refused.payload, refused.code), ResourceExhausted)

    asyncio.run(run())


def test_a_user_may_have_so_many_calls_under_way_in_all_its_sessions():
    async def run():
        dispatcher, sessions = StalledDispatcher(), UID_CALLS_MAX // CALLS_MAX
        async with peers(dispatcher, *[7] * (sessions + 2), 8) as made:
            for peer in made[:sessions]:
                peer.request(*range(1, CALLS_MAX + 1))
            while len(dispatcher.done) < sessions * CALLS_MAX:
                await asyncio.sleep(0)
            *_, last, gone, other = made
            begun = sessions * CALLS_MAX
            gone.request(1)
            last.request(1)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(dispatcher.done) == begun, "they wait"
            other.request(1)
            await until(lambda: len(dispatcher.done) == begun + 1)
            gone.connection.abort()
            dispatcher.done[0](None, Unavailable("gone"))
            await until(lambda: len(dispatcher.done) == begun + 2)
            assert len(made[0].connection._shares.lines) == 0

    asyncio.run(run())


def test_what_takes_no_place_goes_on_until_it_stands_behind_what_waits():
    async def run():
        dispatcher, sessions = StalledDispatcher(), UID_CALLS_MAX // CALLS_MAX
        async with peers(dispatcher, *[7] * (sessions + 1)) as made:
            for peer in made[:sessions]:
                peer.request(*range(1, CALLS_MAX + 1))
            begun = sessions * CALLS_MAX
            await until(lambda: len(dispatcher.done) == begun)
            last = made[-1]
            last.request(1, name=b"free")
            await until(lambda: len(dispatcher.done) == begun + 1)
            last.request(2)
            last.request(3, name=b"free")
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(dispatcher.done) == begun + 1
            for done in dispatcher.done[:2]:
                done(None, Unavailable("gone"))
            await until(lambda: len(dispatcher.done) == begun + 3)

    asyncio.run(run())


async def until(ready):
    """Let the loop turn until it is so."""
    async with asyncio.timeout(30):
        while not ready():
            await asyncio.sleep(0)


def test_a_client_that_does_not_read_is_not_read_from():
    """What it sends meanwhile waits in the socket, and is answered when it reads again; nothing is lost."""

    async def run():
        dispatcher = StalledDispatcher()
        async with peers(dispatcher) as peer:
            pushed = 0
            while not peer.connection.waits_for_reader:
                peer.connection.push(session_pb2.JobDone(job_id=pushed + 1))
                pushed += 1
            peer.request(5)
            for _ in range(20):
                await asyncio.sleep(0)
            assert dispatcher.done == []
            got = await peer.frames(pushed)
            assert [session_pb2.JobDone.FromString(frame.payload).job_id for frame in got] == [*range(1, pushed + 1)]
            while not dispatcher.done:
                await asyncio.sleep(0)
            assert not peer.connection.waits_for_reader

    asyncio.run(run())


def test_half_requests_and_unread_replies_of_one_user_are_bounded(monkeypatch):
    monkeypatch.setattr(connection, "WAITING_BYTES_MAX", 100_000)
    half = pack_frame(1, FrameKind.REQUEST, bytes(60_000), name=b"x")[:-1]

    async def turns(done):
        for _ in range(100_000):
            if done():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came to that")

    async def run():
        async with peers(StalledDispatcher(), 7, 7, 8) as (one, other, stranger):
            waiting = one.connection._waiting_of
            one.end.sendall(half)
            stranger.end.sendall(half)
            await turns(lambda: waiting == {7: len(half), 8: len(half)})
            other.end.sendall(half)
            await turns(lambda: other.left)
            # It is told why, and what it held is counted no more; the others go on.
            (told,) = await other.frames(1)
            assert isinstance(from_detail(told.payload, told.code), ResourceExhausted)
            assert waiting == {7: len(half), 8: len(half)}
            one.end.sendall(b"\0")
            await turns(lambda: waiting == {8: len(half)})
            # Replies that are not read count as well: who never reads is ended.
            for _ in range(100_000):
                one.connection.push(session_pb2.JobDone(job_id=1))
                if one.left:
                    break
            assert waiting == {8: len(half)}
            assert not stranger.left

    asyncio.run(run())


def test_a_reply_that_comes_after_the_end_is_dropped():
    async def run():
        dispatcher = StalledDispatcher()
        async with peers(dispatcher) as peer:
            peer.request(1)
            while not dispatcher.done:
                await asyncio.sleep(0)
            peer.end.shutdown(socket.SHUT_WR)
            while not peer.left:
                await asyncio.sleep(0)
            dispatcher.done[0](session_pb2.KeepaliveResponse(), None)
            peer.connection.push(session_pb2.JobDone(job_id=1))
            assert peer.end.recv(100) == b""
            assert peer.left == [SessionId(1)]

    asyncio.run(run())


@pytest.mark.parametrize("kind", [FrameKind.REPLY, FrameKind.HELLO, FrameKind.JOB_DONE])
def test_a_client_sends_requests_only(kind):
    async def run():
        async with peers(StalledDispatcher()) as peer:
            peer.request(9, kind=kind)
            (frame,) = await peer.frames(1)
            assert (frame.call_id, frame.kind) == (9, FrameKind.ERROR)

    asyncio.run(run())


def test_what_is_no_frame_ends_the_session():
    async def run():
        async with peers(StalledDispatcher()) as peer:
            peer.end.sendall(bytes(64))
            (frame,) = await peer.frames(1)
            assert (frame.call_id, frame.kind) == (0, FrameKind.ERROR)
            while not peer.left:
                await asyncio.sleep(0)

    asyncio.run(run())


class QuickDispatcher:
    """Answers at once, and keeps the order."""

    def __init__(self, order):
        self.order = order

    def begin(self, name, ctx, payload, loop, done):
        self.order.append("call")
        return leases_pb2.RenewLeaseResponse(ttl_ms=1)


def test_many_requests_at_once_have_a_turn_each_where_turns_are_short(monkeypatch):
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    order = []

    async def run():
        async with peers(QuickDispatcher(order)) as peer:
            peer.request(*range(1, 51))
            peer.request(*range(51, 61))
            while order.count("call") < 60:
                order.append("others")
                await asyncio.sleep(0)
            answered = [frame.call_id for frame in await peer.frames(60)]
            assert answered == list(range(1, 61))
            # And the connection goes on.
            peer.request(61)
            assert [frame.call_id for frame in await peer.frames(1)] == [61]

    asyncio.run(run())
    # A turn of the loop has one call at most, and one of the others.
    assert all(order[i : i + 3] != ["call"] * 3 for i in range(len(order) - 2))
    assert order.count("others") >= 50


def test_all_of_this_host_is_one_peer():
    assert {peer_name(f"ipv4:127.0.0.{n}:5000{n}") for n in range(1, 9)} == {"loopback"}
    assert peer_name("ipv6:[::1]:4000") == "loopback"
    assert peer_name("ipv4:10.0.0.7:4000") == "ipv4:10.0.0.7"
