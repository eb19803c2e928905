"""``kvctl`` in this process, over a daemon that answers what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner

from kvstore.core.errors import Unavailable
from kvstore.tools.kvctl.connect import connect_daemon
from kvstore.tools.kvctl.main import make_app
from kvstore.v1 import admin_pb2, cache_pb2


@dataclass
class FakeDaemon:
    """Replies by method: a message, an error to raise, or a function of the request. Keeps what it was asked."""

    replies: dict[str, Message | Exception | Callable[[Any], Message]] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    sockets: list[str] = field(default_factory=list)
    closed: int = 0

    def connect(self, socket: str, timeout: float) -> FakeDaemon:
        self.sockets.append(socket)
        if not self.replies:
            raise Unavailable(f"no daemon answers at {socket}")
        return self

    def call(self, method, request, reply_class, timeout):
        self.asked.append((method, request))
        self.timeouts.append(timeout)
        reply = self.replies[method]
        if isinstance(reply, Exception):
            raise reply
        reply = reply(request) if callable(reply) else reply
        assert isinstance(reply, reply_class)
        return reply

    def close(self) -> None:
        self.closed += 1


@dataclass
class Ran:
    """What a shell would see."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def kvctl(daemon) -> Callable[..., Ran]:
    app = make_app(daemon.connect, "/run/test.sock")

    def run(*words: str, stdin: str | None = None) -> Ran:
        done = CliRunner().invoke(app, list(words), input=stdin, prog_name="kvctl")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Ran(done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def namespace(daemon) -> admin_pb2.NamespaceInfo:
    """The only namespace that the daemon knows: blocks of four tokens."""
    info = admin_pb2.NamespaceInfo(namespace_id=bytes(range(32)), name="smol", blocks=7, blocks_by_tier=[1, 5, 7])
    info.spec.model, info.spec.dtype, info.spec.block_tokens, info.spec.codec = "SmolLM2-135M", "float16", 4, "raw"
    info.spec.layers, info.spec.kv_heads, info.spec.head_dim = 30, 3, 64
    info.layout.stored_bytes = 1 << 20
    daemon.replies["Admin/ListNamespaces"] = admin_pb2.ListNamespacesResponse(namespaces=[info])
    daemon.replies["Cache/OpenNamespace"] = cache_pb2.OpenNamespaceResponse(namespace_id=info.namespace_id)
    return info


@pytest.fixture
def kvctl_at() -> Callable[..., Ran]:
    """``kvctl`` over a real daemon: the path of its socket, then the words."""

    def run(socket: object, *words: str) -> Ran:
        done = CliRunner().invoke(make_app(connect_daemon, str(socket)), list(words), prog_name="kvctl")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Ran(done.exit_code, done.stdout, done.stderr)

    return run
