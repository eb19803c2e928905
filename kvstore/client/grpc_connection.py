"""Sessions whose calls go over gRPC: local ones, with memory from the session socket, and remote ones without.

Imported only when a gRPC transport is asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import grpc

from kvstore.client.arenas import Arenas
from kvstore.client.channels import bearer, channel
from kvstore.client.grpc_errors import (
    CLOSE_SECONDS_MAX,
    WRITES_DEFAULT,
    domain_error,
    is_other_boot,
    no_turn,
)
from kvstore.client.handshake import Welcome
from kvstore.client.options import ClientOptions, Credentials
from kvstore.client.session_connection import CALLS_MAX, SessionConnection
from kvstore.client.steps import Late
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.v1 import session_pb2
from kvstore.wire.errors import SESSION_METADATA
from kvstore.wire.paths import grpc_socket, unix_address

log = logging.getLogger(__name__)


LATE_SECONDS: Final = 60.0
"""How long a call goes on behind its caller's deadline, so that what the daemon did for it can be undone."""

POST_SECONDS: Final = 10.0

_INHERITED: Final[list[Any]] = []
"""Channels of the parent's, in the child of a fork: closing one there could wait for threads that do not live there."""


class _Calls:
    """Calls of one session over one channel. Closed for good once the daemon has gone or is another one."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._channel: Any = channel(address, credentials)
        self._metadata: tuple[tuple[str, str], ...] = bearer(credentials)
        self._boot_id = b""
        self._ids = itertools.count(1)
        self._futures: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(CALLS_MAX)
        """Turns of calls and Read streams: the daemon refuses too many of one peer at a time."""
        self._uploads = threading.Semaphore(WRITES_DEFAULT)
        self.closed = False

    def authenticate(self, token: bytes, boot_id: bytes, writes_max: int = 0) -> None:
        """Send this token from now on, and end when another boot id answers; so many Write streams at a time."""
        self._uploads = threading.Semaphore(writes_max or WRITES_DEFAULT)
        self._metadata = ((SESSION_METADATA, token.hex()),)
        self._boot_id = boot_id

    def call(self, method: str, payload: bytes, timeout_s: float, late: Late | None = None) -> bytes:
        return self.wait(self.send(method, payload, timeout_s), method, timeout_s, late)

    def _unary(self, method: str) -> Any:
        return self._channel.unary_unary(f"/{method}")

    def send(self, method: str, payload: bytes, timeout_s: float) -> int:
        """Send a request, when it is this call's turn."""
        _take_turn(self._turns, method, timeout_s)
        try:
            call_id = self.send_now(method, payload, timeout_s)
        except BaseException:
            self._turns.release()
            raise
        self._futures[call_id].add_done_callback(lambda _: self._turns.release())
        return call_id

    def send_now(self, method: str, payload: bytes, timeout_s: float) -> int:
        """Send a request out of turn: a session is neither to end nor to stay because its calls are many."""
        # The daemon may answer when the caller has gone; its reply then says what has to be undone.
        future = self._unary(method).future(payload, timeout=timeout_s + LATE_SECONDS, metadata=self._metadata)
        call_id = next(self._ids)
        with self._lock:
            self._futures[call_id] = future
        return call_id

    def wait(self, call_id: int, method: str, timeout_s: float, late: Late | None = None) -> bytes:
        with self._lock:
            future = self._futures[call_id]
        try:
            reply = bytes(future.result(timeout_s))
            self._check_boot(future)
        except grpc.FutureTimeoutError as error:
            self.forget(call_id, late)
            raise DeadlineExceeded(
                f"{method} did not answer within {timeout_s:g} s", field="timeout", value=timeout_s
            ) from error
        except grpc.RpcError as error:
            self.forget(call_id)
            raise self._domain(error, method, timeout_s) from error
        except BaseException:
            self.forget(call_id, late)
            raise
        self.forget(call_id)
        return reply

    def forget(self, call_id: int, late: Late | None = None) -> None:
        """Nobody waits for the reply any more. The call is kept until it has ended: gRPC cancels what is collected."""
        with self._lock:
            future = self._futures.get(call_id)
        if future is not None:
            future.add_done_callback(partial(self._ended, call_id, late))

    def _ended(self, call_id: int, late: Late | None, future: Any) -> None:
        """Called by a thread of gRPC's, or at once."""
        with self._lock:
            self._futures.pop(call_id, None)
        if late is not None and future.code() is grpc.StatusCode.OK and not self.closed:
            late(bytes(future.result()))

    def post(self, method: str, payload: bytes) -> None:
        self.forget(self.send_now(method, payload, POST_SECONDS))

    def abandon(self) -> None:
        """In the child of a fork. A channel of the parent's is neither used nor closed here, so it is kept as it is."""
        self.closed = True
        _INHERITED.append(self._channel)

    def stream(self, method: str, payload: bytes, timeout_s: float) -> Iterator[bytes]:
        """Messages of a server stream."""
        _take_turn(self._turns, method, timeout_s)
        stream: Any = self._channel.unary_stream(f"/{method}")(payload, timeout=timeout_s, metadata=self._metadata)
        try:
            yield from stream
        except grpc.RpcError as error:
            raise self._domain(error, method, timeout_s) from error
        finally:
            stream.cancel()
            self._turns.release()

    def upload(self, method: str, payloads: Iterable[bytes], timeout_s: float) -> bytes:
        """Send a client stream, when it is its turn, and return its reply."""
        _take_turn(self._uploads, method, timeout_s)
        try:
            call: Any = self._channel.stream_unary(f"/{method}")
            return bytes(call(iter(payloads), timeout=timeout_s, metadata=self._metadata))
        except grpc.RpcError as error:
            raise self._domain(error, method, timeout_s) from error
        finally:
            self._uploads.release()

    def _check_boot(self, info: Any) -> None:
        if is_other_boot(info.initial_metadata(), self._boot_id):
            self.closed = True
            raise Unavailable("the daemon was restarted; the session has ended")

    def _domain(self, error: Any, method: str, timeout_s: float) -> KVStoreError:
        domain, gone = domain_error(error, method, timeout_s)
        self.closed = self.closed or gone
        return domain

    def close(self) -> None:
        self.closed = True
        self._channel.close()


