"""The end of a start: a self test through each tier, and systemd is told."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from kvstore.core.errors import Unavailable
from kvstore.daemon import selftest
from kvstore.daemon.build import Tiers
from kvstore.daemon.config import Config
from kvstore.daemon.notify import notify
from kvstore.testing.faulty_disk import FaultyDisk
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.host import HostArena
from kvstore.tiers.ssd import SsdConfig, SsdTier
from tests.client.harness import daemon_thread

MIB = 1 << 20


@pytest.fixture
def tiers():
    disk = FaultyDisk()
    tier = SsdTier("memory", SsdConfig(capacity_bytes=16 * MIB, segment_bytes=MIB), port=disk)
    made = Tiers(HostArena(MIB), MemfdDeviceArena(MIB), tier)
    list(tier.recover())
    yield made, disk
    disk.fail = lambda *_: 0
    made.close()


def test_what_works_passes_and_takes_nothing(tiers):
    made, disk = tiers
    files = set(disk.image())
    selftest.self_test(made)
    assert (made.host.used_bytes, made.device.used_bytes, made.disk.state.state) == (0, 0, "ready")
    assert set(disk.image()) == files


def test_memory_that_forgets_ends_the_start(tiers, monkeypatch):
    made, _ = tiers
    with monkeypatch.context() as broken:
        broken.setattr(selftest, "_put", lambda *_: None)
        with pytest.raises(Unavailable, match="HOST does not give back"):
            selftest.self_test(made)
    monkeypatch.setattr(type(made.device), "write", lambda *_: None)
    with pytest.raises(Unavailable, match="DEVICE does not give back"):
        selftest.self_test(made)
    assert (made.host.used_bytes, made.device.used_bytes) == (0, 0)


@pytest.mark.parametrize("kind", ["pwrite", "fdatasync", "pread"])
def test_a_disk_that_fails_degrades_its_tier(tiers, kind):
    made, disk = tiers
    disk.fail = lambda _number, asked, _name: errno.EIO if asked == kind else 0
    selftest.self_test(made)
    assert made.disk.state.state == "degraded"
    assert "self test" in made.disk.state.last_error


def test_systemd_is_told_when_clients_are_served_and_when_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        config = Config(socket=tmp_path / "s", device=0, host=MIB, grpc=False)
        with daemon_thread(config):
            assert systemd.recv(4096).decode() == f"READY=1\nSTATUS=serving at {tmp_path / 's'}"
        assert systemd.recv(4096) == b"STOPPING=1"


def test_nobody_to_tell_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    notify("", "READY=1")
    assert "systemd" not in caplog.text
    notify(str(tmp_path / "nobody"), "READY=1")
    assert "systemd was not told 'READY=1'" in caplog.text


def test_an_abstract_address_begins_with_an_at():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(b"\0kvstored-test-notify")
        systemd.settimeout(20)
        notify("@kvstored-test-notify", "READY=1")
        assert systemd.recv(99) == b"READY=1"
