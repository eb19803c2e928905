"""What a client does, without I/O: connect, calls, put, get, views in place, jobs. Read ``steps.py`` first.

Rights have one owner here. What a flow takes (places in the buffer, pins under a lease) it gives back in its
``finally``, whether it ends by answer, error, time-out or cancellation; the reply of a call whose caller is gone is
undone when it comes (``Operation.undo``), and where it may never come, the whole lease is ended instead of its keys.

``Flows`` is the memory of one client between calls. Its lists are only ever appended to, popped and replaced whole, so
that threads need no lock; ``ClientState`` and ``StandingPlaces`` have their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvstore.cache import FetchResult
from kvstore.client.flow_get import Gets
from kvstore.client.flow_lookup import Lookups
from kvstore.client.flow_match import Matches
from kvstore.client.flow_put import Puts
from kvstore.client.operations import Operation, Operations, check_wait, missed, request_of
from kvstore.client.options import ClientOptions
from kvstore.client.state import ClientState, Completion, outward
from kvstore.client.steps import Call, Connect, Flow, Late, Open, Pause, Send, Until, Wait
from kvstore.core.clock import Clock
from kvstore.core.errors import (
    InvalidArgument,
    KVStoreError,
    NamespaceMismatch,
    ResourceExhausted,
    Unavailable,
    UnknownNamespace,
)
from kvstore.core.types import JobId, NamespaceId, Outcome, ReservationId
from kvstore.v1 import session_pb2
from kvstore.wire.verbs.base import KnownNamespace
from kvstore.wire.verbs.reads import fetch_result

log = logging.getLogger("kvstore.client")
T = TypeVar("T")

CALLERS_ERRORS: Final = (InvalidArgument, NamespaceMismatch)
"""Errors in the caller's program or configuration: they raise whether or not the client is strict, since a cache
that hides them would miss for ever."""

STREAM_SECONDS_PER_GIB: Final = 60.0
"""Deadline of a stream beyond that of a call: the slowest network that is still worth more than recomputing."""

LINE_PAUSE_S: Final = 0.01
LINE_PAUSE_S_MAX: Final = 0.5
"""How long a refused stream waits before it tries again; each time twice as long, up to the second."""

_LOUD_UNTIL: Final = 3
_LOUD_EVERY: Final = 1000


class Flows:
    """The flows of one client and what they know between calls."""

    def __init__(self, target: str, options: ClientOptions, clock: Clock) -> None:
        self.target = target
        self.options = options
        self.clock = clock
        self.state = ClientState(options.backoff, clock, options.job_timeout_s)
        self.operations = Operations(self.state)
        self.link: Any = None
        self.generation = -1
        self.closed = False
        self.puts = Puts(self)
        self.gets = Gets(self)
        self.lookups = Lookups(self)
        self.matches = Matches(self)

    # ------------------------------------------------------------ connection

    def connect(self) -> Flow[Any]:
        """A new link with every known namespace open, which is the client's from then on. One at a time."""
        self._unless_closed(None)
        self.drop()
        left = self.state.seconds_to_attempt(self.clock.now())
        if left > 0:
            raise Unavailable(
                f"no daemon at {self.target}; the next attempt to connect is in {left:.2f} s",
                field="target",
                value=self.target,
            )
        generation = self.state.next_generation
        link = None
        try:
            link = yield Open(generation)
            link.generation = generation
            for operation in self.operations.reopen():
                try:
                    yield from self.on(link, operation)
                except CALLERS_ERRORS as error:
                    # Another client bound the name to another spec meanwhile: that namespace misses, the others work.
                    log.error("a namespace was not opened again: %s", error)
        except KVStoreError:
            self.state.connect_failed(self.clock.now())
            _close(link)
            raise
        except BaseException:
            _close(link)
            raise
        self._unless_closed(link)
        if self.state.connected(link.welcome.boot_id) and generation:
            log.warning("the daemon at %s was restarted; namespaces are open again", self.target)
        self._lose_jobs()
        self.link, self.generation = link, generation
        return link

    def _unless_closed(self, link: Any) -> None:
        if self.closed:
            _close(link)
            raise Unavailable("the client is closed")

    def drop(self) -> None:
        """Close the present link, if any."""
        link, self.link = self.link, None
        _close(link)

    def forked(self) -> None:
        """In the child of a fork: begin unconnected. Nothing of the parent's session is touched, or used ever again."""
        link, self.link = self.link, None
        self.state.forked()
        self.puts, self.gets = Puts(self), Gets(self)
        if link is not None:
            link.abandon()
        self._lose_jobs()

    def job_done(self, done: session_pb2.JobDone, generation: int) -> None:
        """A link was told that a job has ended."""
        job_id = JobId(outward(done.job_id, generation))
        self.state.job_done(job_id, fetch_result(self.state, (), done.result, generation))

    # ------------------------------------------------------------ calls

    def run(self, operation: Operation[T]) -> Flow[T]:
        """Carry out an operation; without ``strict``, a failure of the cache becomes its fallback."""
        try:
            return (yield from self.attempt(operation))
        except KVStoreError as error:
            return self.fall_back(operation.method, error, operation.fallback)

    def attempt(self, operation: Operation[T]) -> Flow[T]:
        """Carry out an operation or raise; one that changes nothing is sent again if its connection was lost."""
        tries = 2 if operation.pure else 1
        while True:
            tries -= 1
            link = self.link
            if link is None or link.closed:
                link = yield Connect()
            try:
                return (yield from self.on(link, operation))
            except Unavailable:
                if not link.closed or not tries:
                    raise

    def on(self, link: Any, operation: Operation[T]) -> Flow[T]:
        """Carry out an operation over this link or raise."""
        timeout_s = self.options.timeout_s + operation.wait_ms / 1000
        late = self.late_of(link, operation)
        reply = yield Call(link, operation.method, request_of(operation), timeout_s, late)
        return operation.parse(operation.reply.FromString(reply), link.generation)

    def late_of(self, link: Any, operation: Operation[T]) -> Late | None:
        """What undoes the operation when its reply comes after its caller has gone."""
        undo = operation.undo
        if undo is None:
            return None

        def late(reply: bytes) -> None:
            again = undo(operation.reply.FromString(reply), link.generation)
            if again is not None:
                self.post(again, link)

        return late

    def begin(self, operation: Operation[T]) -> Flow[Callable[[], Flow[T]]]:
        """Send an operation; the flow that comes back waits for its reply and answers like ``run``."""
        timeout_s = self.options.timeout_s + operation.wait_ms / 1000
        try:
            link = self.link
            if link is None or link.closed:
                link = yield Connect()
            sent = yield Send(link, operation.method, request_of(operation), timeout_s)
        except KVStoreError as error:
            failed = error
            return lambda: _answer(self.fall_back, operation.method, failed, operation.fallback)

        def finish() -> Flow[T]:
            try:
                reply = yield Wait(link, sent, operation.method, timeout_s, self.late_of(link, operation))
                return operation.parse(operation.reply.FromString(reply), link.generation)
            except KVStoreError as error:
                return self.fall_back(operation.method, error, operation.fallback)

        return finish

    def post(self, operation: Operation[Any], link: Any = None) -> None:
        """Send an operation whose answer nobody needs, over its own link. A failure is counted. Waits for nothing."""
        link = link or self.link
        try:
            if link is None or link.closed:
                raise Unavailable("there is no connection")
            link.post(operation.method, request_of(operation))
        except KVStoreError as error:
            self.note(operation.method, error)

    def owns(self, reservations: Sequence[ReservationId]) -> bool:
        """Whether any of these is of the connection that is there: the others ended with theirs."""
        return self.link is not None and not self.link.closed and bool(self.state.present_reservations(reservations))

    def fall_back(self, method: str, error: KVStoreError, fallback: Callable[[], T]) -> T:
        """Raise a failure if the client is strict or the caller is to blame; else count it and answer for the cache."""
        if self.options.strict or isinstance(error, CALLERS_ERRORS):
            try:
                raise error
            finally:
                # A frame that refers to the error that went through it keeps what the caller's frames hold, too.
                del error
        self.note(method, error)
        return fallback()

    def note(self, method: str, error: KVStoreError) -> None:
        """Count a failure that the caller does not see; the first few of each kind and every thousandth are logged."""
        times = self.state.failed(method, error)
        if times <= _LOUD_UNTIL or times % _LOUD_EVERY == 0:
            log.warning("%s failed and counts as a miss (%d times so far): %s", method, times, error)

    def stream_timeout(self, nbytes: int) -> float:
        """Seconds that a stream of so many bytes may take."""
        return self.options.timeout_s + nbytes / (1 << 30) * STREAM_SECONDS_PER_GIB

    def in_line(self, stream: Callable[[], Flow[T]]) -> Flow[T]:
        """Run a flow of one stream. Refused because of other clients of this host it waits, as long as a call may."""
        pause, waited = LINE_PAUSE_S, 0.0
        while True:
            try:
                return (yield from stream())
            except ResourceExhausted as error:
                # Without a field it is gRPC's own bound.
                if error.field not in ("calls", "") or waited >= self.options.timeout_s:
                    raise
            yield Pause(pause)
            waited, pause = waited + pause, min(2 * pause, LINE_PAUSE_S_MAX)

    # ------------------------------------------------------------ jobs

    def wait_job(self, job_id: JobId, timeout_ms: int) -> Flow[FetchResult]:
        """See ``Cache.wait_job``. A job is either waited for or polled: the result is handed out once."""
        check_wait("timeout_ms", timeout_ms)
        link = self.link
        if link is not None and not link.pushes:
            return (yield from self.run(self.operations.wait_job(job_id, timeout_ms)))
        pending = self.state.claim(job_id)
        try:
            if pending is not None and link is not None:
                link.pump()
                if not self.state.is_finished(job_id) and timeout_ms > 0:
                    yield Until(link, lambda: self.state.is_finished(job_id), timeout_ms / 1000)
        finally:
            result = self.state.unclaim(job_id)
        if result is not None:
            return result
        if pending is not None and link is not None and not link.closed:
            return self.state.overdue(job_id, self.clock.now()) or pending
        return (yield from self.run(self.operations.wait_job(job_id, 0)))

    def poll(self) -> Flow[list[Completion]]:
        """See ``Client.poll``."""
        link = self.link
        if link is not None:
            if link.pushes:
                link.pump()
            elif not link.closed:
                for job_id in self.state.pending_jobs():
                    result = yield from self.run(self.operations.wait_job(job_id, 0))
                    if Outcome.PENDING not in result.outcomes:
                        self.state.job_done(job_id, result)
        if link is None or link.closed:
            self.state.all_jobs_lost()
        self.state.end_overdue(self.clock.now())
        return [Completion(job_id, result) for job_id, result in self.state.take_finished()]

    def _lose_jobs(self) -> None:
        for job_id, keys in self.state.lost_jobs():
            self.state.job_lost(job_id, missed(keys))

    # ------------------------------------------------------------ namespaces

    def known(self, namespace_id: NamespaceId) -> KnownNamespace:
        """A namespace that this client opened. Raises UnknownNamespace."""
        known = self.state.namespaces.get(namespace_id)
        if known is None:
            raise UnknownNamespace(
                f"namespace {bytes(namespace_id).hex()[:16]} was not opened by this client",
                field="namespace_id",
                value=bytes(namespace_id).hex(),
                expected="an id that open_namespace of this client answered",
            )
        return known


def _answer(call: Callable[..., T], *arguments: Any) -> Flow[T]:
    yield from ()
    return call(*arguments)


def _close(link: Any) -> None:
    if link is not None:
        link.close()
