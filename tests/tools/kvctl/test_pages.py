"""Namespaces of any number and size: the daemon pages, and kvctl reads all pages."""

from __future__ import annotations

import dataclasses

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import InvalidArgument
from kvstore.core.namespace import NamespaceSpec, canonical_json
from kvstore.daemon.config import Config
from kvstore.rpc import handlers_admin
from kvstore.tools.kvctl.connect import connect_daemon
from kvstore.v1 import admin_pb2
from kvstore.wire.framing import MESSAGE_BYTES_MAX
from tests.client.harness import daemon_thread

SPEC = NamespaceSpec(model="m", revision="", dtype="float16", layers=1, kv_heads=1, head_dim=8, block_tokens=4)


@pytest.fixture
def socket(tmp_path_factory):
    path = tmp_path_factory.mktemp("s") / "s"
    with daemon_thread(Config(socket=path, device=0, host="1 MiB")):
        yield path


def open_many(socket, count: int, extra_bytes: int) -> set[bytes]:
    with Client(socket, ClientOptions(strict=True, buffer_bytes=4096)) as client:
        extra = canonical_json({"x": "y" * extra_bytes})
        specs = [dataclasses.replace(SPEC, salt=str(i).encode(), extra=extra) for i in range(count)]
        ids = {client.open_namespace(spec).namespace_id for spec in specs}
        yield ids


def test_more_than_a_message_holds_is_listed_and_matched(kvctl_at, socket):
    size = 16_000
    for ids in open_many(socket, MESSAGE_BYTES_MAX // size + 5, size):
        listed = kvctl_at(socket, "ls", "-o", "json")
        assert listed.code == 0
        assert {bytes.fromhex(n["namespace_id"]) for n in listed.json["namespaces"]} == ids
        chosen = min(ids).hex()
        asked = kvctl_at(socket, "match", "--namespace", chosen[:16], "--tokens", "1,2,3,4")
        assert (asked.code, "0 of 1 block matched" in asked.out) == (1, True)


def test_pages_meet(socket, monkeypatch):
    monkeypatch.setattr(handlers_admin, "LIST_BYTES_MAX", 1)
    for ids in open_many(socket, 5, 10):
        port, found, token = connect_daemon(str(socket), 5), [], ""
        for _ in range(5):
            request = admin_pb2.ListNamespacesRequest(page_token=token)
            page = port.call("Admin/ListNamespaces", request, admin_pb2.ListNamespacesResponse, 5)
            found += [info.namespace_id for info in page.namespaces]
            token = page.next_page_token
        port.close()
        assert token == ""
        assert found == sorted(ids)


def test_a_token_that_is_none_is_refused(socket):
    port = connect_daemon(str(socket), 5)
    request = admin_pb2.ListNamespacesRequest(page_token="zz")
    with pytest.raises(InvalidArgument, match="page_token"):
        port.call("Admin/ListNamespaces", request, admin_pb2.ListNamespacesResponse, 5)
    port.close()
