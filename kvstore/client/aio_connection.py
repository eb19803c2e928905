"""The session socket for asyncio: the same frames, awaited. Used by one event loop's thread only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

from kvstore.client.handshake import Hello, Welcome, open_session
from kvstore.client.session_connection import CALLS_MAX
from kvstore.client.steps import Late
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.v1 import session_pb2
from kvstore.wire.errors import from_detail
from kvstore.wire.framing import Frame, FrameDecoder, FrameKind, pack_frame


class Sent(NamedTuple):
    """A request that was sent, and its reply."""

    call_id: int
    reply: asyncio.Future[Frame]


class AsyncSessionConnection(asyncio.Protocol):
    """A session on the session socket."""

    pushes = True
    generation = -1

    def __init__(self, welcome: Welcome, on_done: Callable[[session_pb2.JobDone], None], sock: socket.socket) -> None:
        self.welcome = welcome
        self._socket, self.peer_fd = sock, sock.fileno()
        self._slots = asyncio.Semaphore(CALLS_MAX)
        """Turns: the daemon refuses more calls of one session at a time."""
        self.news = asyncio.Event()
        """Set when a job has ended or the connection has; who waits clears it first."""
        self._on_done = on_done
        self._decoder = FrameDecoder()
        self._calls: dict[int, asyncio.Future[Frame]] = {}
        self._next_id = 1
        self._closed = ""
        self._room = asyncio.Event()
        self._room.set()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls, path: str, hello: Hello, timeout_s: float, on_done: Callable[[session_pb2.JobDone], None]
    ) -> AsyncSessionConnection:
        """Greet in a thread, since mapping and faulting in memory takes its time. Cancelled, it leaves no session."""
        greeting = asyncio.ensure_future(asyncio.to_thread(open_session, path, hello, timeout_s))
        try:
            sock, welcome = await asyncio.shield(greeting)
        except asyncio.CancelledError:
            greeting.add_done_callback(_hang_up)
            raise
        try:
            sock.setblocking(False)
            _, connection = await asyncio.get_running_loop().create_unix_connection(
                lambda: cls(welcome, on_done, sock), sock=sock
            )
        except BaseException:
            sock.close()
            raise
        return connection

    @property
    def closed(self) -> bool:
        """Whether the daemon has gone."""
        return bool(self._closed)

    ended = closed

    async def call(self, method: str, payload: bytes, timeout_s: float, late: Late | None = None) -> bytes:
        """Send a request and wait for its reply; one that comes when nobody waits any more goes to ``late``."""
        return await self.wait(await self.send(method, payload, timeout_s), method, timeout_s, late)

    async def send(self, method: str, payload: bytes, timeout_s: float) -> Sent:
        """Send a request, when it is this call's turn; its reply comes in the future."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError as error:
            raise _late_error(method, timeout_s) from error
        try:
            sent = self._send(method, payload)
        except BaseException:
            self._slots.release()
            raise
        sent.reply.add_done_callback(lambda _: self._slots.release())
        return sent

    def _send(self, method: str, payload: bytes) -> Sent:
        if self._closed or self._transport is None:
            raise Unavailable(self._closed or "the connection has not begun")
        call_id = self._next_id
        self._next_id += 1
        frame = pack_frame(call_id, FrameKind.REQUEST, payload, name=method.encode("ascii"))
        sent = Sent(call_id, asyncio.get_running_loop().create_future())
        self._calls[call_id] = sent.reply
        self._transport.write(frame)
        return sent

    async def wait(self, sent: Sent, method: str, timeout_s: float, late: Late | None = None) -> bytes:
        """Wait for the reply of ``send``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.wait()
                frame = await asyncio.shield(sent.reply)
        except TimeoutError as error:
            self.forget(sent, late)
            raise _late_error(method, timeout_s) from error
        except asyncio.CancelledError:
            self.forget(sent, late)
            raise
        if frame.kind == FrameKind.ERROR:
            raise from_detail(frame.payload, frame.code)
        return frame.payload

    def forget(self, sent: Sent, late: Late | None = None) -> None:
        """Nobody waits for the reply any more: hand it to ``late`` when it comes, or drop it."""
        if late is not None:
            sent.reply.add_done_callback(lambda reply: _hand_over(reply, late))

    def post(self, method: str, payload: bytes) -> None:
        """Send a request whose reply nobody needs."""
        self._send(method, payload)

    def pump(self) -> None:
        """See ``steps.Link``: the loop takes in what comes."""

    def abandon(self) -> None:
        """See ``steps.Link``. The loop is the parent's too, so it is told nothing."""
        self._closed = self._closed or "this session belongs to the process that forked"
        self._transport = None
        fd = self._socket.detach()
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._end("the client has closed this session")

    async def wait_closed(self) -> None:
        """Return at once: closing the socket ends the session, and nothing has to be said."""

    def _end(self, message: str) -> None:
        if not self._closed:
            self._closed = message
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(Unavailable(message))
                    # Marks it as seen: a caller that was cancelled meanwhile will not ask.
                    future.exception()
            self._calls.clear()
            self.news.set()
            self._room.set()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._end(f"the daemon closed the connection{f': {exc}' if exc else ''}")

    def pause_writing(self) -> None:
        """Called by the loop."""
        self._room.clear()

    def resume_writing(self) -> None:
        """Called by the loop."""
        self._room.set()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        try:
            for frame in self._decoder.feed(data):
                self._hand_out(frame)
        except KVStoreError as error:
            self._end(f"the daemon sent an invalid frame: {error}")

    def _hand_out(self, frame: Frame) -> None:
        if frame.kind == FrameKind.JOB_DONE:
            self._on_done(session_pb2.JobDone.FromString(frame.payload))
            self.news.set()
            return
        if frame.call_id == 0:
            self._end(str(from_detail(frame.payload, frame.code)))
            return
        future = self._calls.pop(frame.call_id, None)
        if future is not None and not future.done():
            future.set_result(frame)

    async def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``ready()``, or the time is over, or the connection has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not ready() and not self._closed:
                    self.news.clear()
                    await self.news.wait()


def _hang_up(greeting: asyncio.Future[tuple[socket.socket, Welcome]]) -> None:
    """Nobody wants the session that was opened meanwhile."""
    if not greeting.cancelled() and greeting.exception() is None:
        greeting.result()[0].close()


def _hand_over(reply: asyncio.Future[Frame], late: Late) -> None:
    if not reply.cancelled() and reply.exception() is None and reply.result().kind == FrameKind.REPLY:
        late(reply.result().payload)


def _late_error(method: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method} did not answer within {timeout_s:g} s", field="timeout", value=timeout_s)
