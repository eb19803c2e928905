"""Runs the methods of the table for any transport: parse, check rights, run where it belongs, map errors.

Three bounded pools: one for work (copies, disk), one for waits, one for operators. A call beyond a pool's bound is
refused with RESOURCE_EXHAUSTED instead of being queued without end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from kvstore.core.errors import InvalidArgument, KVStoreError, PermissionDenied, Unavailable
from kvstore.rpc.context import CallContext, Services, no_session
from kvstore.rpc.pool import BoundedPool, Job
from kvstore.rpc.table import OTHERS
from kvstore.rpc.times import CallTimes
from kvstore.wire.errors import as_domain
from kvstore.wire.framing import MESSAGE_BYTES_MAX, Frame
from kvstore.wire.verbs import VERBS, Method, Runs, Verb

log = logging.getLogger(__name__)

R = TypeVar("R")

Done = Callable[[Any, KVStoreError | None], object]
"""Takes a call's reply, or None and its error, on the loop's thread."""

WORKERS: Final = 16
"""Threads for work. A durable commit holds one while its sync is shared with others, so there are more than cores."""

WAITERS: Final = 32
ADMINS: Final = 4
"""Threads for calls of operators, which may take minutes: a commit or a new session never waits behind one."""

OPENERS: Final = 4
"""Threads that make sessions: who comes does not wait behind the commits of all who are there."""

ADMIN_QUEUE_MAX: Final = 32
QUEUE_MAX: Final = 256
"""Calls that may wait for a thread of one pool."""

INLINE_BYTES_MAX: Final = 36 << 10
"""Longest request that is parsed and served on the loop: 1,024 keys and a little. What comes with a longer one, 4,096
keys or 4 MiB of anything, would keep all other callers waiting, so it goes to the pool for work."""


class Dispatcher:
    """The one way from a transport to a handler."""

    def __init__(self, services: Services, *, workers: int = WORKERS, waiters: int = WAITERS) -> None:
        self.services = services
        self._work = BoundedPool("work", workers, QUEUE_MAX)
        self._wait = BoundedPool("wait", waiters, QUEUE_MAX)
        self._admin = BoundedPool("admin", ADMINS, ADMIN_QUEUE_MAX)
        self._open = BoundedPool("open", OPENERS, QUEUE_MAX)
        self._pools = (self._work, self._wait, self._admin, self._open)
        self.times = CallTimes()

    @property
    def quiet(self) -> bool:
        """Whether no call waits for a thread or runs in one."""
        return not any(pool.calls for pool in self._pools)

    def begin(
        self, name: str, ctx: CallContext, payload: bytes, loop: asyncio.AbstractEventLoop, done: Done
    ) -> Message | Job:
        """Begin a call: the reply itself if the method runs inline, else its place in a pool, and ``done`` is told.

        Raises domain errors. The loop's thread only. However a call of a known method ends, its time is counted.
        """
        method = VERBS.get(name) or OTHERS.get(name)
        if method is None:
            raise InvalidArgument("method", repr(name[:80]), "a unary method of the services of kvstore.v1")
        times, runs = self.times, method.runs
        began = times.now()
        try:
            if (method.session and ctx.opened is None) or (method.admin and not ctx.admin):
                check_rights(method, ctx)
            if runs is Runs.INLINE and len(payload) <= INLINE_BYTES_MAX:
                reply = method.serve(ctx, method.request.FromString(payload))
                if isinstance(reply, Message):
                    times.count(name, began)
                    return reply
                # Most calls that may wait need not, and a hop to a thread costs more than they do.
                runs = method.waits
            else:
                reply = partial(_whole, method, ctx, payload)
            pool = self._wait if runs is Runs.WAIT else self._admin if runs is Runs.ADMIN else self._work
            return pool.submit(reply, partial(_tell, loop, partial(_ended, times, method, began, done)))
        except Exception as error:  # noqa: BLE001  it is raised again, as ours
            failure = _failure(error, method)
            times.count(name, began, failure.reason)
            try:
                raise failure from error.__cause__ if failure is error else error
            finally:
                # A frame that refers to the error that went through it keeps what the caller's frames hold, too.
                del failure

    @staticmethod
    def takes_place(frame: Frame) -> bool:
        """Whether a request takes a place in a pool, or may: what runs on the loop alone takes none."""
        method = VERBS.get(frame.name) or OTHERS.get(frame.name)
        if method is None:
            return False
        waits = isinstance(method, Verb) and method.wait is not None
        return waits or method.runs is not Runs.INLINE or len(frame.payload) > INLINE_BYTES_MAX

    def start(
        self, name: str, ctx: CallContext, payload: bytes, loop: asyncio.AbstractEventLoop
    ) -> Message | asyncio.Future[Message]:
        """``begin``, with a future of the reply. If it is cancelled, what has not begun never does."""
        made: list[asyncio.Future[Message]] = []
        reply = self.begin(name, ctx, payload, loop, lambda answer, error: _settle(made[0], answer, error))
        if isinstance(reply, Message):
            return reply
        future: asyncio.Future[Message] = loop.create_future()
        future.add_done_callback(lambda ended: reply.drop() if ended.cancelled() else None)
        made.append(future)
        return future

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
        return await _step(self._work, call)

    async def open(self, call: Callable[[], R]) -> R:
        """Make a session, in the pool for that; see ``_step``."""
        return await _step(self._open, call)

    async def wait(self, call: Callable[[], R]) -> R:
        """Run a step that mostly waits in the pool for waits; see ``_step``."""
        return await _step(self._wait, call)

    def calls(self) -> dict[str, int]:
        """Slots taken, by pool."""
        return {pool.name: pool.calls for pool in self._pools}

    def close(self, timeout_s: float | None = None) -> None:
        """Let handlers end, for at most ``timeout_s`` seconds in all."""
        began = time.monotonic()
        for pool in self._pools:
            left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - began))
            if not pool.close(left):
                log.warning("%d calls in the %s pool have not ended and are left behind", pool.calls, pool.name)


def _ended(
    times: CallTimes, method: Method, began: float, done: Done, answer: Any, error: BaseException | None
) -> None:
    """Count a call that a pool has ended, then tell it, with an error of ours."""
    failure = None if error is None else _failure(error, method)
    times.count(method.name, began, "" if failure is None else failure.reason)
    done(answer, failure)


def _tell(
    loop: asyncio.AbstractEventLoop, done: Callable[[Any, Any], object], answer: Any, error: BaseException | None
) -> None:
    """Tell it on the loop's thread."""
    loop.call_soon_threadsafe(done, answer, error)


