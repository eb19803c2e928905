"""The asyncio client: the same flows as the blocking one's, their steps awaited on one event loop."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from kvstore.client import steps
from kvstore.client.aio_calls import AsyncCalls
from kvstore.client.aio_connection import AsyncSessionConnection
from kvstore.client.connect import grpc_module
from kvstore.client.copying import copy_all
from kvstore.client.flows import Flows
from kvstore.client.handshake import Hello
from kvstore.client.linked import Linked
from kvstore.client.options import ClientOptions, Control
from kvstore.client.options import Target as Address
from kvstore.client.payloads import Views
from kvstore.client.steps import Flow
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import Area, BlockKey, NamespaceId
from kvstore.v1 import session_pb2
from kvstore.wire.paths import grpc_socket, unix_address

T = TypeVar("T")

_CLIENTS: Final[weakref.WeakSet[AsyncClient]] = weakref.WeakSet()


class AsyncClient(Linked, AsyncCalls):
    """A session with a daemon, for one event loop. Meanings are those of ``Client``.

    The constructor does no I/O: the first call connects, or ``connect`` does. A call that is cancelled gives back what
    it had taken, and has stopped to touch the caller's memory when the cancellation comes out.
    """

    def __init__(self, target: str | Path, options: ClientOptions | None = None, *, clock: Clock | None = None) -> None:
        self._address = Address.parse(target)
        flows = Flows(self._address.text, options or ClientOptions(), clock or MonotonicClock())
        super().__init__(flows, remote=bool(self._address.address))
        self._connecting = asyncio.Lock()
        self._links: set[Any] = set()
        """Every link that is open or whose end is under way, those of connects that were cancelled, too."""
        _CLIENTS.add(self)

    # ------------------------------------------------------------ connection

    async def connect(self) -> None:
        """Connect now. Raises what stands in the way if the client is strict."""
        try:
            await self.connection()
        except KVStoreError as error:
            self.flows.fall_back("connect", error, lambda: None)

    async def connection(self) -> tuple[Any, int]:
        """The living link and its generation, made now if there is none. Raises Unavailable inside a pause."""
        link = await self._connect(steps.Connect())
        return link, link.generation

    def memory(self, area: Area) -> memoryview:
        """See ``Cache``. Raises Unavailable without a connection."""
        return self.memory_at(self.generation)(area)

    def device_tensor(self) -> Any:
        """See ``Client.device_tensor``. Raises Unavailable without a connection."""
        if self.flows.link is None:
            raise Unavailable("there is no connection whose DEVICE could be mapped")
        return self.flows.link.welcome.arenas.device_tensor()

    @asynccontextmanager
    async def get_in_place(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, wait_ms: int = 10_000
    ) -> AsyncIterator[Views]:
        """See ``Client.get_in_place``."""
        views = await self.drive(self.flows.gets.open_views(namespace_id, keys, wait_ms))
        keeper = None if views.lease is None else asyncio.create_task(self._keep(views))
        try:
            yield views
        finally:
            if keeper is not None:
                keeper.cancel()
            self.flows.gets.close_views(views)

    async def _keep(self, views: Views) -> None:
        """Renew the lease of open views."""
        while not views.ended:
            await asyncio.sleep(views.lease.ttl_s / 3)
            await self.drive(self.flows.gets.renew_views(views))

    async def close(self) -> None:
        """See ``Cache``. Returns when no link of this client, earlier ones included, has anything left to do."""
        self.flows.closed = True
        self.flows.drop()
        for link in self._links:
            link.close()
        while self._links:
            await self._links.pop().wait_closed()

    async def __aenter__(self) -> Self:
        """Use the client as an async context manager: connected at the start, closed at the end."""
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def forked(self) -> None:
        """In the child of a fork: begin unconnected, for whatever loop runs there."""
        self._connecting = asyncio.Lock()
        for link in self._links:
            link.abandon()
        self._links.clear()
        self.flows.forked()

    # ------------------------------------------------------------ the driver

    async def drive(self, flow: Flow[T]) -> T:
        """Carry out a flow on this loop."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = await _CARRY_OUT[type(step)](self, step)
                except BaseException as error:  # noqa: BLE001  the flow gives back what it took, then it comes out again
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _connect(self, _step: steps.Connect) -> Any:
        if not self.connected:
            async with self._connecting:
                if not self.connected:
                    await self.drive(self.flows.connect())
        return self.flows.link

    async def _open(self, step: steps.Open) -> Any:
        options = self.options
        self._links = {link for link in self._links if not link.ended}
        if self._address.address:
            remote = _grpc().AsyncGrpcConnection(self._address.address, None, options.credentials)
            self._links.add(remote)
            await remote.open(options)
            return remote
        hello = Hello(options.name, options.buffer_bytes, options.device and options.buffer_bytes > 0)

        def on_done(done: session_pb2.JobDone) -> None:
            self.flows.job_done(done, step.generation)

        link = await AsyncSessionConnection.open(self._address.socket, hello, options.connect_timeout_s, on_done)
        if options.control is not Control.SOCKET:
            link = _grpc().AsyncGrpcConnection(unix_address(grpc_socket(self._address.socket)), link)
        self._links.add(link)
        return link

    async def _call(self, step: steps.Call) -> bytes:
        sent = await step.link.send(step.method, step.payload, step.timeout_s)
        if step.begun is not None:
            step.begun()
        reply: bytes = await step.link.wait(sent, step.method, step.timeout_s, step.late)
        return reply

    async def _send(self, step: steps.Send) -> Any:
        return await step.link.send(step.method, step.payload, step.timeout_s)

    async def _wait(self, step: steps.Wait) -> bytes:
        reply: bytes = await step.link.wait(step.sent, step.method, step.timeout_s, step.late)
        return reply

    async def _copy(self, step: steps.Copy) -> None:
        await _in_thread(lambda: copy_all(step.groups, step.threads))

    async def _until(self, step: steps.Until) -> None:
        await step.link.wait_until(step.ready, step.timeout_s)

    async def _pause(self, step: steps.Pause) -> None:
        await asyncio.sleep(step.seconds)

    async def _upload(self, step: steps.Upload) -> bytes:
        reply: bytes = await _streams(step.link).upload(step.method, step.messages, step.timeout_s)
        return reply

    async def _download(self, step: steps.Download) -> None:
        async for message in _streams(step.link).stream(step.method, step.payload, step.timeout_s):
            # Checksums, and decoding where the chunk is coded: milliseconds that the loop need not wait for.
            await _in_thread(partial(step.take, message))


_CARRY_OUT: Final[dict[type, Callable[[AsyncClient, Any], Awaitable[Any]]]] = {
    steps.Call: AsyncClient._call,
    steps.Connect: AsyncClient._connect,
    steps.Open: AsyncClient._open,
    steps.Send: AsyncClient._send,
    steps.Wait: AsyncClient._wait,
    steps.Copy: AsyncClient._copy,
    steps.Until: AsyncClient._until,
    steps.Pause: AsyncClient._pause,
    steps.Upload: AsyncClient._upload,
    steps.Download: AsyncClient._download,
}


async def _in_thread(call: Callable[[], T]) -> T:
    """Run ``call`` in a thread. Who is cancelled meanwhile waits for its end first: it touches the caller's memory."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                continue
        raise


def _streams(link: Any) -> Any:
    if not hasattr(link, "stream"):
        raise InvalidArgument("target", "a session socket", "a gRPC address, since streams are gRPC's")
    return link


def _grpc() -> Any:
    return grpc_module("kvstore.client.aio_grpc")


def _forked() -> None:
    for client in list(_CLIENTS):
        client.forked()


os.register_at_fork(after_in_child=_forked)
