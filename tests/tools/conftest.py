"""A real daemon for the tests of tools: small arenas, an SSD tier, one for each module."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstore.tools.daemon_process import DaemonProcess

SIZES = {"device": "8 MiB", "host": "32 MiB", "ssd": "64 MiB", "ssd-free-floor": "1 MiB"}


@pytest.fixture(scope="module")
def real_daemon(tmp_path_factory):
    # A socket's path may have 107 bytes, which pytest's own folders can exceed.
    with TemporaryDirectory(prefix="kv-") as folder:
        flags = {**SIZES, "ssd-dir": str(tmp_path_factory.mktemp("ssd"))}
        with DaemonProcess(Path(folder), flags) as daemon:
            daemon.start()
            yield daemon
