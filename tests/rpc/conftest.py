"""A daemon on a loop of its own in this process, with a clock that the tests turn."""

from __future__ import annotations

import pytest

from kvstore.core.clock import ManualClock
from kvstore.daemon.config import Config
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
