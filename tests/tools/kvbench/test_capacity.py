"""The same bytes of HOST hold 1.85 times the tokens under int8, end to end: client, daemon, and the daemon's status."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvbench.capacity import CHAIN_BLOCKS, bytes_of, host_of, numbers, run_capacity, spec_of
from kvstore.tools.kvbench.workload import Chain

HOST_MIB = 32


def kvctl_status(daemon):
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.tools.kvctl", "status", "--socket", str(daemon.socket), "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return next(tier for tier in json.loads(done.stdout)["tiers"] if tier["tier"] == "host")


def test_int8_holds_the_tokens_that_were_promised():
    raw, int8, times = run_capacity(HOST_MIB)
    assert raw.value % 64 == int8.value % 64 == 0
    assert 0.9 * (HOST_MIB << 20) <= raw.value // 64 * bytes_of("raw") <= HOST_MIB << 20
    assert 0.9 * (HOST_MIB << 20) <= int8.value // 64 * bytes_of("int8") <= HOST_MIB << 20
    assert times.value == int8.value / raw.value >= 1.85


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_the_count_is_that_of_kvctl_status(tmp_path, codec):
    spec = spec_of(codec)
    with DaemonProcess(tmp_path, {"host": f"{HOST_MIB} MiB", "device": "0"}) as daemon:
        daemon.start()
        with Client(daemon.socket, ClientOptions(strict=True, device=False)) as client:
            namespace = client.open_namespace(spec).namespace_id
            chain = Chain.fresh(spec, CHAIN_BLOCKS)
            client.put(namespace, PutBlocks(chain.keys, chain.parents, [numbers(spec)] * CHAIN_BLOCKS))
            shown, counted = kvctl_status(daemon), host_of(daemon)
    assert int(shown["blocks"]) == counted.blocks == CHAIN_BLOCKS
    assert int(shown["used_bytes"]) == counted.used_bytes == CHAIN_BLOCKS * bytes_of(codec)


def test_the_payload_is_one_that_int8_takes():
    found = np.frombuffer(numbers(spec_of("int8")), np.float16)
    assert np.isfinite(found).all()
    assert found.astype(np.float32).std() > 0.5
