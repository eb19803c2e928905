"""Runs the methods of the table for any transport: parse, check rights, run where it belongs, map errors.

Three bounded pools: one for work (copies, disk), one for waits, one for operators. A call beyond a pool's bound is
refused with RESOURCE_EXHAUSTED instead of being queued without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.core.errors import InvalidArgument, KVStoreError, PermissionDenied, ResourceExhausted, Unavailable
from kvstore.rpc.context import CallContext, Services
from kvstore.rpc.table import METHODS, Method, Runs
from kvstore.wire.errors import as_domain
from kvstore.wire.framing import MESSAGE_BYTES_MAX

R = TypeVar("R")

WORKERS: Final = 16
"""Threads for work. A durable commit holds one while its sync is shared with others, so there are more than cores."""

WAITERS: Final = 32
ADMINS: Final = 4
"""Threads for calls of operators, which may take minutes: a commit or a new session never waits behind one."""

ADMIN_QUEUE_MAX: Final = 32
QUEUE_MAX: Final = 256
"""Calls that may wait for a thread of one pool."""


class BoundedPool:
    """A thread pool that refuses what it could not begin soon.

    A slot belongs to the future of its call and is given back when that has ended, however it did: answered, failed,
    or cancelled before a thread took it.
    """

    def __init__(self, name: str, threads: int, queue_max: int) -> None:
        self.name = name
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvstore-{name}")
        self._bound = threads + queue_max
        self._lock = threading.Lock()
        self._calls = 0

    def submit(self, call: Callable[[], R]) -> Future[R]:
        """Run ``call`` in the pool. Raises ResourceExhausted at the bound."""
        with self._lock:
            if self._calls >= self._bound:
                raise ResourceExhausted(
                    f"{self._calls} calls are under way in the daemon's {self.name} pool; try again",
                    field="calls",
                    value=self._calls,
                    expected=f"below {self._bound}",
                )
            self._calls += 1
        try:
            future = self._pool.submit(call)
        except BaseException:
            self._give_back()
            raise
        future.add_done_callback(self._give_back)
        return future

    @property
    def calls(self) -> int:
        """Calls that hold a slot: under way, or waiting for a thread."""
        return self._calls

    def _give_back(self, _future: object = None) -> None:
        with self._lock:
            self._calls -= 1

    def close(self) -> None:
        """Let calls under way end, take no new ones."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Dispatcher:
    """The one way from a transport to a handler."""

    def __init__(self, services: Services, *, workers: int = WORKERS, waiters: int = WAITERS) -> None:
        self.services = services
        self._pools = {
            Runs.WORK: BoundedPool("work", workers, QUEUE_MAX),
            Runs.WAIT: BoundedPool("wait", waiters, QUEUE_MAX),
            Runs.ADMIN: BoundedPool("admin", ADMINS, ADMIN_QUEUE_MAX),
        }

    def start(
        self, name: str, ctx: CallContext, payload: bytes, loop: asyncio.AbstractEventLoop
    ) -> Message | asyncio.Future[Message]:
        """Begin a call: the reply itself if the method runs inline, else a future of it.

        Raises domain errors, and so does the future.
        """
        method = METHODS.get(name)
        if method is None:
            raise InvalidArgument("method", repr(name[:80]), "a unary method of the services of kvstore.v1")
        check_rights(method, ctx)
        request = parse(method.request, payload)
        runs = method.runs(request)
        if runs is not Runs.INLINE:
            return asyncio.wrap_future(self._pools[runs].submit(lambda: _reply(method, ctx, request)), loop=loop)
        reply = _run(method, lambda: method.handler(ctx, request))
        if isinstance(reply, Message):
            return reply
        # Most calls that may wait need not, and a hop to a thread costs more than they do.
        return asyncio.wrap_future(self._pools[Runs.WAIT].submit(lambda: _run(method, reply)), loop=loop)

    async def call(self, name: str, ctx: CallContext, payload: bytes) -> Message:
        """Run a call to its end; if it is cancelled, the handler is told that nobody waits for it."""
        reply = self.start(name, ctx, payload, asyncio.get_running_loop())
        if isinstance(reply, Message):
            return reply
        try:
            return await reply
        except asyncio.CancelledError:
            ctx.gone.set()
            raise

    async def work(self, call: Callable[[], R]) -> R:
        """Run a step of a stream in the work pool; see ``_step``."""
        return await _step(self._pools[Runs.WORK].submit(call))

    async def wait(self, call: Callable[[], R]) -> R:
        """Run a step that mostly waits in the pool for waits; see ``_step``."""
        return await _step(self._pools[Runs.WAIT].submit(call))

    def calls(self) -> dict[str, int]:
        """Slots taken, by pool."""
        return {pool.name: pool.calls for pool in self._pools.values()}

    def close(self) -> None:
        """Let handlers end."""
        for pool in self._pools.values():
            pool.close()


async def _step(step: Future[R]) -> R:
    """Wait for a step. Who is cancelled meanwhile waits all the same until the step has ended or will never begin.

    So what a stream cleans up afterwards is all that its steps have made.
    """
    future = asyncio.wrap_future(step)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        # A step that no thread has taken yet never begins; one that runs ends first.
        if not step.cancel():
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
        raise


def check_rights(method: Method, ctx: CallContext) -> None:
    """Raise PermissionDenied or Unauthenticated unless the caller may make this call."""
    if method.admin and not ctx.admin:
        raise PermissionDenied(
            f"{method.name} needs admin rights, which {ctx.peer} has not",
            field="method",
            value=method.name,
            expected="a session opened on the session socket by root, the daemon's own user or one of admin_uids; "
            "over gRPC its token, on the Unix socket only",
        )
    if method.session:
        _ = ctx.session


def parse(kind: type[Message], payload: bytes) -> Message:
    """Parse a request; InvalidArgument if it is too long or not a message of this kind."""
    if len(payload) > MESSAGE_BYTES_MAX:
        raise InvalidArgument("message", f"{len(payload)} bytes", f"at most {MESSAGE_BYTES_MAX} bytes")
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument("message", f"{len(payload)} bytes", f"a {kind.DESCRIPTOR.full_name}") from error


def _reply(method: Method, ctx: CallContext, request: Message) -> Message:
    """Run a handler to its end, in the calling thread; not at all if nobody waits for it any more."""
    if ctx.gone.is_set():
        raise Unavailable(f"the caller of {method.name} has gone")
    reply = _run(method, lambda: method.handler(ctx, request))
    return reply if isinstance(reply, Message) else _run(method, reply)


def _run(method: Method, call: Callable[[], R]) -> R:
    try:
        return call()
    except KVStoreError:
        raise
    except Exception as error:
        raise as_domain(error, method.name) from error
