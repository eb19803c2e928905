"""The routes, as an ASGI application: ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models``, ``/health``,
``/metrics``.

With keys every route under ``/v1`` needs one of them as a bearer token. The others say nothing of requests.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvstore.core.errors import InvalidArgument
from kvstore.engine.engine import Engine
from kvstore.engine.service.answering import ClientGone, Gathering, chunks, error_of, whole
from kvstore.engine.service.driver import Busy, Driver
from kvstore.engine.service.limits import Limits
from kvstore.engine.service.metrics import Metrics
from kvstore.engine.service.replies import Choice, Form
from kvstore.engine.service.requests import Asked, BadRequest, read_chat, read_completion
from kvstore.engine.weights import Model

NOBODY_READS = Response(status_code=499)
"""What is answered to a client that has gone."""


@dataclass(frozen=True)
class Service:
    """What the routes work on. ``name`` is what clients call the model; ``keys`` empty lets everybody in."""

    engine: Engine
    model: Model
    driver: Driver
    metrics: Metrics
    limits: Limits
    name: str
    keys: tuple[str, ...] = ()
    created: int = 0

    def app(self) -> Starlette:
        """The ASGI application. The driver is started and stopped by who made it."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{name:path}", self._guarded(self._model)),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    def _guarded(self, route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The route behind the keys, with errors as clients expect them."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request.headers.get("authorization", ""))
                return await route(request)
            except BadRequest as error:
                return JSONResponse(error_of(error), error.status)
            except Busy as error:
                full = BadRequest(str(error), status=429, code="too_many_requests")
                return JSONResponse(error_of(full), full.status, {"Retry-After": "1"})
            except (ClientGone, ClientDisconnect):
                return NOBODY_READS

        return guarded

    def _check_key(self, header: str) -> None:
        given = header.removeprefix("Bearer ").encode()
        # All are compared, so that the time says nothing of which one is near.
        matches = [hmac.compare_digest(given, key.encode()) for key in self.keys]
        if self.keys and not any(matches):
            raise BadRequest("a valid key is needed as a bearer token", status=401, code="invalid_api_key")

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat)

    async def _answer(self, request: Request, read: Callable[[object, Limits], Asked]) -> Response:
        body = await self._body(request)
        asked = read(body, self.limits)
        named = body.get("model") if isinstance(body, dict) else None
        if named not in (None, "", self.name):
            raise BadRequest(f"the model {named!r} is not served here", "model", 404, "model_not_found")
        # Off the loop: a long text takes a while.
        prompts = await asyncio.to_thread(self._tokens, asked)
        gathering = Gathering(self.driver, min(asked.timeout_s or self.limits.timeout_s, self.limits.timeout_s))
        choices: list[Choice] = []
        try:
            for tokens in prompts:
                for _ in range(asked.choices):
                    choices.append(Choice(len(choices), len(tokens)))
                    gathering.add(choices[-1].index, tokens, asked, self.model.positions_max - len(tokens))
        except (Busy, BadRequest):
            gathering.cancel()
            raise
        form = Form(self._reply_id(asked), int(time.time()), self.name, asked.is_chat, self._spell)
        if asked.stream:
            return EventStream(gathering, form, choices, asked)
        return await self._whole(request, gathering, form, choices, asked.choices)

    async def _whole(
        self, request: Request, gathering: Gathering, form: Form, choices: list[Choice], per_prompt: int
    ) -> Response:
        watch = asyncio.create_task(_watch(request.receive, gathering))
        try:
            return JSONResponse(await whole(gathering, form, choices, per_prompt))
        finally:
            watch.cancel()
            gathering.cancel()

    async def _body(self, request: Request) -> Any:
        received = bytearray()
        async for part in request.stream():
            received += part
            if len(received) > self.limits.body_max:
                raise BadRequest(f"the body is longer than {self.limits.body_max} bytes", status=413)
        try:
            return await asyncio.to_thread(json.loads, bytes(received))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is no JSON: {str(error)[:200]}") from error

    def _tokens(self, asked: Asked) -> list[list[int]]:
        """Token ids of all prompts. Raises BadRequest."""
        try:
            if asked.messages is None:
                return [self.engine.tokens_of(prompt) for prompt in asked.prompts]
            if self.model.text is None:
                raise BadRequest("this model has no tokenizer, so it takes token ids only", "messages")
            return [self.engine.tokens_of(self.model.text.chat(asked.messages))]
        except InvalidArgument as error:
            field = "prompt" if asked.messages is None else "messages"
            raise BadRequest(str(error), field) from error

    def _spell(self, token: int) -> str:
        if self.model.text is None:
            return f"token_id:{token}"
        spelt: str = self.model.text.tokenizer.decode([token], skip_special_tokens=False)
        return spelt

    def _reply_id(self, asked: Asked) -> str:
        return f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.name:
            raise BadRequest(f"the model {name!r} is not served here", "model", 404, "model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        room = self.model.positions_max
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "kvengine"}
        return {**card, "max_model_len": room}

    async def _health(self, request: Request) -> Response:
        driver = self.driver
        why = driver.failed or ("a step takes too long" if driver.stalled else "")
        facts = {"status": "failed" if why else "ok", "cache": "up" if self.engine.cache_is_up else "away"}
        counts = {"running": self.engine.running, "waiting": max(0, driver.open_requests - self.engine.running)}
        return JSONResponse({**facts, **counts, **({"why": why} if why else {})}, 503 if why else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


class EventStream(Response):
    """The answers as server-sent events, sent as they come; who goes away ends them."""

    def __init__(self, gathering: Gathering, form: Form, choices: list[Choice], asked: Asked) -> None:
        super().__init__()
        self._gathering = gathering
        self._chunks = chunks(gathering, form, choices, asked)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_watch(receive, self._gathering))
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientGone:
            # Nobody is there to be told.
            return
        finally:
            watch.cancel()
            self._gathering.cancel()


async def _watch(receive: Receive, gathering: Gathering) -> None:
    """Tell the gathering when the client closes its connection; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        continue
    gathering.gone()
