"""The one thread that owns the engine: requests come in through a queue, events go out through each one's ``deliver``.

::

    submit, cancel (any thread) -> queue -> turn: take orders -> cancel what is late or stuck -> Engine.step -> deliver

An engine whose step raises is broken for good: every request ends with FAILED, ``failed`` says why, and who made the
driver is told, since only a new process mends that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from queue import SimpleQueue
from typing import Final

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import InvalidArgument
from kvstore.engine.engine import Engine, TokenOutput
from kvstore.engine.params import SamplingParams
from kvstore.engine.sequence import FinishReason, RequestId
from kvstore.engine.service.limits import Limits
from kvstore.engine.service.metrics import Metrics

LOG: Final = logging.getLogger("kvstore.engine.service")

PROGRESS_S: Final = 0.5
"""Shortest time between two reports of how far a prompt is."""


class Failure(Enum):
    """Why an answer ended without being whole."""

    TIMEOUT = "timeout"
    STUCK = "stuck"
    MEMORY = "memory"
    CACHE = "cache"
    INVALID = "invalid"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of an answer that is not whole."""

    failure: Failure
    message: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """``done`` of a prompt's ``total`` tokens are computed."""

    done: int
    total: int


Event = TokenOutput | Ended | Prefilled
Deliver = Callable[[Event], None]


class Busy(Exception):
    """Too many requests are under way, or the driver takes none any more."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One answer asked for. Its times and marks belong to the driver's thread."""

    tokens: list[int]
    params: SamplingParams
    deliver: Deliver
    arrived: float
    timeout_s: float
    priority: int = 0
    request_id: RequestId | None = None
    first: float | None = None
    last: float = 0.0
    moved: float = 0.0
    told: float = 0.0
    mark: tuple[int, int] = (0, 0)
    cached: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Cancel:
    ticket: Ticket


