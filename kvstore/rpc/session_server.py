"""The session socket: hands out memory, then carries the protos' own requests and replies (session.proto).

Everything here runs on the event loop's thread. A connection is a session: when it closes, for whatever
reason, leases, reservations and buffer of that session are gone before the loop turns to anything else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from google.protobuf.message import Message

from kvstore.cache import FetchResult
from kvstore.core.errors import (
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    UnknownJob,
)  # fmt: skip
from kvstore.core.types import Area, JobId, SessionId
from kvstore.rpc.arenas import ArenaExport
from kvstore.rpc.context import CallContext
from kvstore.rpc.dispatch import Dispatcher, parse
from kvstore.rpc.listener import Acceptor, PeerCredentials, bind_unix, peer_credentials, remove_socket
from kvstore.store.session import Session
from kvstore.v1 import session_pb2
from kvstore.wire.errors import as_domain, status_code, to_detail
from kvstore.wire.framing import PROTOCOL_VERSION, Frame, FrameDecoder, FrameKind, first_frame, pack_frame
from kvstore.wire.verbs.checks import name_of
from kvstore.wire.verbs.reads import fetch_message

log = logging.getLogger(__name__)

HELLO_SECONDS_MAX: Final = 5.0
CALLS_MAX: Final = 64
"""Calls that one connection may have under way; one more is refused."""

UID_CALLS_MAX: Final = 192
"""Calls that the sessions of one user may have under way: one user never takes all places in the daemon's pools."""

GREETINGS_MAX: Final = 256
"""Connections that may be without a session at one time; one more, and the oldest is closed."""

READ_BYTES: Final = 256 << 10
"""Most bytes that are read from one connection before the others have their turn."""

_REQUEST: Final = int(FrameKind.REQUEST)
_HELLO_BYTES_MAX: Final = 4096
TURN_S: Final = 0.002
"""Longest that the requests of one client are handled before others have their turn."""

