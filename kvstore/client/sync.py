"""The blocking client: meets ``kvstore.cache.Cache`` over a session, thread-safe, reconnecting by itself.

All that it decides is in ``flows.py``; this is the driver that carries the flows' steps out, in the calling thread.
The lock is held while connecting, never during a call.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from kvstore.client import steps
from kvstore.client.connect import connect
from kvstore.client.copying import copy_all
from kvstore.client.flows import CALLERS_ERRORS, Flows
from kvstore.client.linked import Linked
from kvstore.client.operations import Operation, request_of
from kvstore.client.options import ClientOptions
from kvstore.client.options import Target as Address
from kvstore.client.payloads import Views
from kvstore.client.steps import Flow
from kvstore.client.sync_calls import SyncCalls
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.core.types import Area, BlockKey, NamespaceId

if TYPE_CHECKING:
    # It loads numpy, which admin tools start without.
    from kvstore.client.plan import Plan

T = TypeVar("T")

_CLIENTS: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


class Client(Linked, SyncCalls):
    """A session with a daemon.

    ``target`` is the path of the session socket, or ``grpc://host:port`` for a daemon on another host. Without
    ``options.strict`` no method raises for a failure of the cache; see ``ClientOptions``. Errors of the caller
    (InvalidArgument, NamespaceMismatch) raise always. After a restart of the daemon the next call connects again
    and opens the known namespaces again; leases, reservations and jobs of the old session are unknown then. In the
    child of a fork a client begins unconnected, with a session of its own at its first call.
    """

    def __init__(self, target: str | Path, options: ClientOptions | None = None, *, clock: Clock | None = None) -> None:
        self._address = Address.parse(target)
        self._lock = threading.RLock()
        flows = Flows(self._address.text, options or ClientOptions(), clock or MonotonicClock())
        super().__init__(flows, remote=bool(self._address.address))
        self._keeper = _Keeper(self)
        _CLIENTS.add(self)
        try:
            self.connection()
        except KVStoreError as error:
            if self.options.strict or isinstance(error, CALLERS_ERRORS):
                raise
            self.flows.note("connect", error)

    # ------------------------------------------------------------ connection

    def connection(self) -> tuple[Any, int]:
        """The living link and its generation, made now if there is none. Raises Unavailable inside a pause."""
        link = self._connect(steps.Connect())
        return link, link.generation

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
                    self.flows.note("connect", error)
                    return False
                pause.wait(min(left, max(0.001, self.state.seconds_to_attempt(self.flows.clock.now()))))
            else:
                return True

    def run(self, operation: Operation[T]) -> T:
        """Carry out an operation; without ``strict``, a failure of the cache becomes its fallback.

        This is ``flows.run`` where there is a connection and the call does not fail, which nearly always holds: then it
        needs no flow. Whatever else happens is the flow's affair, or its fallback's.
        """
        flows = self.flows
        link = flows.link
        if link is None or link.closed:
            return self.drive(flows.run(operation))
        late = None if operation.undo is None else flows.late_of(link, operation)
        try:
            timeout_s = flows.options.timeout_s + operation.wait_ms / 1000
            reply = link.call(operation.method, request_of(operation), timeout_s, late)
            return operation.parse(operation.reply.FromString(reply), link.generation)
        except KVStoreError as error:
            if operation.pure and link.closed and isinstance(error, Unavailable):
                return self.drive(flows.run(operation))
            return flows.fall_back(operation.method, error, operation.fallback)

    def begin(self, operation: Operation[T]) -> Callable[[], T]:
        """Send an operation without waiting; the function that comes back waits and answers like ``run``."""
        finish = self.drive(self.flows.begin(operation))
        return lambda: self.drive(finish())

    def fileno(self) -> int:
        """A descriptor to poll or select on: readable when ``poll`` may have something. New after each reconnect."""
        number: int = self.connection()[0].fileno()
        return number

    def memory(self, area: Area) -> memoryview:
        """See ``Cache``. The view belongs to the present generation; after a reconnect ask again."""
        view: memoryview = self.connection()[0].welcome.arenas.view(area)
        return view

    def device_tensor(self) -> Any:
        """DEVICE as a flat uint8 torch tensor on its GPU; None where it is shared memory, which ``memory`` has.

        Loads torch. The tensor belongs to the present generation, and holds its mapping. Raises Unavailable if the
        GPU's memory can not be mapped, or if DEVICE was not asked for.
        """
        return self.connection()[0].welcome.arenas.device_tensor()

    @contextmanager
    def get_in_place(
        self, namespace_id: NamespaceId, keys: Sequence[BlockKey], *, wait_ms: int = 10_000
    ) -> Iterator[Views]:
        """Blocks where they lie, without a copy: ``with client.get_in_place(...) as blocks``.

        They are pinned, and the lease is renewed, until the end. ``blocks.held()`` says, meanwhile and afterwards,
        whether what was read up to then can be believed; the end raises if it can not and the client is strict.
        """
        views = self.drive(self.flows.gets.open_views(namespace_id, keys, wait_ms))
        self._keeper.add(views)
        try:
            yield views
        finally:
            self._keeper.remove(views)
            self.flows.gets.close_views(views)

    def plan(self, namespace_id: NamespaceId, keys: Sequence[BlockKey], **more: Any) -> Plan:
        """A reading plan over any number of keys; arguments and errors as ``kvstore.client.plan.Plan.open``."""
        opened: Plan = import_module("kvstore.client.plan").Plan.open(self, namespace_id, keys, **more)
        return opened

    def close(self) -> None:
        """See ``Cache``."""
        self.flows.closed = True
        with self._lock:
            self.flows.drop()

    def __enter__(self) -> Self:
        """Use the client as a context manager: it is closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forked(self) -> None:
        """In the child of a fork, where no other thread lives: begin unconnected, with new locks."""
        self._lock = threading.RLock()
        self._keeper = _Keeper(self)
        self.flows.forked()

    # ------------------------------------------------------------ the driver

    def drive(self, flow: Flow[T]) -> T:
        """Carry out a flow in this thread."""
        try:
            step = next(flow)
            while True:
                try:
                    answer = _CARRY_OUT[type(step)](self, step)
                except BaseException as error:  # noqa: BLE001  the flow gives back what it took, then it comes out again
                    step = flow.throw(error)
                else:
                    step = flow.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _connect(self, _step: steps.Connect) -> Any:
        link = self.flows.link
        if link is not None and not link.closed:
            return link
        with self._lock:
            link = self.flows.link
            if link is not None and not link.closed:
                return link
            return self.drive(self.flows.connect())

    def _open(self, step: steps.Open) -> Any:
        return connect(self._address, self.options, lambda done: self.flows.job_done(done, step.generation))

    def _call(self, step: steps.Call) -> bytes:
        if step.begun is not None:
            step.begun()
        reply: bytes = step.link.call(step.method, step.payload, step.timeout_s, step.late)
        return reply

    def _send(self, step: steps.Send) -> Any:
        return step.link.send(step.method, step.payload, step.timeout_s)

    def _wait(self, step: steps.Wait) -> bytes:
        reply: bytes = step.link.wait(step.sent, step.method, step.timeout_s, step.late)
        return reply

    def _copy(self, step: steps.Copy) -> None:
        copy_all(step.groups, step.threads)

    def _until(self, step: steps.Until) -> None:
        step.link.wait_until(step.ready, step.timeout_s)

    def _pause(self, step: steps.Pause) -> None:
        time.sleep(step.seconds)

    def _upload(self, step: steps.Upload) -> bytes:
        reply: bytes = _streams(step.link).upload(step.method, step.messages, step.timeout_s)
        return reply

    def _download(self, step: steps.Download) -> None:
        for message in _streams(step.link).stream(step.method, step.payload, step.timeout_s):
            step.take(message)


