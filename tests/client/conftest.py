"""One daemon process a module, with every tier and every transport."""

from __future__ import annotations

import pytest

from tests.client.harness import DaemonProcess


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("daemon")
    process = DaemonProcess(folder, "--ssd=64MiB", f"--ssd-dir={folder / 'ssd'}", "--listen=127.0.0.1:0")
    process.start()
    yield process
    assert process.stop() == 0
    assert not process.socket.exists()
