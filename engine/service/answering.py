"""One request from its tickets to its last byte: events of the engine's thread, gathered on the event loop.

Whoever goes away, or waits for longer than was allowed, takes all answers of the request with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from kvstore.engine.engine import TokenOutput
from kvstore.engine.service.driver import Driver, Ended, Event, Failure, Prefilled, Ticket
from kvstore.engine.service.replies import Choice, Form, error_body
from kvstore.engine.service.requests import Asked, BadRequest

GRACE_S: Final = 5.0
"""Added to a time-out before the loop gives up on an engine that does not answer at all."""

STATUS: Final = {
    Failure.TIMEOUT: (504, "timeout"),
    Failure.STUCK: (504, "timeout"),
    Failure.MEMORY: (503, "insufficient_memory"),
    Failure.CACHE: (503, "cache_lost"),
    Failure.INVALID: (400, None),
    Failure.FAILED: (500, "engine_failed"),
    Failure.STOPPED: (503, "stopping"),
}
"""HTTP status and error code of each way to end before the end."""


class ClientGone(Exception):
    """The client closed its connection: nobody reads an answer."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The client closed its connection."""


class Gathering:
    """The answers of one request. ``add`` submits; ``events`` yields what comes, in the order in which it came."""

    def __init__(self, driver: Driver, timeout_s: float) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event | Gone]] = asyncio.Queue()
        self._tickets: dict[int, Ticket] = {}
        self._deadline = self._loop.time() + timeout_s + GRACE_S

    def add(self, index: int, tokens: list[int], asked: Asked, room: int) -> None:
        """Ask for one answer. Raises Busy and BadRequest."""

        def deliver(event: Event) -> None:
            # The engine's thread outlives a loop that is being torn down; then nobody reads this.
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        params = asked.params_of(index % asked.choices, room)
        self._tickets[index] = self._driver.submit(
            tokens, params, deliver, timeout_s=asked.timeout_s, priority=asked.priority
        )

    def gone(self) -> None:
        """The client closed its connection."""
        self._events.put_nowait((0, Gone()))

    def cancel(self) -> None:
        """Give up every answer that has not ended. Idempotent."""
        for ticket in self._tickets.values():
            self._driver.cancel(ticket)
        self._tickets.clear()

    async def events(self) -> AsyncIterator[tuple[int, TokenOutput | Prefilled]]:
        """Events until all answers have ended. Raises ClientGone, and BadRequest for an answer that failed."""
        while self._tickets:
            try:
                async with asyncio.timeout_at(self._deadline):
                    index, event = await self._events.get()
            except TimeoutError as error:
                raise BadRequest("the engine does not answer", status=504, code="timeout") from error
            if isinstance(event, Gone):
                raise ClientGone
            if isinstance(event, Ended):
                self._tickets.pop(index, None)
                status, code = STATUS[event.failure]
                raise BadRequest(event.message, status=status, code=code)
            if not isinstance(event, Prefilled) and event.reason is not None:
                self._tickets.pop(index, None)
            yield index, event


async def whole(gathering: Gathering, form: Form, choices: list[Choice], per_prompt: int) -> dict[str, Any]:
    """The reply once all answers have ended."""
    async for index, event in gathering.events():
        if not isinstance(event, Prefilled):
            choices[index].add(event)
    return form.whole(choices, per_prompt)


async def chunks(gathering: Gathering, form: Form, choices: list[Choice], asked: Asked) -> AsyncIterator[bytes]:
    """The stream of server-sent events; progress of a prompt goes as a comment, which clients skip."""
    begun: set[int] = set()
    try:
        async for index, event in gathering.events():
            if isinstance(event, Prefilled):
                yield f": prompt {event.done} of {event.total} tokens\n\n".encode()
                continue
            if index not in begun:
                begun.add(index)
                opening = form.opening(index)
                if opening is not None:
                    yield sse(opening)
            offset = len(choices[index].text)
            choices[index].add(event)
            yield sse(form.piece(index, event, offset))
    except BadRequest as error:
        yield sse(error_of(error))
        return
    if asked.include_usage:
        yield sse(form.usage_chunk(choices, asked.choices))
    yield b"data: [DONE]\n\n"


def sse(value: object) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def error_of(error: BadRequest) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return error_body(error.message, kind, error.param, error.code)
