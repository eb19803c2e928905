"""The session socket for asyncio: the same frames, awaited. Used by one event loop's thread only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvstore.client.handshake import Hello, Welcome, open_session
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.v1 import session_pb2
from kvstore.wire.errors import from_detail
from kvstore.wire.framing import Frame, FrameDecoder, FrameKind, pack_frame


class AsyncSessionConnection(asyncio.Protocol):
    """A session on the session socket."""

    pushes = True

    def __init__(self, welcome: Welcome, on_done: Callable[[session_pb2.JobDone], None]) -> None:
        self.welcome = welcome
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
        """Greet in a thread, since mapping and faulting in memory takes its time."""
        sock, welcome = await asyncio.to_thread(open_session, path, hello, timeout_s)
        sock.setblocking(False)
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            lambda: cls(welcome, on_done), sock=sock
        )
        return connection

    @property
    def closed(self) -> bool:
        """Whether the daemon has gone."""
        return bool(self._closed)

    async def call(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        """Send one request and return the reply's bytes. Raises domain errors, DeadlineExceeded after ``timeout_s``."""
        call_id, future = self.send(method, payload)
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.wait()
                frame = await future
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{method} did not answer within {timeout_s:g} s", field="timeout", value=timeout_s
            ) from error
        finally:
            self._calls.pop(call_id, None)
        if frame.kind == FrameKind.ERROR:
            raise from_detail(frame.payload, frame.code)
        return frame.payload

    def send(self, method: str, payload: bytes) -> tuple[int, asyncio.Future[Frame]]:
        """Send a request; its reply comes in the future."""
        if self._closed or self._transport is None:
            raise Unavailable(self._closed or "the connection has not begun")
        call_id = self._next_id
        self._next_id += 1
        frame = pack_frame(call_id, FrameKind.REQUEST, payload, name=method.encode("ascii"))
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._transport.write(frame)
        return call_id, future

    def post(self, method: str, payload: bytes) -> None:
        """Send a request whose reply nobody needs."""
        call_id, _ = self.send(method, payload)
        del self._calls[call_id]

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
        future = self._calls.get(frame.call_id)
        if future is not None and not future.done():
            future.set_result(frame)

    async def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``ready()``, or the time is over, or the connection has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not ready() and not self._closed:
                    self.news.clear()
                    await self.news.wait()
