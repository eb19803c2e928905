"""The session socket: hands out memory, then carries the protos' own requests and replies (session.proto).

A connection is a session: when it closes, for whatever reason, leases, reservations and buffer of that session go with
it, in a thread of their own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

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
from kvstore.rpc.connection import Connection, Shares, error_frame
from kvstore.rpc.context import CallContext
from kvstore.rpc.dispatch import Dispatcher, parse
from kvstore.rpc.listener import Acceptor, PeerCredentials, bind_unix, peer_credentials, remove_socket
from kvstore.rpc.sessions import Sessions
from kvstore.store.session import Session
from kvstore.v1 import session_pb2
from kvstore.wire.framing import PROTOCOL_VERSION, FrameKind, first_frame, pack_frame
from kvstore.wire.verbs.checks import name_of
from kvstore.wire.verbs.reads import fetch_message

log = logging.getLogger(__name__)

HELLO_SECONDS_MAX: Final = 5.0
GREETINGS_MAX: Final = 256
"""Connections that may be without a session at one time; one more, and the oldest is closed."""

_HELLO_BYTES_MAX: Final = 4096
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
    """Accepts connections and keeps one ``Connection`` a session."""

    def __init__(self, dispatcher: Dispatcher, exports: Sequence[ArenaExport], options: SocketOptions) -> None:
        self._dispatcher = dispatcher
        self._exports = tuple(exports)
        self._options = options
        self._connections: dict[SessionId, Connection] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        """Connections without a session yet."""
        self._silent: dict[asyncio.Task[None], int] = {}
        """Those that have not said their Hello, the oldest first, and the uid of each."""
        self._not_opened = 0
        self._shares = Shares()
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

    def end(self, session_id: SessionId) -> None:
        """Break the connection of a session, if it has one here: its client connects again, with the rights of now."""
        connection = self._connections.get(session_id)
        if connection is not None:
            connection.abort()

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
        peer = peer_credentials(connection)
        if len(self._silent) >= GREETINGS_MAX:
            # Of the user who has most of them the oldest, which has had the most time to say its Hello.
            most, _ = Counter(self._silent.values()).most_common(1)[0]
            oldest = next(task for task, uid in self._silent.items() if uid == most)
            del self._silent[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._greet(connection, peer))
        self._greetings.add(task)
        self._silent[task] = peer.uid
        task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._greetings.discard(task)
        self._silent.pop(task, None)

    async def _greet(self, connection: socket.socket, peer: PeerCredentials) -> None:
        """Read a Hello, open the session, answer with a Welcome and the descriptors."""
        session: Session | None = None
        sessions = self._dispatcher.services.sessions
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                call_id, hello, behind = await _read_hello(connection)
            if (task := asyncio.current_task()) is not None:
                self._silent.pop(task, None)
            # In the pool, since the buffer's pages are faulted in: 70 ms for 64 MiB where there are no huge pages.
            session = await self._dispatcher.open(partial(self._open, hello, peer))
            admin = peer.uid in self._options.admin_uids or sessions.access.of_uid(peer.uid).admin
            token = sessions.add_local(session, admin=admin)
            self._welcome(connection, (call_id, hello), token, self._shared(hello, session), _bell_of(hello, session))
            ctx = CallContext(self._dispatcher.services, session, admin, f"pid {peer.pid} uid {peer.uid}")
            joined = self._connections[session.session_id] = Connection(
                self._dispatcher, ctx, connection, self._left, self._shares
            )
            joined.begin(behind)
        except (KVStoreError, OSError, TimeoutError, asyncio.CancelledError) as error:
            self._tell_not_opened(peer, error)
            if session is not None:
                self._closer.submit(_end, sessions, session)
            if isinstance(error, OSError) and error.errno in _EXHAUSTED:
                error = ResourceExhausted(f"no session can be opened now: {error}", field="sessions")
            if isinstance(error, KVStoreError):
                _tell(connection, error)
            connection.close()

    def _tell_not_opened(self, peer: PeerCredentials, error: BaseException) -> None:
        """Log the first, the second, the fourth and so on: who connects without end fills no disk with lines."""
        self._not_opened += 1
        told = logging.DEBUG if self._not_opened & (self._not_opened - 1) else logging.WARNING
        why = str(error) or type(error).__name__
        log.log(told, "session of pid %d not opened (%d so far): %s", peer.pid, self._not_opened, why)

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

    def _welcome(
        self,
        connection: socket.socket,
        asked: tuple[int, session_pb2.Hello],
        token: bytes,
        shared: list[ArenaExport],
        bell: list[int],
    ) -> None:
        """``bell`` is the descriptor of one, if one is sent; it is closed here."""
        services, (call_id, hello) = self._dispatcher.services, asked
        index = [services.store.index_fd] if hello.index and services.store.index_fd >= 0 else []
        welcome = session_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            boot_id=services.store.boot_id,
            token=token,
            arenas=[export.message() for export in shared],
            version=services.version,
            plan_bell=bool(bell),
            index=bool(index),
        )
        frame = pack_frame(call_id, FrameKind.WELCOME, welcome.SerializeToString())
        try:
            _send_small(connection, frame, [*(e.fd for e in shared if e.fd >= 0), *bell, *index])
        finally:
            for fd in bell:
                os.close(fd)

    def _left(self, session_id: SessionId) -> None:
        """A session has ended. What it held goes in a thread: it may be millions of blocks, and the loop has others."""
        self._connections.pop(session_id, None)
        self._closer.submit(self._dispatcher.services.sessions.close, session_id)


def _end(sessions: Sessions, session: Session) -> None:
    """End a session that nobody was told of. Its buffer is unmapped, which is not for the loop."""
    sessions.close(session.session_id)
    session.close()


def _bell_of(hello: session_pb2.Hello, session: Session) -> list[int]:
    """The bell of the session's plans, if it asked for one and there can be any."""
    if not (hello.plans and session.buffer_fd >= 0):
        return []
    try:
        return [session.plan_bell()]
    except Unavailable:
        return []


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


def _tell(connection: socket.socket, error: KVStoreError) -> None:
    """Say why no session was opened, to whoever is still there."""
    try:
        _send_small(connection, error_frame(0, error), ())
    except (OSError, Unavailable) as gone:
        log.debug("nobody was told that no session was opened: %s", gone)


def _send_small(connection: socket.socket, frame: bytes, fds: Sequence[int]) -> None:
    """Send one small frame at once; a fresh socket's buffer always has room for it."""
    sent = socket.send_fds(connection, [frame], list(fds))
    if sent != len(frame):
        raise Unavailable("the peer does not read its Welcome")