class Driver:
    """Runs one engine. ``submit`` and ``cancel`` are for any thread; ``turn`` for one only, which ``start`` makes."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        metrics: Metrics,
        clock: Clock | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._clock = clock or MonotonicClock()
        self._on_failure = on_failure
        self._orders: SimpleQueue[Ticket | _Cancel | None] = SimpleQueue()
        self._tickets: dict[RequestId, Ticket] = {}
        self._lock = threading.Lock()
        self._open = 0
        self._stopping = False
        self._turned = self._clock.now()
        self._thread: threading.Thread | None = None
        self.failed = ""

    # Any thread

    @property
    def open_requests(self) -> int:
        """Answers asked for that have not ended."""
        return self._open

    @property
    def stalled(self) -> bool:
        """True while a step of the engine takes longer than a stuck request may."""
        return self._open > 0 and self._clock.now() - self._turned > self._limits.stuck_s

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        deliver: Deliver,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
    ) -> Ticket:
        """Ask for an answer; ``deliver`` gets its events in the driver's thread, the last one a TokenOutput with a
        reason or an Ended. Raises Busy.
        """
        with self._lock:
            if self.failed or self._stopping:
                raise Busy(self.failed or "the server is stopping")
            if self._open >= self._limits.requests_max:
                raise Busy(f"{self._open} requests are under way, as many as are taken at one time")
            self._open += 1
        now = self._clock.now()
        longest = min(timeout_s or self._limits.timeout_s, self._limits.timeout_s)
        ticket = Ticket(tokens, params, deliver, now, longest, priority, moved=now, told=now)
        self._orders.put(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Give an answer up; no event follows. Nothing happens if it has ended."""
        self._orders.put(_Cancel(ticket))

    def start(self) -> None:
        """Run turns in a thread until ``stop``."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End every answer and the thread; returns when it has ended."""
        with self._lock:
            self._stopping = True
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join()

    # The driver's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn()
            self._end_all(Failure.STOPPED, "the server is stopping")
        except Exception as error:
            LOG.exception("the engine failed")
            with self._lock:
                self.failed = f"the engine failed: {type(error).__name__}: {error}"
            self._end_all(Failure.FAILED, self.failed)
            if self._on_failure is not None:
                self._on_failure()

    def turn(self) -> None:
        """One round; waits for an order where there is nothing to do."""
        if not self._engine.has_work:
            self._take(self._orders.get())
        while not self._orders.empty():
            self._take(self._orders.get())
        self._turned = self._clock.now()
        self._watch()
        if self._engine.has_work:
            self._hand_out(self._engine.step())
            self._metrics.stepped(self._clock.now())

    def _take(self, order: Ticket | _Cancel | None) -> None:
        if isinstance(order, _Cancel):
            ticket = order.ticket
            if ticket.request_id is not None and ticket.request_id in self._tickets:
                self._abort(ticket, "cancelled")
        elif order is not None:
            try:
                order.request_id = self._engine.add_request(order.tokens, order.params, priority=order.priority)
            except InvalidArgument as error:
                self._close(order, "invalid")
                order.deliver(Ended(Failure.INVALID, str(error)))
                return
            self._tickets[order.request_id] = order

    def _watch(self) -> None:
        """Cancel what is late or does not move, and tell how far prompts are."""
        now = self._clock.now()
        for request_id, ticket in list(self._tickets.items()):
            if now - ticket.arrived > ticket.timeout_s:
                self._fail(ticket, Failure.TIMEOUT, f"no answer within {ticket.timeout_s:g} s")
                continue
            at = self._engine.progress(request_id)
            if at is None or at.waiting or (at.computed, at.known) != ticket.mark:
                ticket.moved = now
            elif now - ticket.moved > self._limits.stuck_s:
                self._fail(ticket, Failure.STUCK, f"no progress for {self._limits.stuck_s:g} s")
                continue
            if at is not None:
                ticket.mark = (at.computed, at.known)
                if ticket.first is None and now - ticket.told >= PROGRESS_S:
                    ticket.told = now
                    ticket.deliver(Prefilled(min(at.computed, len(ticket.tokens)), len(ticket.tokens)))

    def _hand_out(self, outputs: list[TokenOutput]) -> None:
        now = self._clock.now()
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is None:
                continue
            if output.token is not None:
                self._count_token(ticket, now)
            ticket.cached = output.cached_tokens or ticket.cached
            if output.reason is not None:
                del self._tickets[output.request_id]
                self._metrics.answered(len(ticket.tokens), ticket.cached, now - ticket.arrived)
                self._close(ticket, output.reason.value)
            if output.reason is FinishReason.MEMORY:
                ticket.deliver(Ended(Failure.MEMORY, "no memory is left for a context of this length"))
            elif output.reason is FinishReason.CACHE:
                ticket.deliver(
                    Ended(Failure.CACHE, "the cache was lost, and only it can hold a context of this length")
                )
            else:
                ticket.deliver(output)

    def _count_token(self, ticket: Ticket, now: float) -> None:
        if ticket.first is None:
            ticket.first = now
            self._metrics.first_token.observe(now - ticket.arrived)
        else:
            self._metrics.between_tokens.observe(now - ticket.last)
        ticket.last = now

    def _fail(self, ticket: Ticket, failure: Failure, message: str) -> None:
        self._abort(ticket, failure.value)
        ticket.deliver(Ended(failure, message))

    def _abort(self, ticket: Ticket, outcome: str) -> None:
        if ticket.request_id is not None:
            self._engine.abort(ticket.request_id)
            self._tickets.pop(ticket.request_id, None)
        self._close(ticket, outcome)

    def _close(self, ticket: Ticket, outcome: str) -> None:
        self._metrics.requests.labels(outcome).inc()
        with self._lock:
            self._open -= 1

    def _end_all(self, failure: Failure, message: str) -> None:
        while not self._orders.empty():
            order = self._orders.get()
            if isinstance(order, Ticket):
                self._close(order, failure.value)
                order.deliver(Ended(failure, message))
        for ticket in list(self._tickets.values()):
            if failure is Failure.FAILED:
                self._close(ticket, failure.value)
                ticket.deliver(Ended(failure, message))
            else:
                self._fail(ticket, failure, message)
        self._tickets.clear()
