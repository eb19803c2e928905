"""One session's calls over the session socket.

Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from google.protobuf.message import Message

from kvstore.core.errors import InvalidArgument, KVStoreError, ResourceExhausted
from kvstore.core.request import REQUEST
from kvstore.core.types import SessionId
from kvstore.rpc.context import CallContext
from kvstore.rpc.dispatch import Dispatcher
from kvstore.store.session import Session
from kvstore.v1 import session_pb2
from kvstore.wire.errors import status_code, to_detail
from kvstore.wire.framing import Frame, FrameDecoder, FrameKind, pack_frame

log = logging.getLogger(__name__)

CALLS_MAX: Final = 64
"""Calls that one connection may have under way; one more is refused."""

UID_CALLS_MAX: Final = 192
"""Calls that the sessions of one user may have under way: one user never takes all places in the daemon's pools. What
would take one more waits unread in its connection, in the order in which the connections came; calls that take none
(a release, a match) go on."""

WAITING_BYTES_MAX: Final = 64 << 20
"""Bytes of half requests and of replies that nobody reads, of all sessions of one user; who adds more is ended."""

TURN_S: Final = 0.002
"""Longest that the requests of one client are handled before others have their turn."""

READ_BYTES: Final = 256 << 10
"""Most bytes that are read from one connection before the others have their turn."""

_REQUEST: Final = int(FrameKind.REQUEST)


def error_frame(call_id: int, error: KVStoreError) -> bytes:
    """The frame of a call that failed."""
    detail = to_detail(error).SerializeToString()
    return pack_frame(call_id, FrameKind.ERROR, detail, code=status_code(error))


class Shares:
    """What the sessions of each user have under way, by uid; of sessions that have ended, the calls that have not."""

    def __init__(self) -> None:
        self.calls: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        """Bytes of half requests and unread replies."""
        self.lines: dict[int, deque[Connection]] = {}
        """Connections whose next call waits until one of their user's has ended."""

    def stand_in_line(self, uid: int, connection: Connection, *, first: bool) -> None:
        """Let ``connection`` have another turn when there is room."""
        line = self.lines.setdefault(uid, deque())
        if first:
            line.appendleft(connection)
        else:
            line.append(connection)

    def call_next(self, uid: int) -> None:
        """Where there is room for a call of this user, give the first in its line a turn."""
        line = self.lines.get(uid)
        if line is None or self.calls.get(uid, 0) >= UID_CALLS_MAX:
            return
        line.popleft().have_turn()
        if not line:
            del self.lines[uid]


