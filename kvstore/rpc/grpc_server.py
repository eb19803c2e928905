"""The gRPC face of the method table: servicers made from it, health and reflection beside them.

gRPC does not say who is at the other end of a Unix socket, so no right follows from having connected: a caller has the
rights of the session whose token it sends, and whoever has none may open a remote session, ask for health and
reflection, and nothing else. Where there is a policy (``access.py``), opening one takes a bearer token, and gives what
the policy gives for that. Admin rights that the kernel's word gave to a session of the session socket hold on the Unix
socket only. Every reply's initial metadata carries the daemon's boot id.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.core.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from kvstore.core.request import REQUEST
from kvstore.rpc.access import AUTHORIZATION
from kvstore.rpc.context import CallContext
from kvstore.rpc.dispatch import Dispatcher, parse
from kvstore.rpc.listener import check_socket_path, remove_socket
from kvstore.rpc.sessions import peer_name
from kvstore.rpc.streams import Streams
from kvstore.rpc.table import METHODS
from kvstore.rpc.tls import Tls
from kvstore.v1 import cache_pb2, events_pb2
from kvstore.wire.errors import (
    BOOT_METADATA,
    ERROR_METADATA,
    SESSION_METADATA,
    as_domain,
    status_code,
    status_text,
    to_detail,
)
from kvstore.wire.framing import MESSAGE_BYTES_MAX
from kvstore.wire.paths import unix_address

log = logging.getLogger(__name__)

R = TypeVar("R")

SERVICES: Final = tuple(f"kvstore.v1.{name}" for name in ("Cache", "Leases", "Sessions", "Admin", "Events"))
CALLS_MAX: Final = 512
"""Calls under way on the server; gRPC refuses more with RESOURCE_EXHAUSTED."""

PEER_CALLS_MAX: Final = 384
"""Those of one peer, so that it never shuts all others out."""

WRITE: Final = "kvstore.v1.Cache/Write"
STREAM_IDLE_S: Final = 60.0
"""How long a stream waits for its caller to read or to send the next message."""

REQUEST_METADATA: Final = "kvstore-request"
"""Metadata with the caller's own id of a call."""

_REQUEST_ID: Final = re.compile(r"[\w.\-]{1,64}", re.ASCII)
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

Unary = Callable[[bytes, "Context"], Awaitable[bytes]]


