"""What memory is left is known before it is taken: a start that would be killed for it is refused with the numbers."""

from __future__ import annotations

import contextlib
import logging

import pytest
from typer.testing import CliRunner

from kvstore.client import Client, ClientOptions
from kvstore.core.errors import ResourceExhausted
from kvstore.daemon import main, plan
from kvstore.daemon.config import Config
from kvstore.daemon.memory import BUFFERS_SHARE, OWN_BYTES, Room, memory_room
from tests.client.harness import daemon_thread, until

MIB = 1 << 20


class Machine:
    """Folders that look like /proc and /sys/fs/cgroup."""

    def __init__(self, folder, cgroup, available_mib=8192):
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text(cgroup)
        (self.proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_mib * 1024} kB\n")

    def group(self, path, **files):
        folder = self.groups / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    def room(self):
        return memory_room(self.proc, self.groups)


def test_no_container_no_limit(tmp_path):
    machine = Machine(tmp_path, "0::/\n")
    assert machine.room() == Room(8192 * MIB)
    (machine.proc / "self/cgroup").unlink()
    assert machine.room() == Room(8192 * MIB)


@pytest.mark.parametrize("path", ["/", "/pod/daemon", "/of/the/host/and/not/here", "/../../beside"])
def test_version_2(tmp_path, path):
    machine = Machine(tmp_path, f"0::{path}\n")
    cache = f"anon 1\nfile 99\ninactive_file {60 * MIB}\nactive_file {40 * MIB}\n"
    machine.group("", memory__max=512 * MIB, memory__current=300 * MIB, memory__stat=cache)
    assert machine.room() == Room(8192 * MIB, 512 * MIB, 312 * MIB)
    assert machine.room().nbytes == 312 * MIB


def test_the_group_with_least_left_counts(tmp_path):
    machine = Machine(tmp_path, "0::/pod/daemon\n")
    machine.group("pod/daemon", memory__max=512 * MIB, memory__current=100 * MIB)
    machine.group("pod", memory__max=1024 * MIB, memory__current=900 * MIB)
    machine.group("", memory__max="max")
    assert machine.room() == Room(8192 * MIB, 1024 * MIB, 124 * MIB)


def test_version_1(tmp_path):
    machine = Machine(tmp_path, "5:devices:/\n4:memory:/trial\n0::/\n")
    stat = f"total_inactive_file {8 * MIB}\ninactive_file 7\ntotal_active_file 0\n"
    names = {"memory__limit_in_bytes": 256 * MIB, "memory__usage_in_bytes": 20 * MIB, "memory__stat": stat}
    machine.group("memory/trial", **names)
    machine.group("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    assert machine.room() == Room(8192 * MIB, 256 * MIB, 244 * MIB)


def test_buffers_get_a_share_of_what_is_left():
    assert Room(1000 * MIB).buffers(200 * MIB) == int((800 * MIB - OWN_BYTES) * BUFFERS_SHARE)
    assert Room(1000 * MIB, 300 * MIB, 100 * MIB).buffers(200 * MIB) == 0


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(plan, "memory_room", lambda: Room(8192 * MIB, 512 * MIB, 500 * MIB))
    monkeypatch.setattr(plan, "meminfo", lambda name, **_: 0)
    monkeypatch.setattr(main, "raise_descriptor_limit", lambda: (0, 0))


@pytest.mark.parametrize(
    ("host", "buffers", "state"),
    [
        ("256 MiB", "0", "ok"), ("256 MiB", "150 MiB", "ok"), ("256 MiB", "200 MiB", "error"),
        ("512 MiB", "0", "error"), ("420 MiB", "0", "warning"),
    ],
)  # fmt: skip
def test_the_plan_says_what_fits(small, tmp_path, host, buffers, state):
    config = Config(socket=tmp_path / "k.sock", device=0, host=host, buffers_max=buffers)
    line = next(finding for finding in plan.make_plan(config) if finding.subject == "memory")
    assert line.state == state, line.text
    assert "container limit 512 MiB, 500 MiB of it left" in line.text


def test_reserved_huge_pages_are_not_taken_twice(small, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "meminfo", lambda name, **_: 256)
    config = Config(socket=tmp_path / "k.sock", device=0, host="512 MiB")
    assert next(f for f in plan.make_plan(config) if f.subject == "memory").state == "ok"


def test_a_start_is_refused_as_check_says(small, tmp_path, caplog):
    flags = [f"--socket={tmp_path / 'k.sock'}", "--device=0", "--host=512 MiB", "--log-level=error"]
    checked = CliRunner().invoke(main.make_app(), [*flags, "--check"])
    with caplog.at_level(logging.ERROR):
        started = CliRunner().invoke(main.make_app(), flags)
    assert (checked.exit_code, started.exit_code) == (main.EXIT_START, main.EXIT_START)
    assert "500 MiB of it left" in checked.stdout
    assert "500 MiB of it left" in started.output + caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_session_whose_buffer_does_not_fit_is_refused_and_others_are_served(tmp_path):
    config = Config(socket=tmp_path / "k.sock", device=0, host="1 MiB", buffers_max="3 MiB", grpc=False)
    options = ClientOptions(strict=True, buffer_bytes=MIB)
    with daemon_thread(config), Client(config.socket, options), Client(config.socket, options) as second:
        with pytest.raises(ResourceExhausted) as caught:
            Client(config.socket, options)
        assert caught.value.field == "buffer_bytes"
        assert second.grant_lease("served", 1000)
        second.close()
        until(lambda: fits(config.socket, options))


def fits(socket, options):
    with contextlib.suppress(ResourceExhausted), Client(socket, options):
        return True
    return False