class Connection:
    """One session's calls. Replies to calls that run on the loop leave in the order of their requests.

    A reader of the socket and no transport of asyncio's: what a client sends is handled in the turn in which it came,
    and mostly its reply leaves in the same. While a client does not read its replies nothing is read from it, so what
    waits for it stays bounded.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        ctx: CallContext,
        connection: socket.socket,
        left: Callable[[SessionId], None],
        shares: Shares,
    ) -> None:
        self._dispatcher = dispatcher
        self._ctx = ctx
        self.session: Session = ctx.session
        self._uid = self.session.uid
        self._number = int(self.session.session_id)
        self._left = left
        self._decoder = FrameDecoder()
        self._calls = 0
        self._shares = shares
        self._calls_of = shares.calls
        self._waiting_of = shares.waiting
        self._counted = 0
        """Bytes of this connection in ``_waiting_of``."""
        self.called = False
        """Whether any request came over this socket."""
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = connection
        self._unsent = bytearray()
        self._waiting: deque[Frame] = deque()
        """Frames that came and have not had their turn."""
        self._paused = False
        """Whether nothing is read now."""
        self._scheduled = False
        """Whether these will have another turn."""
        self._had_turn = False
        """Whether it has come to the head of its user's line: who took the place before it came later."""
        self._ending = False

    def begin(self, behind: bytes) -> None:
        """Serve what came behind the Hello, and then whatever comes."""
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._readable)
        if behind:
            self._readable(behind)

    def _readable(self, data: bytes = b"") -> None:
        if self._socket is None:
            return
        try:
            data = data or self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.abort()
            return
        try:
            frames = self._decoder.feed(data)
            if self._decoder.held or self._counted:
                self._count_waiting()
        except KVStoreError as error:
            log.warning("session of %s ended: %s", self._ctx.peer, error)
            self._ending = True
            self._write(error_frame(0, error))
            if not self._unsent:
                self.abort()
            return
        self._waiting.extend(frames)
        self._serve()

    def _serve(self) -> None:
        """Handle what came, for as long as a turn of the loop may take; the rest has its turn behind everybody else.

        Nothing more is read until it is through, and nothing is handled while the client does not read its replies.
        """
        self._scheduled = False
        until, full = time.monotonic() + TURN_S, False
        while self._waiting and not self._unsent and self._socket is not None:
            if self._calls_of.get(self._uid, 0) >= UID_CALLS_MAX and self._dispatcher.takes_place(self._waiting[0]):
                full = True
                break
            self._handle(self._waiting.popleft())
            if self._waiting and time.monotonic() >= until:
                break
        if self._socket is None or self._unsent:
            return
        if self._waiting:
            self._pause()
            self._scheduled = True
            if full:
                self._shares.stand_in_line(self._uid, self, first=self._had_turn)
            else:
                self._loop.call_soon(self._serve)
        elif self._paused:
            self._paused = False
            self._loop.add_reader(self._socket, self._readable)

    def have_turn(self) -> None:
        """There is room for a call of this user: serve it, and whoever stands behind if it was not needed here."""
        self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._had_turn = True
        self._serve()
        self._had_turn = False
        self._shares.call_next(self._uid)

    def _count_waiting(self) -> None:
        """Count what waits here. Raises ResourceExhausted if it is too much for one user."""
        waits = self._decoder.held + len(self._unsent)
        if waits == self._counted:
            return
        everything = self._waiting_of.pop(self._uid, 0) + waits - self._counted
        more, self._counted = waits > self._counted, waits
        if everything:
            self._waiting_of[self._uid] = everything
        if more and everything > WAITING_BYTES_MAX:
            raise ResourceExhausted(
                f"{everything} bytes of half requests and unread replies of uid {self._uid} wait",
                field="requests", value=everything, expected=f"at most {WAITING_BYTES_MAX}; send and read whole ones",
            )  # fmt: skip

    def _pause(self) -> None:
        if not self._paused and self._socket is not None:
            self._paused = True
            self._loop.remove_reader(self._socket)

    def _handle(self, frame: Frame) -> None:
        call_id, kind, _, name, payload = frame
        self.called = True
        token = REQUEST.set(f"{self._number}-{call_id}")
        try:
            if kind != _REQUEST:
                raise InvalidArgument("frame.kind", kind, f"{_REQUEST}, a request")
            if self._calls >= CALLS_MAX:
                raise ResourceExhausted(
                    f"{self._calls} calls of this session are under way",
                    field="calls", value=self._calls, expected=f"at most {CALLS_MAX}",
                )  # fmt: skip
            done = partial(self._finish, call_id)
            reply = self._dispatcher.begin(name, self._ctx, payload, self._loop, done)
            if isinstance(reply, Message):
                self._write(pack_frame(call_id, FrameKind.REPLY, reply.SerializeToString()))
            else:
                self._calls += 1
                self._calls_of[self._uid] = self._calls_of.get(self._uid, 0) + 1
        except KVStoreError as error:
            self._write(error_frame(call_id, error))
        finally:
            REQUEST.reset(token)

    def _finish(self, call_id: int, reply: Message | None, error: KVStoreError | None) -> None:
        self._calls -= 1
        self._calls_of[self._uid] -= 1
        if not self._calls_of[self._uid]:
            del self._calls_of[self._uid]
        if self._shares.lines:
            self._shares.call_next(self._uid)
        try:
            if error is not None:
                self._write(error_frame(call_id, error))
            elif reply is not None:
                self._write(pack_frame(call_id, FrameKind.REPLY, reply.SerializeToString()))
        except InvalidArgument as too_long:
            self._write(error_frame(call_id, too_long))

    def push(self, done: session_pb2.JobDone) -> None:
        """Send what nobody asked for."""
        self._write(pack_frame(0, FrameKind.JOB_DONE, done.SerializeToString()))

    def _write(self, frame: bytes) -> None:
        if self._socket is None:
            return
        if self._unsent:
            self._unsent += frame
            self._bound_unsent()
            return
        try:
            sent = self._socket.send(frame)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.abort()
            return
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._pause()
            self._loop.add_writer(self._socket, self._writable)
            self._bound_unsent()

    def _bound_unsent(self) -> None:
        try:
            self._count_waiting()
        except ResourceExhausted as error:
            log.warning("session of %s ended: %s", self._ctx.peer, error)
            self.abort()

    @property
    def waits_for_reader(self) -> bool:
        """Whether replies wait for the client to read; nothing is read from it meanwhile."""
        return bool(self._unsent)

    def _writable(self) -> None:
        """The client reads again."""
        if self._socket is None:
            return
        try:
            sent = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.abort()
            return
        del self._unsent[:sent]
        self._count_waiting()
        if self._unsent:
            return
        self._loop.remove_writer(self._socket)
        if self._ending:
            self.abort()
        elif not self._scheduled:
            self._serve()

    def abort(self) -> None:
        """Close without waiting for what is unsent; the session ends with it. Idempotent."""
        connection, self._socket = self._socket, None
        if connection is None:
            return
        self._loop.remove_reader(connection)
        self._loop.remove_writer(connection)
        connection.close()
        self._unsent.clear()
        self._decoder = FrameDecoder()
        self._count_waiting()
        self._ctx.gone.set()
        self._left(self.session.session_id)
