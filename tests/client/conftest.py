"""One daemon process a module, with every tier and every transport; who looks at what is held there."""

from __future__ import annotations

import itertools

import pytest

from kvstore.client import Client, ClientOptions
from tests.client.harness import DaemonProcess, small_spec

_salts = itertools.count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("daemon")
    process = DaemonProcess(folder, "--ssd=64MiB", f"--ssd-dir={folder / 'ssd'}", "--listen=127.0.0.1:0")
    process.start()
    yield process
    assert process.stop() == 0
    assert not process.socket.exists()


@pytest.fixture
def spec():
    return small_spec(salt=f"rights {next(_salts)}".encode())


@pytest.fixture
def watcher(daemon):
    with Client(daemon.socket, ClientOptions(strict=True, buffer_bytes=0, name="watcher")) as client:
        yield client


@pytest.fixture
def ssd_daemon(tmp_path):
    process = DaemonProcess(tmp_path, "--ssd=64MiB", f"--ssd-dir={tmp_path / 'ssd'}")
    process.start()
    yield process
    process.stop()
