"""A daemon of a test's own, and tenants whose bytes say whose they are."""

from __future__ import annotations

import contextlib

import pytest

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import Unavailable
from kvstore.tools.chaos.ground import Tenant
from kvstore.tools.daemon_process import DaemonProcess


@pytest.fixture
def flags(tmp_path):
    """Of a small daemon with every tier; a test may change them before it starts one."""
    return {
        "device": "1 MiB", "host": "16 MiB", "ssd": "64 MiB", "ssd-dir": str(tmp_path / "ssd"), "ssd-free-floor": "0",
        "drain-timeout-s": "3",
    }  # fmt: skip


@pytest.fixture
def daemon(tmp_path, flags):
    process = DaemonProcess(tmp_path, flags)
    yield process
    with contextlib.suppress(Unavailable):
        process.stop()


@pytest.fixture
def connect(daemon):
    """Clients that have opened a tenant's namespace."""
    with contextlib.ExitStack() as stack:

        def make(tenant: Tenant, policy=None, **changes) -> Client:
            options = ClientOptions(**{"strict": True, "buffer_bytes": 4 << 20, **changes})
            client = stack.enter_context(Client(daemon.socket, options))
            client.open_namespace(tenant.spec, policy=policy)
            return client

        yield make