_CARRY_OUT: Final[dict[type, Callable[[Client, Any], Any]]] = {
    steps.Call: Client._call,
    steps.Connect: Client._connect,
    steps.Open: Client._open,
    steps.Send: Client._send,
    steps.Wait: Client._wait,
    steps.Copy: Client._copy,
    steps.Until: Client._until,
    steps.Pause: Client._pause,
    steps.Upload: Client._upload,
    steps.Download: Client._download,
}


class _Keeper:
    """Renews the leases of open views, in a thread that lives while there are any. The lock guards every field."""

    def __init__(self, client: Client) -> None:
        self._client = weakref.ref(client)
        self._lock = threading.Lock()
        self._open: dict[int, Views] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, views: Views) -> None:
        """Keep these alive."""
        if views.lease is None:
            return
        with self._lock:
            self._open[id(views)] = views
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._ended,), name="kvstore-views", daemon=True
                )
                self._thread.start()

    def remove(self, views: Views) -> None:
        """No more."""
        with self._lock:
            self._open.pop(id(views), None)
            if not self._open and self._thread is not None:
                self._ended.set()
                self._thread = None

    def _run(self, ended: threading.Event) -> None:
        while True:
            with self._lock:
                period = min((views.lease.ttl_s for views in self._open.values()), default=0.0) / 3
            if ended.wait(period):
                return
            with self._lock:
                due = list(self._open.values())
            for views in due:
                client = self._client()
                if client is not None:
                    client.drive(client.flows.gets.renew_views(views))


def _streams(link: Any) -> Any:
    if not hasattr(link, "stream"):
        raise InvalidArgument("target", "a session socket", "a gRPC address, since streams are gRPC's")
    return link


def _forked() -> None:
    for client in list(_CLIENTS):
        client.forked()


os.register_at_fork(after_in_child=_forked)