def _take_turn(turns: threading.Semaphore, method: str, timeout_s: float) -> None:
    if not turns.acquire(timeout=timeout_s):
        raise no_turn(method, timeout_s)


class LocalGrpcConnection:
    """Memory and ends of jobs over the session socket, calls over gRPC; meets ``connection.Connection``."""

    pushes = True
    generation = -1

    def __init__(self, path: str, local: SessionConnection, options: ClientOptions) -> None:
        self._local = local
        self._calls = _Calls(unix_address(grpc_socket(path)))
        self.welcome = local.welcome
        self._calls.authenticate(local.welcome.token, local.welcome.boot_id)
        self.pump = local.pump
        self.peer_fd = local.peer_fd
        self.wait_until: Callable[[Callable[[], bool], float], None] = local.wait_until
        self.fileno = local.fileno
        self.call = self._calls.call
        self.send = self._calls.send
        self.wait = self._calls.wait
        self.forget = self._calls.forget
        self.post = self._calls.post
        self.stream = self._calls.stream
        self.upload = self._calls.upload
        self._timeout_s = options.timeout_s

    @property
    def closed(self) -> bool:
        """See ``Connection``."""
        return self._local.closed or self._calls.closed

    def abandon(self) -> None:
        """See ``steps.Link``."""
        self._calls.abandon()
        self._local.abandon()

    def close(self) -> None:
        """See ``Connection``."""
        self._calls.close()
        self._local.close()


class RemoteConnection:
    """A session on another host, kept alive by a thread of its own; meets ``connection.Connection``."""

    pushes = False
    generation = peer_fd = -1

    def __init__(self, address: str, options: ClientOptions) -> None:
        self._calls = _Calls(address, options.credentials)
        try:
            opened = self._open(options)
        except KVStoreError:
            self._calls.close()
            raise
        self.welcome = Welcome(opened.boot_id, opened.token, Arenas(), "")
        self._calls.authenticate(opened.token, opened.boot_id, opened.writes_max)
        self.call = self._calls.call
        self.send = self._calls.send
        self.wait = self._calls.wait
        self.forget = self._calls.forget
        self.post = self._calls.post
        self.stream = self._calls.stream
        self.upload = self._calls.upload
        self._ended = threading.Event()
        self._period_s = opened.ttl_ms / 3000
        self._keeper = threading.Thread(target=self._keep_alive, name="kvstore-keepalive", daemon=True)
        self._keeper.start()

    def _open(self, options: ClientOptions) -> session_pb2.OpenRemoteResponse:
        request = session_pb2.OpenRemoteRequest(name=options.name, ttl_ms=options.remote_ttl_ms)
        reply = self._calls.call(
            "kvstore.v1.Sessions/OpenRemote", request.SerializeToString(), options.connect_timeout_s
        )
        return session_pb2.OpenRemoteResponse.FromString(reply)

    def _out_of_turn(self, method: str, timeout_s: float) -> None:
        self._calls.wait(self._calls.send_now(method, b"", timeout_s), method, timeout_s)

    def _keep_alive(self) -> None:
        while not self._ended.wait(self._period_s) and not self._calls.closed:
            try:
                self._out_of_turn("kvstore.v1.Sessions/Keepalive", self._period_s)
            except KVStoreError as error:
                if not self._ended.is_set():
                    log.warning("keepalive of a remote session failed: %s", error)

    @property
    def closed(self) -> bool:
        """See ``Connection``."""
        return self._calls.closed

    def pump(self) -> None:
        """See ``Connection``: nothing is pushed to a remote session."""

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """See ``Connection``: nothing is pushed to a remote session, so there is nothing to wait for."""

    def fileno(self) -> int:
        """See ``Connection``. Raises Unavailable: a remote session has no descriptor that tells of jobs."""
        raise Unavailable("a remote session has no descriptor to poll; call poll() from time to time")

    def abandon(self) -> None:
        """See ``steps.Link``. The keeper's thread does not live here; the parent keeps its session alive."""
        self._calls.abandon()
        self._ended.set()

    def close(self) -> None:
        """See ``Connection``. Tells the daemon, which else ends the session when its time to live is over."""
        if not self._ended.is_set() and not self._calls.closed:
            self._ended.set()
            try:
                self._out_of_turn("kvstore.v1.Sessions/CloseRemote", CLOSE_SECONDS_MAX)
            except KVStoreError as error:
                log.info("a remote session was not closed and will expire: %s", error)
        self._ended.set()
        with contextlib.suppress(ValueError):
            self._calls.close()
