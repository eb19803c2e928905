"""Threads of one session hand the reading of its socket on: whoever has its reply leaves, and another goes on at once.

The daemon's side is a socket of the test, so that replies come in the order that it wants.
"""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvstore.client import session_connection
from kvstore.client.arenas import Arenas
from kvstore.client.handshake import Hello, Welcome
from kvstore.client.session_connection import CALLS_MAX, SessionConnection
from kvstore.core.errors import DeadlineExceeded, KVStoreError, NotFound, Unavailable
from kvstore.wire.errors import status_code, to_detail
from kvstore.wire.framing import FrameDecoder, FrameKind, pack_frame
from tests.client.harness import until

LONG_S = 60.0
SOON_S = 20.0
"""Long before a thread that was not woken would wake by itself."""


class Peer:
    """The other end: requests as they come, by their payload, and replies when the test says so."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._decoder = sock, FrameDecoder()
        self._numbers: dict[bytes, int] = {}
        sock.settimeout(SOON_S)

    def wait_for(self, payload: bytes) -> None:
        while payload not in self._numbers:
            for frame in self._decoder.feed(self._socket.recv(1 << 16)):
                self._numbers[frame.payload] = frame.call_id

    def reply(self, *payloads: bytes) -> None:
        """Replies in one piece, each the request's payload again."""
        frames = [pack_frame(self._numbers[payload], FrameKind.REPLY, payload) for payload in payloads]
        self._socket.sendall(b"".join(frames))

    def refuse(self, payload: bytes, error: KVStoreError) -> None:
        detail = to_detail(error).SerializeToString()
        self._socket.sendall(pack_frame(self._numbers[payload], FrameKind.ERROR, detail, code=status_code(error)))


@pytest.fixture
def ends(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(session_connection, "open_session", lambda *_: (ours, Welcome(b"", b"", Arenas(), "")))
    link = SessionConnection("", Hello("test"), 1.0, lambda _: None)
    with ThreadPoolExecutor(CALLS_MAX + 8) as pool:
        yield link, Peer(theirs), pool
        link.close()
        theirs.close()


def begin(link, peer, pool, payload: bytes, timeout_s: float = LONG_S) -> Future[bytes]:
    """A call of its own thread, whose request has come."""
    call = pool.submit(link.call, "x/Y", payload, timeout_s)
    peer.wait_for(payload)
    return call


@pytest.mark.parametrize("order", [b"abc", b"acb", b"bac", b"bca", b"cab", b"cba"])
@pytest.mark.parametrize("together", [False, True])
def test_each_call_returns_when_its_reply_is_there_whoever_reads_it(ends, order, together):
    link, peer, pool = ends
    calls = {}
    for number, payload in enumerate((b"a", b"b", b"c")):
        calls[payload] = begin(link, peer, pool, payload)
        until(lambda: link._leading and link._following == number)  # noqa: B023  it ends before the loop goes on
    order = [bytes([one]) for one in order]
    if together:
        peer.reply(*order)
    for payload in order:
        if not together:
            peer.reply(payload)
        assert calls[payload].result(SOON_S) == payload
    assert (link._leading, link._following, link._calls) == (False, 0, {})
    # And the next one finds nobody in its way.
    last = begin(link, peer, pool, b"d")
    peer.reply(b"d")
    assert last.result(SOON_S) == b"d"


def test_a_leader_whose_time_is_over_leaves_the_socket_to_a_follower(ends):
    link, peer, pool = ends
    short = begin(link, peer, pool, b"short", 0.2)
    long = begin(link, peer, pool, b"long")
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
        short.result(SOON_S)
    until(lambda: link._leading and not link._following)
    peer.reply(b"short", b"long")
    assert long.result(SOON_S) == b"long"


def test_the_end_of_the_session_wakes_leader_and_followers(ends):
    link, peer, pool = ends
    calls = [begin(link, peer, pool, payload) for payload in (b"a", b"b", b"c")]
    until(lambda: link._following == 2)
    link.close()
    for call in calls:
        with pytest.raises(Unavailable, match="closed"):
            call.result(SOON_S)


def test_a_call_that_handles_another_error_gets_its_own(ends):
    link, peer, pool = ends

    def call_again() -> bytes:
        try:
            raise KeyError("an error that the caller has in hand")
        except KeyError:
            return link.call("x/Y", b"a", LONG_S)

    refused = pool.submit(call_again)
    peer.wait_for(b"a")
    peer.refuse(b"a", NotFound("there is no such thing"))
    with pytest.raises(NotFound, match="no such thing"):
        refused.result(SOON_S)
    assert link._calls == {}


def test_a_call_beyond_the_turns_waits_until_one_has_ended(ends):
    link, peer, pool = ends
    payloads = [b"%d" % number for number in range(CALLS_MAX)]
    calls = [begin(link, peer, pool, payload) for payload in payloads]
    extra = pool.submit(link.call, "x/Y", b"extra", LONG_S)
    until(lambda: link._following == CALLS_MAX)
    assert len(link._calls) == CALLS_MAX, "the last one was not sent"
    peer.reply(payloads[30])
    assert calls[30].result(SOON_S) == payloads[30]
    peer.wait_for(b"extra")
    peer.reply(*payloads[:30], *payloads[31:], b"extra")
    assert [call.result(SOON_S) for call in calls] == payloads
    assert extra.result(SOON_S) == b"extra"