_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC})
"""What the kernel says where it has no descriptors or no memory for one session more."""


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Where the socket is, who may connect, whose calls have admin rights, and who may map memory that is writable to
    all who map it (DEVICE on a GPU)."""

    path: Path
    mode: int = 0o600
    admin_uids: frozenset[int] = field(default_factory=lambda: frozenset({0, os.getuid()}))
    device_uids: frozenset[int] = field(default_factory=lambda: frozenset({0, os.getuid()}))


class SessionServer:
    """Accepts connections and keeps one ``_Connection`` a session."""

    def __init__(self, dispatcher: Dispatcher, exports: Sequence[ArenaExport], options: SocketOptions) -> None:
        self._dispatcher = dispatcher
        self._exports = tuple(exports)
        self._options = options
        self._connections: dict[SessionId, _Connection] = {}
        self._greetings: dict[asyncio.Task[None], None] = {}
        """Connections without a session yet, the oldest first."""
        self._calls: dict[int, int] = {}
        """Calls under way, by uid."""
        self._acceptor: Acceptor | None = None
        self._closer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-end")
        """Ends sessions, one after another."""

    async def start(self) -> None:
        """Bind the socket and begin to accept."""
        self._acceptor = Acceptor(bind_unix(self._options.path, self._options.mode), self._accepted)

    async def stop(self) -> None:
        """Stop accepting, end every connection and with it its session, remove the socket file. Idempotent."""
        if self._acceptor is None:
            return
        self._acceptor.close()
        self._acceptor = None
        for task in list(self._greetings):
            task.cancel()
        for connection in list(self._connections.values()):
            connection.abort()
        await asyncio.sleep(0)
        await asyncio.to_thread(self._closer.shutdown)
        remove_socket(self._options.path)

    def job_done(self, session_id: SessionId, job_id: JobId, result: FetchResult) -> None:
        """Tell a session that its job has ended; nothing for sessions that are gone or not on this socket."""
        connection = self._connections.get(session_id)
        if connection is None:
            return
        connection.push(session_pb2.JobDone(job_id=job_id, result=fetch_message(result)))
        if connection.called:
            self._mark_read(connection.session, job_id)

    def _mark_read(self, session: Session, job_id: JobId) -> None:
        """A client that calls over this socket reads what is pushed to it, so the store need not keep the answer.

        Clients that only call over gRPC may ask with WaitJob instead; for them it is kept for its time.
        """
        try:
            session.wait_job(job_id, 0)
        except (UnknownJob, Unauthenticated) as error:
            log.debug("job %d needs no more keeping: %s", job_id, error)

    def _accepted(self, connection: socket.socket) -> None:
        if len(self._greetings) >= GREETINGS_MAX:
            # The oldest has had the most time to say its Hello.
            next(iter(self._greetings)).cancel()
        task = asyncio.get_running_loop().create_task(self._greet(connection))
        self._greetings[task] = None
        task.add_done_callback(lambda ended: self._greetings.pop(ended, None))

    async def _greet(self, connection: socket.socket) -> None:
        """Read a Hello, open the session, answer with a Welcome and the descriptors."""
        session: Session | None = None
        peer = peer_credentials(connection)
        sessions = self._dispatcher.services.sessions
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                call_id, hello, behind = await _read_hello(connection)
            # In the pool, since the buffer's pages are faulted in: 70 ms for 64 MiB where there are no huge pages.
            session = await self._dispatcher.work(partial(self._open, hello, peer))
            admin = peer.uid in self._options.admin_uids
            token = sessions.add_local(session, admin=admin)
            self._welcome(connection, call_id, token, self._shared(hello, session))
            ctx = CallContext(self._dispatcher.services, session, admin, f"pid {peer.pid} uid {peer.uid}")
            joined = self._connections[session.session_id] = _Connection(
                self._dispatcher, ctx, connection, self._left, self._calls
            )
            joined.begin(behind)
        except (KVStoreError, OSError, TimeoutError, asyncio.CancelledError) as error:
            log.warning("session of pid %d not opened: %s", peer.pid, error or type(error).__name__)
            if session is not None:
                sessions.close(session.session_id)
                session.close()
            if isinstance(error, OSError) and error.errno in _EXHAUSTED:
                error = ResourceExhausted(f"no session can be opened now: {error}", field="sessions")
            if isinstance(error, KVStoreError):
                _send_small(connection, _error_frame(0, error), ())
            connection.close()

    def _open(self, hello: session_pb2.Hello, peer: PeerCredentials) -> Session:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise InvalidArgument("protocol_version", hello.protocol_version, str(PROTOCOL_VERSION))
        return self._dispatcher.services.store.open_session(
            name_of("name", hello.name), buffer_bytes=hello.buffer_bytes, uid=peer.uid, pid=peer.pid
        )

    def _shared(self, hello: session_pb2.Hello, session: Session) -> list[ArenaExport]:
        """The arenas for one session: those of the node that it asked for, and its buffer."""
        trusted = session.uid in self._options.device_uids
        shared = [
            e for e in self._exports if e.area is not Area.DEVICE or (hello.device and (trusted or not e.writable))
        ]
        if session.buffer_fd >= 0:
            # The versions of a buffer's pages lie behind its bytes, as in every memfd arena.
            behind = session.buffer_bytes
            shared.append(ArenaExport(Area.BUFFER, behind, session.buffer_fd, writable=True, versions_offset=behind))
        return shared

    def _welcome(self, connection: socket.socket, call_id: int, token: bytes, shared: list[ArenaExport]) -> None:
        services = self._dispatcher.services
        welcome = session_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            boot_id=services.store.boot_id,
            token=token,
            arenas=[export.message() for export in shared],
            version=services.version,
        )
        frame = pack_frame(call_id, FrameKind.WELCOME, welcome.SerializeToString())
        _send_small(connection, frame, [export.fd for export in shared if export.fd >= 0])

    def _left(self, session_id: SessionId) -> None:
        """A session has ended. What it held goes in a thread: it may be millions of blocks, and the loop has others."""
        self._connections.pop(session_id, None)
        self._closer.submit(self._dispatcher.services.sessions.close, session_id)


async def _read_hello(connection: socket.socket) -> tuple[int, session_pb2.Hello, bytes]:
    """Call id, Hello, and what came behind it: a client need not wait for the Welcome with its first requests."""
    loop = asyncio.get_running_loop()
    data = b""
    while True:
        more = await loop.sock_recv(connection, _HELLO_BYTES_MAX)
        if not more:
            raise Unavailable("the peer closed before its Hello")
        data += more
        frame, behind = first_frame(data)
        if len(data) - len(behind) > _HELLO_BYTES_MAX or (frame is None and len(data) >= _HELLO_BYTES_MAX):
            raise InvalidArgument("hello", f"{len(data)} bytes", f"a frame of at most {_HELLO_BYTES_MAX} bytes")
        if frame is not None:
            break
    if frame.kind != FrameKind.HELLO:
        raise InvalidArgument("frame.kind", frame.kind, f"{int(FrameKind.HELLO)}, a Hello first")
    hello = parse(session_pb2.Hello, frame.payload)
    if not isinstance(hello, session_pb2.Hello):
        raise InvalidArgument("hello", type(hello).__name__, "a Hello")
    return frame.call_id, hello, behind


def _send_small(connection: socket.socket, frame: bytes, fds: Sequence[int]) -> None:
    """Send one small frame at once; a fresh socket's buffer always has room for it."""
    sent = socket.send_fds(connection, [frame], list(fds))
    if sent != len(frame):
        raise Unavailable("the peer does not read its Welcome")


