"""The fast path: calls over the session socket, from any number of threads.

There is no reader thread, since handing a reply from one thread to another costs more than the call. A caller
that waits reads the socket itself while nobody else does (it *leads*), and hands out the frames it finds; the
others sleep until their reply is there or the lead is free. One condition's lock guards every field; it is never
held while the leader waits for the socket. A second lock keeps the bytes of two requests apart.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.client.handshake import Hello, open_session
from kvstore.client.steps import Late
from kvstore.core.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable
from kvstore.v1 import session_pb2
from kvstore.wire.errors import from_detail
from kvstore.wire.framing import FRAME_BYTES_MAX, HEADER, HEADER_BYTES, LENGTH_BYTES, Frame, FrameDecoder, FrameKind

_RECEIVE_BYTES: Final = 262144
_REQUEST: Final = int(FrameKind.REQUEST)
_REPLY: Final = int(FrameKind.REPLY)
CALLS_MAX: Final = 60
"""Calls that a session has under way at one time; the daemon refuses more than 64."""

POST_SECONDS_MAX: Final = 10.0
"""Longest that a posted request waits for room in the socket."""


@dataclass(slots=True)
class _Call:
    """One request under way and its reply, once it is there."""

    frame: Frame | None = None


class SessionConnection:
    """A session on the session socket; meets ``connection.Connection``."""

    pushes = True
    generation = -1

    def __init__(
        self, path: str, hello: Hello, timeout_s: float, on_done: Callable[[session_pb2.JobDone], None]
    ) -> None:
        """``on_done`` is called with the lock held for each job that ends; it must be quick and call nothing here."""
        self._socket, self.welcome = open_session(path, hello, timeout_s)
        self.peer_fd = self._socket.fileno()
        self._on_done = on_done
        self._socket.setblocking(False)
        self._reads = select.poll()
        self._reads.register(self._socket, select.POLLIN)
        self._decoder = FrameDecoder()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._following = 0
        """Threads that wait for what the leader finds."""
        self.closed = False
        """See ``steps.Link``."""
        self._sending = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._late: dict[int, Late] = {}
        """By call id: what takes a reply whose caller has gone."""
        self._due: list[tuple[Late, bytes]] = []
        """Late replies that have come; handed over without the lock."""
        self._next_id = 1
        self._leading = False
        self._closed = ""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        self._poller.register(self._socket, select.EPOLLIN)
        self._poller.register(self._bell, select.EPOLLIN)

    def call(self, method: str, payload: bytes, timeout_s: float, late: Late | None = None) -> bytes:
        """Send a request and wait for its reply; one that comes later than ``timeout_s`` goes to ``late``.

        Nearly always nobody else reads the socket, and the next frame is the reply: then nothing is looked up, and
        no other function of ours is called but for sending. In any other case this is ``send`` and ``wait``.
        """
        with self._lock:
            alone = not (self._leading or self._closed or self._decoder.held or len(self._calls) >= CALLS_MAX)
            if alone:
                self._leading = True
                call_id = self._next_id
                self._next_id = call_id + 1
                self._calls[call_id] = _Call()
        if not alone:
            return self.wait(self.send(method, payload, timeout_s), method, timeout_s, late)
        deadline = time.monotonic() + timeout_s
        reply: bytes | None = None
        try:
            self._request(call_id, method, payload, deadline)
            plain = True
            while plain and reply is None and self._reads.poll(max(0.0, deadline - time.monotonic()) * 1000):
                # Errors and ends of the socket are found again by the slow way.
                data = self._socket.recv(_RECEIVE_BYTES)
                begin, size = 0, len(data)
                while reply is None and size - begin >= HEADER_BYTES:
                    length, answered, kind, _, _ = HEADER.unpack_from(data, begin)
                    end = begin + LENGTH_BYTES + length
                    if end > size or kind != _REPLY:
                        break
                    if answered == call_id:
                        reply = data[begin + HEADER_BYTES : end]
                    elif answered in self._calls or answered in self._late:
                        break
                    # What is neither was posted, and its reply is of no interest.
                    begin = end
                if begin < size or not data:
                    plain = False
                    with self._lock:
                        self._take_in(data[begin:])
        except OSError as error:
            raise self._end(f"the connection to the daemon broke: {error}") from error
        except BaseException:
            self.forget(call_id, late)
            raise
        finally:
            with self._lock:
                self._leading = False
                if reply is not None:
                    # The session may have ended meanwhile, and its calls with it; the reply is whole all the same.
                    self._calls.pop(call_id, None)
                if self._following or self._closed:
                    # ``close`` waits for the leader, too.
                    self._changed.notify_all()
        if reply is not None:
            return reply
        if self._due:
            self._hand_over()
        return self._wait(call_id, method, (deadline, timeout_s), late)

    def post(self, method: str, payload: bytes) -> None:
        """Send a request whose reply nobody needs."""
        with self._lock:
            if self._closed:
                raise Unavailable(self._closed)
            call_id = self._next_id
            self._next_id = call_id + 1
        self._request(call_id, method, payload, time.monotonic() + POST_SECONDS_MAX)

    def _request(self, call_id: int, method: str, payload: bytes, deadline: float) -> None:
        """Send one request, whole."""
        name = method.encode("ascii")
        length = HEADER_BYTES - LENGTH_BYTES + len(name) + len(payload)
        if length > FRAME_BYTES_MAX:
            most = f"at most {FRAME_BYTES_MAX} bytes; send fewer keys a call"
            raise InvalidArgument("message", f"{length} bytes", most)
        frame = HEADER.pack(length, call_id, _REQUEST, 0, len(name)) + name + payload
        with self._sending:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._end(f"the connection to the daemon broke: {error}") from error
            if sent < len(frame):
                self._send_all(frame[sent:], deadline)

    def send(self, method: str, payload: bytes, timeout_s: float) -> int:
        """Send a request and return its call id; every one sent must be waited for or forgotten.

        It waits for its turn where the daemon takes no more calls of one session at a time.
        """
        if len(self._calls) >= CALLS_MAX:
            self.wait_until(lambda: len(self._calls) < CALLS_MAX, timeout_s)
        with self._changed:
            if self._closed:
                raise Unavailable(self._closed)
            call_id = self._next_id
            self._next_id += 1
            self._calls[call_id] = _Call()
        try:
            self._request(call_id, method, payload, time.monotonic() + timeout_s)
        except BaseException:
            self.forget(call_id)
            raise
        return call_id

    def forget(self, call_id: int, late: Late | None = None) -> None:
        """Nobody waits for the reply of a call any more: hand it to ``late`` when it comes, or drop it."""
        with self._changed:
            call = self._calls.pop(call_id, None)
            if len(self._calls) == CALLS_MAX - 1:
                # Who waits for a turn may have looked when the reply came, before this call gave its own back.
                self._changed.notify_all()
            if late is None or self._closed:
                return
            if call is None or call.frame is None:
                self._late[call_id] = late
                return
            reply = call.frame
        if reply.kind == FrameKind.REPLY:
            late(reply.payload)

    def _send_all(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self._await_room(deadline)
            except OSError as error:
                raise self._end(f"the connection to the daemon broke: {error}") from error

    def _await_room(self, deadline: float) -> None:
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        if not room.poll(max(0.0, deadline - time.monotonic()) * 1000):
            # A half-sent request can not be taken back, so the connection is of no more use.
            raise self._end("the daemon does not read its socket")

    def wait(self, call_id: int, method: str, timeout_s: float, late: Late | None = None) -> bytes:
        """Wait for the reply of a call that was sent."""
        return self._wait(call_id, method, (time.monotonic() + timeout_s, timeout_s), late)

    def _wait(self, call_id: int, method: str, time_left: tuple[float, float], late: Late | None) -> bytes:
        """``time_left``: the deadline, and the seconds that it was made of, for people."""
        call = self._calls.get(call_id, _Call())
        deadline, timeout_s = time_left
        try:
            self.wait_until(lambda: call.frame is not None, deadline - time.monotonic())
        except BaseException:
            self.forget(call_id, late)
            raise
        frame = call.frame
        self.forget(call_id, late if frame is None else None)
        if frame is None:
            if self._closed:
                raise Unavailable(self._closed)
            raise DeadlineExceeded(f"{method} did not answer within {timeout_s:g} s", field="timeout", value=timeout_s)
        if frame.kind == FrameKind.ERROR:
            raise from_detail(frame.payload, frame.code)
        return frame.payload

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """See ``Connection``: lead or follow until then."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not ready() and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if self._leading:
                    self._following += 1
                    try:
                        self._changed.wait(left)
                    finally:
                        self._following -= 1
                    continue
                self._leading = True
                try:
                    self._lead(left)
                finally:
                    self._leading = False
                    self._changed.notify_all()
        if self._due:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give late replies to whom they concern. Without the lock, since that may send."""
        with self._changed:
            due, self._due = self._due, []
        for late, reply in due:
            late(reply)

    def _lead(self, timeout_s: float) -> None:
        """Wait for the socket once, with the lock let go, and hand out what came."""
        self._changed.release()
        try:
            data = self._receive(timeout_s)
        finally:
            self._changed.acquire()
        if data is not None:
            self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        """Hand out what came; no bytes are the connection's end. Lock held."""
        if not data:
            self._end_locked("the daemon closed the connection")
            return
        try:
            frames = self._decoder.feed(data)
        except KVStoreError as error:
            self._end_locked(f"the daemon sent an invalid frame: {error}")
            return
        for frame in frames:
            self._hand_out(frame)

    def _receive(self, timeout_s: float) -> bytes | None:
        """Bytes that came; None if nothing came in time, no bytes if the connection has ended."""
        if not self._reads.poll(timeout_s * 1000):
            return None
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _hand_out(self, frame: Frame) -> None:
        if frame.kind == FrameKind.JOB_DONE:
            self._on_done(session_pb2.JobDone.FromString(frame.payload))
            os.eventfd_write(self._bell, 1)
            return
        if frame.call_id == 0:
            self._end_locked(str(from_detail(frame.payload, frame.code)))
            return
        call = self._calls.get(frame.call_id)
        if call is not None:
            call.frame = frame
        elif self._late:
            late = self._late.pop(frame.call_id, None)
            if late is not None and frame.kind == FrameKind.REPLY:
                self._due.append((late, frame.payload))

    def pump(self) -> None:
        """See ``Connection``."""
        with self._changed:
            if not self._leading and not self._closed:
                while data := self._receive_now():
                    for frame in self._decoder.feed(data):
                        self._hand_out(frame)
                self._changed.notify_all()
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
        if self._due:
            self._hand_over()

    def _receive_now(self) -> bytes:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            self._end_locked(f"the connection to the daemon broke: {error}")
            return b""
        if not data:
            self._end_locked("the daemon closed the connection")
        return data

    def fileno(self) -> int:
        """See ``Connection``. An epoll descriptor: readable also when another thread has read the end of a job."""
        return self._poller.fileno()

    def _end(self, message: str) -> Unavailable:
        with self._changed:
            self._end_locked(message)
        return Unavailable(self._closed)

    def _end_locked(self, message: str) -> None:
        if not self._closed:
            self._closed, self.closed = message, True
            self._calls.clear()
            self._late.clear()
            self._changed.notify_all()

    def abandon(self) -> None:
        """In the child of a fork: close what was inherited, and nothing else. No other thread lives here.

        The parent's session ends when its own descriptors are closed, so none of ours may stay open.
        """
        self._closed = self._closed or "this session belongs to the process that forked"
        self.closed = True
        self._lock, self._sending = threading.RLock(), threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leading = False
        self._calls.clear()
        self._late.clear()
        if self._bell >= 0:
            self._poller.close()
            os.close(self._socket.detach())
            os.close(self._bell)
            self._bell = -1

    def close(self) -> None:
        """See ``Connection``."""
        with contextlib.suppress(OSError):
            # Wakes a leader that waits for the socket; only then may the descriptor be closed.
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._end_locked("the client has closed this session")
            while self._leading:
                self._changed.wait()
            if self._bell >= 0:
                self._poller.close()
                self._socket.close()
                os.close(self._bell)
                self._bell = -1
