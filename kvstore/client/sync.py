"""The synchronous client: meets ``store.api.Cache`` over a session, thread-safe, reconnecting by itself.

The lock guards which connection is current; it is held while connecting, never during a call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

from kvstore.cache import CommitResult, FetchResult
from kvstore.client.connect import connect
from kvstore.client.connection import Connection
from kvstore.client.core import CALLERS_ERRORS, Completion, note_failure
from kvstore.client.operations import Operation, Operations, fetch_result, missed
from kvstore.client.options import ClientOptions
from kvstore.client.options import Target as Address
from kvstore.client.payloads import BlockView, GotBlocks, PutBlocks
from kvstore.client.state import ClientState, outward
from kvstore.client.sync_calls import SyncCalls
from kvstore.client.transfer import Transfer
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import KVStoreError, Unavailable
from kvstore.core.types import (
    Area,
    BlockKey,
    JobId,
    NamespaceId,
    Outcome,
)
from kvstore.v1 import session_pb2

log = logging.getLogger(__name__)
T = TypeVar("T")


class Client(SyncCalls):
    """A session with a daemon.

    ``target`` is the path of the session socket, or ``grpc://host:port`` for a daemon on another host. Without
    ``options.strict`` no method raises for a failure of the cache; see ``ClientOptions``. Errors of the caller
    (InvalidArgument, NamespaceMismatch) raise always. After a restart of the daemon the next call connects again
    and opens the known namespaces again; leases, reservations and jobs of the old session are unknown then.
    """

    def __init__(self, target: str | Path, options: ClientOptions | None = None, *, clock: Clock | None = None) -> None:
        self._address = Address.parse(target)
        self._options = options or ClientOptions()
        self._clock = clock or MonotonicClock()
        self._state = ClientState(self._options.backoff)
        self.operations = Operations(self._state)
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._generation = -1
        self._closed = False
        self.transfer = Transfer(self)
        try:
            self.connection()
        except KVStoreError as error:
            if self._options.strict or isinstance(error, CALLERS_ERRORS):
                raise
            note_failure(self._state, "connect", error)

    # ------------------------------------------------------------ what it is

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
        """Counts connections from 0; -1 before the first. Views from ``memory`` and places belong to one generation."""
        return self._state.generation

    @property
    def connected(self) -> bool:
        """Whether the last call left a living connection; a call may still find it gone."""
        connection = self._connection
        return connection is not None and not connection.closed

    @property
    def remote(self) -> bool:
        """Whether bytes go over the network: then only put and get carry them."""
        return bool(self._address.address)

    def failures(self) -> dict[str, int]:
        """Failures that were answered as misses, by "Method:REASON"."""
        return self._state.failures()

    # ------------------------------------------------------------ connection

    def connection(self) -> tuple[Connection, int]:
        """The living connection and its generation, made now if there is none. Raises Unavailable inside a pause."""
        current = self._connection
        if current is not None and not current.closed:
            return current, self._generation
        with self._lock:
            current = self._connection
            if current is not None and not current.closed:
                return current, self._generation
            return self._connect()

    def _connect(self) -> tuple[Connection, int]:
        if self._closed:
            raise Unavailable("the client is closed")
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        left = self._state.seconds_to_attempt(self._clock.now())
        if left > 0:
            raise Unavailable(
                f"no daemon at {self._address.text}; the next attempt to connect is in {left:.2f} s",
                field="target",
                value=self._address.text,
            )
        generation = self._state.next_generation
        try:
            connection = connect(self._address, self._options, lambda done: self._job_done(done, generation))
        except KVStoreError:
            self._state.connect_failed(self._clock.now())
            raise
        fresh = self._state.connected(connection.welcome.boot_id)
        self._generation = self._state.generation
        try:
            self._open_again(connection)
        except KVStoreError:
            connection.close()
            self._state.connect_failed(self._clock.now())
            raise
        if fresh and self._generation:
            log.warning("the daemon at %s was restarted; namespaces are open again", self._address.text)
        for job_id, keys in self._state.lost_jobs():
            self._state.job_lost(job_id, missed(keys))
        self._connection = connection
        return connection, self._generation

    def _open_again(self, connection: Connection) -> None:
        for operation in self.operations.reopen():
            try:
                reply = connection.call(
                    operation.method, operation.build().SerializeToString(), self._options.timeout_s
                )
                operation.parse(operation.reply.FromString(reply), self._generation)
            except CALLERS_ERRORS as error:
                # Another client bound the name to another spec meanwhile: that namespace misses, the others work.
                log.error("a namespace was not opened again: %s", error)

    def _job_done(self, done: session_pb2.JobDone, generation: int) -> None:
        job_id = JobId(outward(done.job_id, generation))
        self._state.job_done(job_id, fetch_result(done.result, generation))

    def wait_ready(self, timeout_s: float) -> bool:
        """Try to connect until it works or the time is over; True if connected."""
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while True:
            try:
                self.connection()
            except KVStoreError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    note_failure(self._state, "connect", error)
                    return False
                pause.wait(min(left, max(0.001, self._state.seconds_to_attempt(self._clock.now()))))
            else:
                return True

    def run(self, operation: Operation[T]) -> T:
        """Carry out an operation; without ``strict``, a failure of the cache becomes its fallback."""
        try:
            return self.attempt(operation)
        except KVStoreError as error:
            return self.fall_back(operation.method, error, operation.fallback)

    def attempt(self, operation: Operation[T]) -> T:
        """Carry out an operation or raise; one that changes nothing is sent again if its connection was lost."""
        timeout_s = self._options.timeout_s + operation.wait_ms / 1000
        tries = 2 if operation.pure else 1
        while True:
            tries -= 1
            connection, generation = self.connection()
            payload = operation.build().SerializeToString()
            try:
                reply = connection.call(operation.method, payload, timeout_s)
            except Unavailable:
                if not connection.closed or not tries:
                    raise
            else:
                return operation.parse(operation.reply.FromString(reply), generation)

    def begin(self, operation: Operation[T]) -> Callable[[], T]:
        """Send an operation without waiting; the function that comes back waits and answers like ``run``."""
        timeout_s = self._options.timeout_s + operation.wait_ms / 1000
        try:
            connection, generation = self.connection()
            call_id = connection.send(operation.method, operation.build().SerializeToString(), timeout_s)
        except KVStoreError as error:
            failed = error
            return lambda: self.fall_back(operation.method, failed, operation.fallback)

        def finish() -> T:
            try:
                reply = connection.wait(call_id, operation.method, timeout_s)
                return operation.parse(operation.reply.FromString(reply), generation)
            except KVStoreError as error:
                return self.fall_back(operation.method, error, operation.fallback)

        return finish

    def post(self, operation: Operation[T]) -> None:
        """Send an operation whose answer nobody needs. A failure is counted."""
        try:
            connection, _ = self.connection()
            payload = operation.build().SerializeToString()
            connection.forget(connection.send(operation.method, payload, self._options.timeout_s))
        except KVStoreError as error:
            self.note(operation.method, error)

    def fall_back(self, method: str, error: KVStoreError, fallback: Callable[[], T]) -> T:
        """Raise a failure if the client is strict or the caller is to blame; else count it and answer for the cache."""
        if self._options.strict or isinstance(error, CALLERS_ERRORS):
            raise error
        self.note(method, error)
        return fallback()

    def note(self, method: str, error: KVStoreError) -> None:
        """Count and log a failure that the caller does not see."""
        note_failure(self._state, method, error)

    # ------------------------------------------------------------ whole payloads

    def put(self, namespace_id: NamespaceId, blocks: PutBlocks) -> CommitResult:
        """Store whole blocks under their keys, parents first.

        Each payload is a contiguous buffer of ``layers * raw_slice_bytes`` bytes, raw whatever the codec, read before
        the call returns. HIT where the block is resident now (``existed`` where it was before) and, if that was asked
        for, durable; else MISS and why.
        """
        return self.transfer.put(namespace_id, blocks)

    def get(
        self,
        namespace_id: NamespaceId,
        keys: Sequence[BlockKey],
        *,
        out: object | None = None,
        wait_ms: int = 10_000,
    ) -> GotBlocks:
        """Copy whole blocks out, waiting ``wait_ms`` for those that must come from SSD.

        ``out`` is a writable contiguous buffer of ``len(keys)`` times the larger of raw and coded payload bytes, best
        page-aligned; without it one is made. Missing blocks leave their part of it alone.
        """
        return self.transfer.get(namespace_id, keys, out=out, wait_ms=wait_ms)

    def get_in_place(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, wait_ms: int = 10_000
    ) -> AbstractContextManager[tuple[BlockView | None, ...]]:
        """Blocks where they lie, without a copy: ``with client.get_in_place(...) as blocks``. Pinned until the end."""
        return self.transfer.in_place(namespace_id, keys, wait_ms=wait_ms)

    # ------------------------------------------------------------ jobs

    def wait_job(self, job_id: JobId, timeout_ms: int) -> FetchResult:
        """See ``Cache``. A job is either waited for or polled: the result is handed out once."""
        connection = self._connection
        if connection is None or not connection.pushes:
            return self.run(self.operations.wait_job(job_id, timeout_ms))
        pending = self._state.claim(job_id)
        try:
            if pending is not None:
                connection.wait_until(lambda: self._state.is_finished(job_id), timeout_ms / 1000)
        finally:
            result = self._state.unclaim(job_id)
        if result is not None:
            return result
        if pending is not None and not connection.closed:
            return pending
        return self.run(self.operations.wait_job(job_id, 0))

    def poll(self) -> list[Completion]:
        """Jobs that have ended since the last time, without waiting. Those that a restart has ended are misses."""
        connection = self._connection
        if connection is not None and not connection.closed:
            if connection.pushes:
                connection.pump()
            else:
                self._ask_for_jobs()
        return [Completion(job_id, result) for job_id, result in self._state.take_finished()]

    def _ask_for_jobs(self) -> None:
        for job_id in self._state.pending_jobs():
            result = self.run(self.operations.wait_job(job_id, 0))
            if Outcome.PENDING not in result.outcomes:
                self._state.job_done(job_id, result)

    def fileno(self) -> int:
        """A descriptor to poll or select on: readable when ``poll`` may have something. New after each reconnect."""
        return self.connection()[0].fileno()

    def memory(self, area: Area) -> memoryview:
        """See ``Cache``. The view belongs to the present generation; after a reconnect ask again."""
        return self.connection()[0].welcome.arenas.view(area)

    def device_tensor(self) -> Any:
        """DEVICE as a flat uint8 torch tensor on its GPU; None where it is shared memory, which ``memory`` has.

        Loads torch. The tensor belongs to the present generation, and holds its mapping. Raises Unavailable if the
        GPU's memory can not be mapped, or if DEVICE was not asked for.
        """
        return self.connection()[0].welcome.arenas.device_tensor()

    def memory_at(self, generation: int) -> Callable[[Area], memoryview]:
        """What finds areas of one connection. Raises Unavailable if it is not the present one any more.

        Places are looked up in the memory that they came with: after a reconnect the same offset is someone else's.
        """
        connection, present = self._connection, self._generation
        if connection is None or present != generation:
            raise Unavailable("the connection was lost, and its places with it", field="generation", value=generation)
        return connection.welcome.arenas.view

    def close(self) -> None:
        """See ``Cache``."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __enter__(self) -> Self:
        """Use the client as a context manager: it is closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