def _error_frame(call_id: int, error: KVStoreError) -> bytes:
    detail = to_detail(error).SerializeToString()
    return pack_frame(call_id, FrameKind.ERROR, detail, code=status_code(error))


class _Connection:
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
        calls_of: dict[int, int],
    ) -> None:
        self._dispatcher = dispatcher
        self._ctx = ctx
        self.session: Session = ctx.session
        self._uid = self.session.uid
        self._left = left
        self._decoder = FrameDecoder()
        self._calls = 0
        self._calls_of = calls_of
        """Calls under way of all sessions, by uid; those of sessions that have ended count until they have."""
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
        except InvalidArgument as error:
            log.warning("session of %s ended: %s", self._ctx.peer, error)
            self._ending = True
            self._write(_error_frame(0, error))
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
        until = self._loop.time() + TURN_S
        while self._waiting and not self._unsent and self._socket is not None:
            self._handle(self._waiting.popleft())
            if self._waiting and self._loop.time() >= until:
                break
        if self._socket is None or self._unsent:
            return
        if self._waiting:
            self._pause()
            self._scheduled = True
            self._loop.call_soon(self._serve)
        elif self._paused:
            self._paused = False
            self._loop.add_reader(self._socket, self._readable)

    def _pause(self) -> None:
        if not self._paused and self._socket is not None:
            self._paused = True
            self._loop.remove_reader(self._socket)

    def _handle(self, frame: Frame) -> None:
        call_id, kind, _, name, payload = frame
        self.called = True
        try:
            if kind != _REQUEST:
                raise InvalidArgument("frame.kind", kind, f"{_REQUEST}, a request")
            if self._calls >= CALLS_MAX or self._calls_of.get(self._uid, 0) >= UID_CALLS_MAX:
                self._refuse()
            done = partial(self._finish, call_id, name)
            reply = self._dispatcher.begin(name, self._ctx, payload, self._loop, done)
            if isinstance(reply, Message):
                self._write(pack_frame(call_id, FrameKind.REPLY, reply.SerializeToString()))
            else:
                self._calls += 1
                self._calls_of[self._uid] = self._calls_of.get(self._uid, 0) + 1
        except KVStoreError as error:
            self._write(_error_frame(call_id, error))

    def _refuse(self) -> None:
        uid = self._uid
        whose, count, bound = "this session", self._calls, CALLS_MAX
        if count < bound:
            whose, count, bound = f"uid {uid}", self._calls_of[uid], UID_CALLS_MAX
        raise ResourceExhausted(
            f"{count} calls of {whose} are under way", field="calls", value=count, expected=f"at most {bound}"
        )

    def _finish(self, call_id: int, name: str, reply: Message | None, error: BaseException | None) -> None:
        self._calls -= 1
        self._calls_of[self._uid] -= 1
        if not self._calls_of[self._uid]:
            self._calls_of.pop(self._uid)
        try:
            if reply is None:
                failure = error if isinstance(error, Exception) else Unavailable("the call was broken off")
                self._write(_error_frame(call_id, as_domain(failure, name)))
            else:
                self._write(pack_frame(call_id, FrameKind.REPLY, reply.SerializeToString()))
        except InvalidArgument as too_long:
            self._write(_error_frame(call_id, too_long))

    def push(self, done: session_pb2.JobDone) -> None:
        """Send what nobody asked for."""
        self._write(pack_frame(0, FrameKind.JOB_DONE, done.SerializeToString()))

    def _write(self, frame: bytes) -> None:
        if self._socket is None:
            return
        if self._unsent:
            self._unsent += frame
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
        self._ctx.gone.set()
        self._left(self.session.session_id)