class GrpcServer:
    """Serves the table on a Unix socket and, when asked for, on TCP."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        socket: Path | None,
        listen: str = "",
        mode: int = 0o600,
        idle_s: float = STREAM_IDLE_S,
        tls: Tls | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._streams = Streams(dispatcher)
        self._socket = socket
        self._listen = listen
        self._mode = mode
        self._idle_s = idle_s
        self._tls = tls
        self._calls: Counter[str] = Counter()
        """Calls under way, by peer."""
        self._numbers = itertools.count(1)
        """Of calls, for the log."""
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self.port = 0
        """TCP port that was bound; 0 without TCP."""

    async def start(self) -> None:
        """Bind and serve. Raises Unavailable if an address can not be bound."""
        server = grpc.aio.server(
            maximum_concurrent_rpcs=CALLS_MAX,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
                # A peer whose host has gone without a word is noticed, and its streams end.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ],
        )
        server.add_generic_rpc_handlers(tuple(self._service_handlers()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self._bind(server)
        await server.start()
        self._server = server
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def _bind(self, server: grpc.aio.Server) -> None:
        if self._socket is not None:
            check_socket_path(self._socket)
            remove_socket(self._socket)
            mask = os.umask(0o177)
            try:
                _add_port(server, unix_address(self._socket))
            finally:
                os.umask(mask)
            self._socket.chmod(self._mode)
        if self._listen:
            self.port = _add_port(server, self._listen, self._tls)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Tell health checkers, let calls under way end for ``grace_s``, remove the socket file. Idempotent."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._health.enter_graceful_shutdown()
        self._streams.stop()
        await server.stop(grace_s)
        if self._socket is not None:
            remove_socket(self._socket)

    def _service_handlers(self) -> list[grpc.GenericRpcHandler]:
        streams = self._streams
        cache: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Read": grpc.unary_stream_rpc_method_handler(
                self._server_stream("kvstore.v1.Cache/Read", cache_pb2.ReadRequest, streams.read)
            ),
            "Write": grpc.stream_unary_rpc_method_handler(self._write),
        }
        subscribe: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
            self._server_stream("kvstore.v1.Events/Subscribe", events_pb2.SubscribeRequest, streams.subscribe)
        )
        return [
            grpc.method_handlers_generic_handler("kvstore.v1.Cache", cache),
            grpc.method_handlers_generic_handler("kvstore.v1.Events", {"Subscribe": subscribe}),
            _Table(self._unary),
        ]

    def _unary(self, name: str) -> Unary:
        async def handle(payload: bytes, context: Context) -> bytes:
            try:
                caller = self._caller(context)
                with self._one_more(caller):
                    reply = await self._dispatcher.call(name, caller, payload)
                    await context.send_initial_metadata(self._boot())
                    return reply.SerializeToString()
            except KVStoreError as error:
                await _abort(context, error)
                raise

        return handle

    def _server_stream(
        self, name: str, kind: type[Message], stream: Callable[[CallContext, Any], AsyncGenerator[Message, None]]
    ) -> Callable[[bytes, Context], Awaitable[None]]:
        async def handle(payload: bytes, context: Context) -> None:
            try:
                with self._dispatcher.times.timing(name):
                    request, caller = parse(kind, payload), self._caller(context)
                    await context.send_initial_metadata(self._boot())
                    with self._one_more(caller):
                        await self._send(stream(caller, request), context)
            except (KVStoreError, ArithmeticError, LookupError, TypeError, ValueError, OSError) as error:
                await _abort(context, as_domain(error, name))

        return handle

    async def _send(self, stream: AsyncGenerator[Message, None], context: Context) -> None:
        """Send the messages of a stream. It is closed here and now however the call ends, so that what it holds is
        given back with it."""
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                # gRPC takes a message only when the one before fits its window: the flow is controlled.
                await self._timely(context.write(message.SerializeToString()), "reads none")

    async def _write(self, chunks: AsyncIterator[bytes], context: Context) -> bytes:
        try:
            with self._dispatcher.times.timing(WRITE):
                caller = self._caller(context)
                with self._one_more(caller):
                    async with contextlib.aclosing(self._parsed(chunks)) as parsed:
                        reply = await self._streams.write(caller, parsed)
                    await context.send_initial_metadata(self._boot())
                    return reply.SerializeToString()
        except (KVStoreError, ArithmeticError, LookupError, TypeError, ValueError, OSError) as error:
            await _abort(context, as_domain(error, WRITE))
            raise

    async def _parsed(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[cache_pb2.WriteChunk, None]:
        coming = aiter(chunks)
        while True:
            try:
                payload = await self._timely(anext(coming), "sends none")
            except StopAsyncIteration:
                return
            yield parse_chunk(payload)

    async def _timely(self, step: Awaitable[R], what: str) -> R:
        """Wait for the caller of a stream, but not for ever: what the stream holds is not there for others."""
        try:
            async with asyncio.timeout(self._idle_s):
                return await step
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"a stream waits for messages for {self._idle_s:g} s, and its caller {what}"
            ) from error

    @contextlib.contextmanager
    def _one_more(self, caller: CallContext) -> Iterator[None]:
        """Count a call of a peer while it is under way. Raises ResourceExhausted at the bound of one peer."""
        peer = peer_name(caller.peer) if caller.opened is None else caller.opened.peer
        if self._calls[peer] >= PEER_CALLS_MAX:
            raise ResourceExhausted(
                f"{self._calls[peer]} gRPC calls of {peer} are under way",
                field="calls",
                value=self._calls[peer],
                expected=f"at most {PEER_CALLS_MAX} of one peer",
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]

    def _boot(self) -> Sequence[tuple[str, bytes]]:
        return ((BOOT_METADATA, self._dispatcher.services.store.boot_id),)

    def _caller(self, context: Context) -> CallContext:
        """Who calls: nobody but by its token."""
        peer, sent = context.peer(), dict(context.invocation_metadata() or ())
        REQUEST.set(request_of(sent.get(REQUEST_METADATA)) or f"g{next(self._numbers)}")
        token = sent.get(SESSION_METADATA)
        if token is None:
            bearer = sent.get(AUTHORIZATION)
            return CallContext(
                self._dispatcher.services, None, False, peer, bearer=bearer if isinstance(bearer, str) else ""
            )
        session, admin = self._dispatcher.services.sessions.find(token_of(token))
        # A remote session is an admin's by its bearer token; one of this host by the kernel's word, which ends here.
        trusted = session.remote or peer.startswith("unix:")
        return CallContext(self._dispatcher.services, session, admin and trusted, peer)


class _Table(grpc.GenericRpcHandler):
    """Finds unary methods in the table as they are called, since verbs may be added while the server runs."""

    def __init__(self, unary: Callable[[str], Unary]) -> None:
        self._unary = unary

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call; None if no method has that name."""
        name = details.method[1:]
        return grpc.unary_unary_rpc_method_handler(self._unary(name)) if name in METHODS else None


def request_of(sent: str | bytes | None) -> str:
    """The id that a caller gave its call, as far as it is one: letters, digits, ``.``, ``_`` and ``-``, 64 at most."""
    return sent if isinstance(sent, str) and _REQUEST_ID.fullmatch(sent) else ""


def token_of(text: str | bytes) -> bytes:
    """A session token from its metadata; Unauthenticated unless it is hexadecimal."""
    try:
        return bytes.fromhex(text if isinstance(text, str) else text.decode("ascii"))
    except ValueError as error:
        raise Unauthenticated(
            "the session token is not hexadecimal", field=SESSION_METADATA, expected="64 hexadecimal digits"
        ) from error


def parse_chunk(payload: bytes) -> cache_pb2.WriteChunk:
    """One message of a Write stream."""
    chunk = parse(cache_pb2.WriteChunk, payload)
    if not isinstance(chunk, cache_pb2.WriteChunk):
        raise InvalidArgument("message", type(chunk).__name__, "a WriteChunk")
    return chunk


def _add_port(server: grpc.aio.Server, address: str, tls: Tls | None = None) -> int:
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise Unavailable(f"gRPC can not listen at {address}: {error}", field="listen", value=address) from error
    if not port:
        raise Unavailable(f"gRPC can not listen at {address}", field="listen", value=address)
    return int(port)


async def _abort(context: Context, error: KVStoreError) -> None:
    detail = to_detail(error).SerializeToString()
    await context.abort(_CODES[status_code(error)], status_text(error), trailing_metadata=((ERROR_METADATA, detail),))
