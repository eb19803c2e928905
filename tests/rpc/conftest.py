"""A daemon on a loop of its own in this process, with a clock that the tests turn."""

from __future__ import annotations

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.clock import ManualClock
from kvstore.daemon.config import Config
from kvstore.v1 import admin_pb2
from tests.client.harness import daemon_thread


@pytest.fixture(scope="module")
def clock():
    return ManualClock()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rpc")
    return Config(
        socket=folder / "kvstored.sock",
        device="4 MiB",
        device_kind="shared",
        host="8 MiB",
        ssd="32 MiB",
        ssd_dir=folder / "ssd",
        ssd_free_floor=0,
        listen="127.0.0.1:0",
    )


@pytest.fixture(scope="module")
def daemon(config, clock):
    with daemon_thread(config, clock) as running:
        yield running


@pytest.fixture
def connect(daemon):
    """Makes remote clients; ``lossless`` false is a client from before there were codings."""
    made = []

    def remote(lossless=True):
        made.append(Client(f"grpc://127.0.0.1:{daemon.grpc_port}", ClientOptions(strict=True, lossless=lossless)))
        return made[-1]

    yield remote
    for client in made:
        client.close()


@pytest.fixture
def counters(daemon, config):
    """What the counters of the wire have grown by since the last time."""
    with Client(config.socket, ClientOptions(strict=True, buffer_bytes=0)) as admin:
        last = {}

        def grown():
            reply = admin.connection()[0].call("kvstore.v1.Admin/Status", b"", 10.0)
            found = {n: v for n, v in admin_pb2.StatusResponse.FromString(reply).counters.items() if "wire_" in n}
            step = {name: value - last.get(name, 0) for name, value in found.items()}
            last.update(found)
            return step

        grown()
        yield grown
