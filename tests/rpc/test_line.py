"""More calls of one user than may be under way: they wait for each other, and none is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import KVStoreError
from kvstore.core.types import Outcome
from kvstore.daemon.config import Config
from kvstore.rpc import connection
from kvstore.v1 import admin_pb2
from tests.client.harness import ask, blocks_of, chain, daemon_thread, payload, small_spec, until

MIB = 1 << 20
OPTIONS = ClientOptions(strict=True, buffer_bytes=MIB, timeout_s=60.0)


@pytest.fixture
def socket(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "UID_CALLS_MAX", 1)
    config = Config(
        socket=tmp_path / "s", device=0, host=32 * MIB, ssd=64 * MIB, ssd_dir=tmp_path / "ssd", ssd_free_floor=0
    )
    with daemon_thread(config):
        yield tmp_path / "s"


def work(path, seed: int) -> None:
    with Client(path, OPTIONS) as client:
        opened = client.open_namespace(small_spec())
        for turn in range(12):
            keys, _ = chain(opened.namespace_id, 4, seed=100 * seed + turn)
            assert client.put(opened.namespace_id, blocks_of(opened.layout, keys)).outcomes == (Outcome.HIT,) * 4
            got = client.get(opened.namespace_id, keys)
            assert [bytes(one) for one in got.payloads] == [payload(opened.layout, key) for key in keys]
            client.flush()


def test_all_of_many_clients_come_to_their_turn(socket):
    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(work, socket, seed) for seed in range(12)]:
            done.result()


def test_those_behind_a_client_that_goes_while_it_waits_have_their_turn(socket):
    ended = threading.Event()

    def come_and_go(seed: int) -> None:
        while not ended.is_set():
            client = Client(socket, OPTIONS)
            opened = client.open_namespace(small_spec())
            keys, _ = chain(opened.namespace_id, 4, seed=seed)
            posted = client.operations.reserve(opened.namespace_id, 2, keys, 4)
            for _ in range(20):
                client.post(client.operations.flush(10))
            client.post(posted)
            client.close()

    with ThreadPoolExecutor(8) as pool:
        going = [pool.submit(come_and_go, 9000 + seed) for seed in range(4)]
        for done in [pool.submit(work, socket, seed) for seed in range(4)]:
            done.result()
        ended.set()
        for one in going:
            try:
                one.result()
            except KVStoreError as error:
                raise AssertionError(f"a call was refused: {error}") from error
    with Client(socket, ClientOptions(strict=True, buffer_bytes=0)) as client:
        until(lambda: ask(client, "Status", admin_pb2.StatusResponse).reservations == 0)
