"""The asyncio client: the same operations and state as the synchronous one, awaited on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from kvstore.cache import CommitResult, FetchResult
from kvstore.client.aio_calls import AsyncCalls
from kvstore.client.aio_connection import AsyncSessionConnection
from kvstore.client.aio_transfer import AsyncTransfer
from kvstore.client.core import CALLERS_ERRORS, Completion, note_failure
from kvstore.client.handshake import Hello
from kvstore.client.operations import Operation, Operations, fetch_result, missed
from kvstore.client.options import ClientOptions, Control
from kvstore.client.options import Target as Address
from kvstore.client.payloads import BlockView, GotBlocks, PutBlocks
from kvstore.client.state import ClientState, outward
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import Area, BlockKey, JobId, NamespaceId, Outcome
from kvstore.v1 import session_pb2
from kvstore.wire.paths import grpc_socket

log = logging.getLogger(__name__)
T = TypeVar("T")


class AsyncClient(AsyncCalls):
    """A session with a daemon, for one event loop. Meanings are those of ``Client``.

    The constructor does no I/O: the first call connects, or ``connect`` does.
    """

    def __init__(self, target: str | Path, options: ClientOptions | None = None, *, clock: Clock | None = None) -> None:
        self._address = Address.parse(target)
        self._options = options or ClientOptions()
        self._clock = clock or MonotonicClock()
        self._state = ClientState(self._options.backoff)
        self.operations = Operations(self._state)
        self._connecting = asyncio.Lock()
        self._connection: Any = None
        self._generation = -1
        self._closed = False
        self.transfer = AsyncTransfer(self)

    @property
    def options(self) -> ClientOptions:
        """The settings that it was made with."""
        return self._options

    @property
    def state(self) -> ClientState:
        """Failures, generation and boot id."""
        return self._state

    @property
    def generation(self) -> int:
        """See ``Client.generation``."""
        return self._state.generation

    @property
    def connected(self) -> bool:
        """Whether the last call left a living connection; a call may still find it gone."""
        return self._connection is not None and not self._connection.closed

    @property
    def remote(self) -> bool:
        """Whether bytes go over the network: then only put and get carry them."""
        return bool(self._address.address)

    def failures(self) -> dict[str, int]:
        """Failures that were answered as misses, by "Method:REASON"."""
        return self._state.failures()

    # ------------------------------------------------------------ connection

    async def connect(self) -> None:
        """Connect now. Raises what stands in the way if the client is strict."""
        try:
            await self.connection()
        except KVStoreError as error:
            self.fall_back("connect", error, lambda: None)

    async def connection(self) -> tuple[Any, int]:
        """The living connection and its generation, made now if there is none. Raises Unavailable inside a pause."""
        if not self.connected:
            async with self._connecting:
                if not self.connected:
                    await self._connect()
        return self._connection, self._generation

    async def _connect(self) -> None:
        if self._closed:
            raise Unavailable("the client is closed")
        self._drop()
        left = self._state.seconds_to_attempt(self._clock.now())
        if left > 0:
            raise Unavailable(
                f"no daemon at {self._address.text}; the next attempt to connect is in {left:.2f} s",
                field="target",
                value=self._address.text,
            )
        generation = self._state.next_generation
        connection: Any = None
        try:
            connection = await self._open(generation)
            for operation in self.operations.reopen():
                request = operation.build().SerializeToString()
                try:
                    reply = await connection.call(operation.method, request, self._options.timeout_s)
                    operation.parse(operation.reply.FromString(reply), generation)
                except CALLERS_ERRORS as error:
                    log.error("a namespace was not opened again: %s", error)
        except KVStoreError:
            if connection is not None:
                connection.close()
            self._state.connect_failed(self._clock.now())
            raise
        self._state.connected(connection.welcome.boot_id)
        self._generation = generation
        for job_id, keys in self._state.lost_jobs():
            self._state.job_lost(job_id, missed(keys))
        self._connection = connection

    async def _open(self, generation: int) -> Any:
        options = self._options
        if self._address.address:
            return await _grpc().AsyncGrpcConnection.open_remote(self._address.address, options)
        hello = Hello(options.name, options.buffer_bytes, options.device and options.buffer_bytes > 0)

        def on_done(done: session_pb2.JobDone) -> None:
            job_id = JobId(outward(done.job_id, generation))
            self._state.job_done(job_id, fetch_result(done.result, generation))

        local = await AsyncSessionConnection.open(self._address.socket, hello, options.connect_timeout_s, on_done)
        if options.control is Control.SOCKET:
            return local
        return _grpc().AsyncGrpcConnection(f"unix:{grpc_socket(self._address.socket)}", local)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def run(self, operation: Operation[T]) -> T:
        """Carry out an operation; without ``strict``, a failure of the cache becomes its fallback."""
        try:
            return await self.attempt(operation)
        except KVStoreError as error:
            return self.fall_back(operation.method, error, operation.fallback)

    async def attempt(self, operation: Operation[T]) -> T:
        """Carry out an operation or raise; one that changes nothing is sent again if its connection was lost."""
        timeout_s = self._options.timeout_s + operation.wait_ms / 1000
        tries = 2 if operation.pure else 1
        while True:
            tries -= 1
            connection, generation = await self.connection()
            try:
                reply = await connection.call(operation.method, operation.build().SerializeToString(), timeout_s)
            except Unavailable:
                if not connection.closed or not tries:
                    raise
            else:
                return operation.parse(operation.reply.FromString(reply), generation)

    def fall_back(self, method: str, error: KVStoreError, fallback: Callable[[], T]) -> T:
        """See ``Client.fall_back``."""
        if self._options.strict or isinstance(error, CALLERS_ERRORS):
            raise error
        note_failure(self._state, method, error)
        return fallback()

    async def guarded(self, method: str, call: Awaitable[T], fallback: Callable[[], T]) -> T:
        """Await a call, falling back if the cache fails."""
        try:
            return await call
        except KVStoreError as error:
            return self.fall_back(method, error, fallback)

    def post(self, operation: Operation[T]) -> None:
        """Send an operation whose answer nobody needs. A failure is counted."""
        try:
            if self._connection is None:
                raise Unavailable("there is no connection")
            self._connection.post(operation.method, operation.build().SerializeToString())
        except KVStoreError as error:
            note_failure(self._state, operation.method, error)

    # ------------------------------------------------------------ whole payloads

    async def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> CommitResult:
        """See ``Client.put``. Copies run in threads."""
        return await self.transfer.put(namespace_id, blocks)

    async def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        out: object | None = None,
        wait_ms: int = 10_000,
    ) -> GotBlocks:
        """See ``Client.get``. Copies run in threads."""
        return await self.transfer.get(namespace_id, keys, out=out, wait_ms=wait_ms)

    @asynccontextmanager
    async def get_in_place(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, wait_ms: int = 10_000
    ) -> AsyncIterator[tuple[BlockView | None, ...]]:
        """See ``Client.get_in_place``."""
        async with self.transfer.in_place(namespace_id, keys, wait_ms=wait_ms) as views:
            yield views

    # ------------------------------------------------------------ jobs and memory

    async def wait_job(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache``. A job is either waited for or polled: the result is handed out once."""
        connection = self._connection
        if connection is None or not connection.pushes:
            return await self.run(self.operations.wait_job(job_id, timeout_ms))
        pending = self._state.claim(job_id)
        try:
            if pending is not None:
                await connection.wait_until(lambda: self._state.is_finished(job_id), timeout_ms / 1000)
        finally:
            result = self._state.unclaim(job_id)
        if result is not None:
            return result
        if pending is not None and not connection.closed:
            return pending
        return await self.run(self.operations.wait_job(job_id, 0))

    async def poll(self) -> list[Completion]:
        """See ``Client.poll``."""
        if self.connected and not self._connection.pushes:
            for job_id in self._state.pending_jobs():
                result = await self.run(self.operations.wait_job(job_id, 0))
                if Outcome.PENDING not in result.outcomes:
                    self._state.job_done(job_id, result)
        return [Completion(job_id, result) for job_id, result in self._state.take_finished()]

    def memory(self, area: Area) -> memoryview:
        """See ``Cache``. Raises Unavailable without a connection."""
        return self.memory_at(self._generation)(area)

    def memory_at(self, generation: int) -> Callable[[Area], memoryview]:
        """See ``Client.memory_at``."""
        if self._connection is None or self._generation != generation:
            raise Unavailable("the connection was lost, and its places with it", field="generation", value=generation)
        view: Callable[[Area], memoryview] = self._connection.welcome.arenas.view
        return view

    def device_tensor(self) -> Any:
        """See ``Client.device_tensor``. Raises Unavailable without a connection."""
        if self._connection is None:
            raise Unavailable("there is no connection whose DEVICE could be mapped")
        return self._connection.welcome.arenas.device_tensor()

    async def close(self) -> None:
        """See ``Cache``."""
        self._closed = True
        connection = self._connection
        self._drop()
        if connection is not None:
            await connection.wait_closed()

    async def __aenter__(self) -> Self:
        """Use the client as an async context manager: connected at the start, closed at the end."""
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _grpc() -> Any:
    # Imported late, so that a client on the fast path starts without grpc.
    return import_module("kvstore.client.aio_grpc")