def _failure(error: BaseException, method: Method) -> KVStoreError:
    """What a failure is called on the wire: the one place where errors of calls that are not ours become ours."""
    if isinstance(error, DecodeError):
        return _undecodable(method.request)
    return as_domain(error, method.name) if isinstance(error, Exception) else Unavailable("the call was broken off")


def _settle(future: asyncio.Future[Any], answer: Any, error: BaseException | None) -> None:
    """Enter an outcome, unless nobody waits for it any more."""
    if future.done():
        return
    if error is None:
        future.set_result(answer)
    else:
        future.set_exception(error)


async def _step(pool: BoundedPool, call: Callable[[], R]) -> R:
    """Run a call in a pool and wait for it. Who is cancelled meanwhile waits all the same until the step has ended or
    will never begin.

    So what a stream cleans up afterwards is all that its steps have made.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()
    job = pool.submit(call, partial(_tell, loop, partial(_settle, future)))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not job.drop():
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
            # It was looked at: nobody is left who would want to know how it ended.
            future.exception()
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
    if method.session and ctx.opened is None:
        raise no_session()


def parse(kind: type[Message], payload: bytes) -> Message:
    """Parse a request; InvalidArgument if it is too long or not a message of this kind."""
    if len(payload) > MESSAGE_BYTES_MAX:
        raise InvalidArgument("message", f"{len(payload)} bytes", f"at most {MESSAGE_BYTES_MAX} bytes")
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise _undecodable(kind) from error


def _undecodable(kind: type[Message]) -> InvalidArgument:
    return InvalidArgument("message", "bytes that are none", f"a {kind.DESCRIPTOR.full_name}")


def _whole(method: Method, ctx: CallContext, payload: bytes) -> Message:
    """Run a handler to its end, in a pool's thread; not at all if nobody waits for it any more."""
    if ctx.gone.is_set():
        raise Unavailable(f"the caller of {method.name} has gone")
    reply = method.serve(ctx, method.request.FromString(payload))
    return reply if isinstance(reply, Message) else reply()
