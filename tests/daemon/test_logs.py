"""The log: a record is one line, as text or as JSON, and says which call it is about."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.request import REQUEST
from kvstore.daemon.config import Config
from kvstore.daemon.logs import JsonLines, TextLines
from kvstore.v1 import session_pb2
from kvstore.wire.paths import grpc_socket
from tests.client.harness import blocks_of, chain, daemon_thread, small_spec

MIB = 1 << 20


class Kept(logging.Handler):
    """Lines as they would be printed, made in the thread that logs."""

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(form)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def record(message: str, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "kvstored", **more})


def test_a_record_is_one_line_whatever_it_says():
    hostile = 'a"b\n2026-01-01 INFO kvstored: ready'
    assert "\n" not in TextLines().format(record(hostile))
    line = JsonLines().format(record(hostile, created=0.0, msecs=7.0))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.007Z", "level": "info", "logger": "kvstored", "message": hostile,
    }  # fmt: skip
    assert "\n" not in line


def test_a_traceback_is_inside_the_object():
    try:
        raise ValueError("broken")
    except ValueError as error:
        line = JsonLines().format(record("x", exc_info=(ValueError, error, error.__traceback__)))
    assert "ValueError: broken" in json.loads(line)["exception"]
    assert "\n" not in line


def test_text_names_the_request_at_its_end():
    token = REQUEST.set("3-17")
    assert TextLines().format(record("done")).endswith("kvstored: done [request 3-17]")
    REQUEST.reset(token)
    assert TextLines().format(record("done")).endswith("kvstored: done")


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[tuple[Kept, Path]]:
    kept, root = Kept(JsonLines()), logging.getLogger("kvstore")
    level = root.level
    root.addHandler(kept)
    root.setLevel(logging.DEBUG)
    try:
        with daemon_thread(Config(socket=tmp_path / "s", device=0, host=4 * MIB)):
            yield kept, tmp_path / "s"
    finally:
        root.removeHandler(kept)
        root.setLevel(level)


def test_each_call_is_told_with_its_id_whichever_thread_serves_it(logged: tuple[Kept, Path]):
    kept, path = logged
    with Client(path, ClientOptions(strict=True, buffer_bytes=MIB)) as client:
        opened = client.open_namespace(small_spec(model="secretmodel", salt=b"secretsalt"))
        keys, _ = chain(opened.namespace_id, 3)
        client.put(opened.namespace_id, blocks_of(opened.layout, keys))
        client.run(client.operations.match(opened.namespace_id, keys))
        client.connection()[0].call("kvstore.v1.Admin/ListLeases", b"", 9)
    lines = [json.loads(line) for line in kept.lines]
    told = {line["message"].partition(":")[0]: line["request"] for line in lines if " after " in line["message"]}
    ran = [told[f"kvstore.v1.{name}"] for name in ("Cache/Match", "Cache/Commit", "Admin/ListLeases")]
    session = ran[0].partition("-")[0]
    assert len(set(ran)) == 3
    assert all(one.startswith(f"{session}-") for one in ran)
    # What the movers and the store's threads log beside it is of this call, too.
    traced = [line for line in lines if line["logger"] == "kvstore.store.trace"]
    assert traced
    assert {line["request"] for line in traced} == {told["kvstore.v1.Cache/Commit"]}
    assert not [line for line in kept.lines if "secretsalt" in line or b"secretsalt".hex() in line]


def test_a_caller_over_grpc_may_name_its_call(logged: tuple[Kept, Path]):
    kept, path = logged
    with grpc.insecure_channel(f"unix:{grpc_socket(path)}") as channel:
        call = channel.unary_unary("/kvstore.v1.Sessions/OpenRemote")
        for given in ("mine-1", "x y\n"):
            call(session_pb2.OpenRemoteRequest().SerializeToString(), metadata=(("kvstore-request", given.strip()),))
    told = [json.loads(line).get("request") for line in kept.lines if "OpenRemote: done" in line]
    assert told[0] == "mine-1"
    assert told[1].startswith("g")
