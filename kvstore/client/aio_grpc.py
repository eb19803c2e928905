"""gRPC calls for asyncio, of a local session (memory from the session socket) or a remote one (none)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import grpc

from kvstore.client.aio_connection import AsyncSessionConnection
from kvstore.client.aio_uploads import Uploads
from kvstore.client.arenas import Arenas
from kvstore.client.channels import aio_channel, bearer
from kvstore.client.grpc_errors import (
    CLOSE_SECONDS_MAX,
    WRITES_DEFAULT,
    domain_error,
    is_other_boot,
    no_turn,
)
from kvstore.client.handshake import Welcome
from kvstore.client.options import ClientOptions, Credentials
from kvstore.client.session_connection import CALLS_MAX
from kvstore.client.steps import Late
from kvstore.core.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.v1 import session_pb2
from kvstore.wire.errors import SESSION_METADATA

log = logging.getLogger(__name__)


LATE_SECONDS: Final = 60.0
"""How long a call goes on behind its caller's deadline, so that what the daemon did for it can be undone."""

POST_SECONDS: Final = 10.0

_INHERITED: Final[list[Any]] = []
"""Channels of the parent's, in the child of a fork."""


class AsyncGrpcConnection:
    """A session whose calls go over gRPC; ``local`` brings its memory and the ends of its jobs."""

    generation = -1

    def __init__(
        self, address: str, local: AsyncSessionConnection | None, credentials: Credentials | None = None
    ) -> None:
        self._local = local
        self._channel: Any = aio_channel(address, credentials)
        self._uploads = Uploads(address, credentials)
        self._metadata: tuple[tuple[str, str], ...] = bearer(credentials)
        self._turns = asyncio.Semaphore(CALLS_MAX)
        """Turns of calls and Read streams: the daemon refuses too many of one peer at a time."""
        self._gone = False
        """The daemon has gone. The channel would find the next one and has to be closed all the same."""
        self._closed = False
        self._keeper: asyncio.Task[None] | None = None
        self._sent: set[asyncio.Task[bytes]] = set()
        """Calls under way, kept until they end: gRPC cancels what is collected."""
        self._closing: asyncio.Task[None] | None = None
        self.pushes = local is not None
        self.welcome = Welcome(b"", b"", Arenas(), "")
        self.peer_fd = -1 if local is None else local.peer_fd
        if local is not None:
            self._authenticate(local.welcome)

    def _authenticate(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self._metadata = ((SESSION_METADATA, welcome.token.hex()),)

    async def open(self, options: ClientOptions) -> None:
        """Open the session of a link without ``local`` and keep it alive by a task. A failure closes the link."""
        request = session_pb2.OpenRemoteRequest(name=options.name, ttl_ms=options.remote_ttl_ms)
        try:
            reply = await self.call(
                "kvstore.v1.Sessions/OpenRemote", request.SerializeToString(), options.connect_timeout_s
            )
        except BaseException:
            self.close()
            raise
        opened = session_pb2.OpenRemoteResponse.FromString(reply)
        self._authenticate(Welcome(opened.boot_id, opened.token, Arenas(), ""))
        self._uploads.allow(opened.writes_max or WRITES_DEFAULT)
        self._keeper = asyncio.create_task(self._keep_alive(opened.ttl_ms / 3000))

    async def _keep_alive(self, period_s: float) -> None:
        while not self.closed:
            await asyncio.sleep(period_s)
            try:
                await self._out_of_turn("kvstore.v1.Sessions/Keepalive", period_s)
            except KVStoreError as error:
                log.warning("keepalive of a remote session failed: %s", error)

    @property
    def closed(self) -> bool:
        """Whether the daemon has gone."""
        return self._closed or self._gone or (self._local is not None and self._local.closed)

    @property
    def ended(self) -> bool:
        """Whether nothing of this link is left: it was closed, and what ``close`` began is done."""
        return self._closing is not None and self._closing.done()

    async def call(self, method: str, payload: bytes, timeout_s: float, late: Late | None = None) -> bytes:
        """Send a request and wait for its reply; one that comes when nobody waits any more goes to ``late``."""
        return await self.wait(await self.send(method, payload, timeout_s), method, timeout_s, late)

    async def send(self, method: str, payload: bytes, timeout_s: float) -> asyncio.Task[bytes]:
        """Send a request, when it is this call's turn; its reply comes in the task, which lives until the call ends."""
        await self._take_turn(method, timeout_s)
        task = self._send(method, payload, timeout_s)
        task.add_done_callback(lambda _: self._turns.release())
        return task

    async def _out_of_turn(self, method: str, timeout_s: float) -> None:
        """A session is neither to end nor to stay because its calls are many."""
        await self.wait(self._send(method, b"", timeout_s), method, timeout_s)

    async def _take_turn(self, method: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise no_turn(method, timeout_s) from error

    def _send(self, method: str, payload: bytes, timeout_s: float) -> asyncio.Task[bytes]:
        task = asyncio.get_running_loop().create_task(self._call(method, payload, timeout_s))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        return task

    async def _call(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        call: Any = self._channel.unary_unary(f"/{method}")(
            payload, timeout=timeout_s + LATE_SECONDS, metadata=self._metadata
        )
        try:
            reply = await call
            if is_other_boot(await call.initial_metadata(), self.welcome.boot_id):
                self._gone = True
                raise Unavailable("the daemon was restarted; the session has ended")
            return bytes(reply)
        except grpc.RpcError as error:
            raise self._domain(error, method, timeout_s) from error

    async def wait(self, sent: asyncio.Task[bytes], method: str, timeout_s: float, late: Late | None = None) -> bytes:
        """Wait for the reply of ``send``."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(sent)
        except TimeoutError as error:
            self.forget(sent, late)
            raise DeadlineExceeded(
                f"{method} did not answer within {timeout_s:g} s", field="timeout", value=timeout_s
            ) from error
        except asyncio.CancelledError:
            self.forget(sent, late)
            raise

    def forget(self, sent: asyncio.Task[bytes], late: Late | None = None) -> None:
        """Nobody waits for the reply any more: hand it to ``late`` when it comes, or drop it."""
        sent.add_done_callback(lambda task: self._hand_over(task, late))

    def _hand_over(self, task: asyncio.Task[bytes], late: Late | None) -> None:
        if not task.cancelled() and task.exception() is None and late is not None and not self.closed:
            late(task.result())

    def post(self, method: str, payload: bytes) -> None:
        """Send a request whose reply nobody needs."""
        self.forget(self._send(method, payload, POST_SECONDS))

    def pump(self) -> None:
        """See ``steps.Link``: the loop takes in what comes."""

    def abandon(self) -> None:
        """See ``steps.Link``. A channel of the parent's is neither used nor closed here."""
        self._closed = True
        _INHERITED.append(self._channel)
        self._uploads.abandon()
        if self._local is not None:
            self._local.abandon()

    async def stream(self, method: str, payload: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        """Messages of a server stream."""
        await self._take_turn(method, timeout_s)
        call: Any = self._channel.unary_stream(f"/{method}")(payload, timeout=timeout_s, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise self._domain(error, method, timeout_s) from error
        finally:
            call.cancel()
            self._turns.release()

    async def upload(self, method: str, messages: Iterator[bytes], timeout_s: float) -> bytes:
        """Send a client stream, when it is its turn, and return its reply."""
        try:
            return await self._uploads.send(method, messages, self._metadata, timeout_s)
        except grpc.RpcError as error:
            raise self._domain(error, method, timeout_s) from error

    def _domain(self, error: Any, method: str, timeout_s: float) -> KVStoreError:
        domain, gone = domain_error(error, method, timeout_s)
        self._gone = self._gone or gone
        return domain

    async def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait for the end of a job that is pushed; nothing is pushed to a remote session."""
        if self._local is not None:
            await self._local.wait_until(ready, timeout_s)

    def close(self) -> None:
        """End the session; ``wait_closed`` waits until the daemon knows. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._keeper is not None:
                self._keeper.cancel()
            self._closing = asyncio.get_running_loop().create_task(self._close())
        if self._local is not None:
            self._local.close()

    async def _close(self) -> None:
        """Tell the daemon of a remote session's end, which else comes when its time to live is over."""
        if self._local is None and self.welcome.token and not self._gone:
            try:
                await self._out_of_turn("kvstore.v1.Sessions/CloseRemote", CLOSE_SECONDS_MAX)
            except KVStoreError as error:
                log.info("a remote session was not closed and will expire: %s", error)
        try:
            if self._sent:
                # Releases that were posted a moment ago go out first.
                await asyncio.wait(set(self._sent) - {asyncio.current_task()}, timeout=CLOSE_SECONDS_MAX)
        finally:
            # A loop that ends cancels this, and the connection must not outlive it.
            self._uploads.close()
            await self._channel.close()

    async def wait_closed(self) -> None:
        """Return when what ``close`` began is done."""
        if self._closing is not None:
            await self._closing
