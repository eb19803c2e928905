"""A disk that others fill: nothing is dropped in vain, and the daemon starts."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest

from kvstore.core.errors import KVStoreError
from kvstore.core.types import Outcome
from kvstore.tools.chaos.ground import Tenant, chain
from kvstore.v1 import common_pb2


def test_below_the_floor_no_good_block_is_dropped_for_one_that_can_not_be_written(daemon, flags, connect, tmp_path):
    daemon.start()
    tenant = Tenant.of(1, 2)
    old = [chain(f"old {i}", 10) for i in range(20)]
    client = connect(tenant)
    for keys in old:
        assert client.put(tenant.id, tenant.blocks(keys)).outcomes == (Outcome.HIT,) * 10
    client.flush(20_000)
    client.close()
    daemon.stop()
    flags["ssd-free-floor"] = str(shutil.disk_usage(tmp_path).free + (1 << 36))
    daemon.start()
    client = connect(tenant, strict=False)
    before = sum(client.match(tenant.id, keys).matched for keys in old)
    assert before == 200
    for i in range(12):
        client.put(tenant.id, tenant.blocks(chain(f"new {i}", 10)))
        client.flush(300)
    assert sum(client.match(tenant.id, keys).matched for keys in old) == before


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 96 MiB of its own."""
    mounted, image = tmp_path / "disk", tmp_path / "image"
    mounted.mkdir()
    subprocess.run(["truncate", "-s", "96M", str(image)], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    made = subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no filesystem can be mounted here: {made.stderr.decode().strip()}")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_a_daemon_starts_on_a_full_disk(daemon, flags, connect, small_disk):
    flags["ssd-dir"] = str(small_disk / "ssd")
    tenant = Tenant.of(1, 2)
    keys = chain("before", 10)
    try:
        daemon.start()
    except KVStoreError as error:
        pytest.skip(f"no SSD tier on this filesystem: {error}")
    client = connect(tenant)
    client.put(tenant.id, tenant.blocks(keys))
    client.flush(20_000)
    client.close()
    daemon.stop()
    # What a start leaves on the disk is there before others take the rest.
    daemon.start()
    daemon.stop()
    with (small_disk / "others").open("wb", buffering=0) as others:
        with contextlib.suppress(OSError):
            while others.write(bytes(1 << 16)):
                pass
        with contextlib.suppress(OSError):
            while others.write(bytes(512)):
                pass
    assert shutil.disk_usage(small_disk).free < 4096
    daemon.start()
    client = connect(tenant)
    client.put(tenant.id, tenant.blocks(chain("after", 4)))
    got = client.get(tenant.id, keys)
    assert not tenant.wrong(keys, got.outcomes, got.payloads)


def test_a_lowered_cap_holds_when_the_daemon_is_ready(daemon, flags, connect, tmp_path):
    tenant, chains = Tenant.of(1, 2), [chain(f"cap {i}", 32) for i in range(40)]
    for size in ("64 MiB", "32 MiB", "16 MiB", "8 MiB"):
        flags["ssd"] = size
        daemon.start()
        assert disk_bytes(tmp_path / "ssd") <= int(size.split()[0]) << 20
        client = connect(tenant, strict=False)
        for keys in chains:
            client.put(tenant.id, tenant.blocks(keys))
        client.flush(20_000)
        got = client.get(tenant.id, chains[-1])
        assert not tenant.wrong(chains[-1], got.outcomes, got.payloads)
        assert disk_bytes(tmp_path / "ssd") <= int(size.split()[0]) << 20
        client.close()
        daemon.stop()


def disk_bytes(folder):
    return int(subprocess.run(["du", "-sB1", str(folder)], capture_output=True, check=True).stdout.split()[0])


def test_a_recovery_that_fails_ends_no_start(daemon, flags, connect, tmp_path):
    daemon.start()
    tenant, old, new = Tenant.of(1, 2), chain("old", 10), chain("new", 10)
    client = connect(tenant)
    client.put(tenant.id, tenant.blocks(old))
    client.flush(20_000)
    client.close()
    daemon.stop()
    # Nobody can read a directory.
    (tmp_path / "ssd" / "journal-77777777").mkdir()
    daemon.start()
    (ssd,) = (tier for tier in daemon.status().tiers if tier.tier == common_pb2.TIER_SSD)
    assert ssd.state == "degraded"
    assert "recovery" in ssd.last_error
    client = connect(tenant, strict=False)
    assert client.match(tenant.id, old).matched == 0
    assert client.put(tenant.id, tenant.blocks(new)).outcomes == (Outcome.HIT,) * 10
    got = client.get(tenant.id, new)
    assert got.outcomes == (Outcome.HIT,) * 10
    assert not tenant.wrong(new, got.outcomes, got.payloads)
    client.close()
    daemon.stop()
    (tmp_path / "ssd" / "journal-77777777").rmdir()
    daemon.start()
    assert connect(tenant).match(tenant.id, old).matched == 10
