"""Probes, each shown a machine of the test's own."""

from __future__ import annotations

import pytest

from kvstore.core.errors import Unavailable
from kvstore.tools.kvctl import probes
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.probes import Level
from kvstore.v1 import admin_pb2, common_pb2

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    (tmp_path / "huge").mkdir()

    def make(mode: str, free: int, total: int):
        (tmp_path / "shmem").write_text(mode)
        (tmp_path / "huge" / "free_hugepages").write_text(f"{free}\n")
        (tmp_path / "huge" / "nr_hugepages").write_text(f"{total}\n")
        return tmp_path / "shmem", tmp_path / "huge"

    return make


@pytest.mark.parametrize(
    ("mode", "free", "total", "needed", "level"),
    [
        ("always within_size advise [never] deny", 0, 0, 64 * MIB, Level.WARN),
        ("always within_size [advise] never deny", 0, 0, 64 * MIB, Level.OK),
        ("[always] within_size advise never", 0, 0, 0, Level.OK),
        ("[never]", 32, 32, 64 * MIB, Level.OK),
        ("[never]", 31, 31, 64 * MIB, Level.WARN),
        ("[never]", 0, 32, 64 * MIB, Level.OK),
        ("[never]", 1, 1, 0, Level.OK),
    ],
)
def test_huge_pages(machine, mode, free, total, needed, level):
    finding = probes.huge_pages(needed, *machine(mode, free, total))
    assert finding.level is level
    assert bool(finding.commands) == (level is Level.WARN)


def test_huge_pages_name_the_command_with_the_count(machine):
    assert "vm.nr_hugepages=32" in probes.huge_pages(64 * MIB - 1, *machine("[never]", 0, 0)).commands[1]


def test_a_machine_without_these_files_is_a_warning(tmp_path):
    assert probes.huge_pages(MIB, tmp_path / "none", tmp_path / "none").level is Level.WARN


def test_memory_limits_of_the_control_group(tmp_path):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (root / "a" / "b").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/a/b\n")
    assert probes.cgroup_limit(None, root, proc) > 1 << 60
    (root / "a" / "memory.max").write_text(f"{512 * MIB}\n")
    (root / "a" / "b" / "memory.max").write_text("max\n")
    assert probes.cgroup_limit(None, root, proc) == 512 * MIB
    (proc / "self" / "cgroup").write_text("4:memory:/a\n3:cpu:/\n")
    (root / "memory" / "a").mkdir(parents=True)
    (root / "memory" / "a" / "memory.limit_in_bytes").write_text(f"{64 * MIB}\n")
    assert probes.cgroup_limit(None, root, proc) == 64 * MIB


def test_arenas_larger_than_the_memory_are_bad():
    finding = probes.memory_limit(1 << 60, None)
    assert finding.level is Level.BAD
    assert finding.commands


def test_direct_io_and_disk_space(tmp_path):
    assert probes.direct_io(tmp_path / "none").level is Level.BAD
    assert probes.disk_space(tmp_path, 0, 0, 0).level is Level.OK
    assert probes.disk_space(tmp_path, 1 << 60, 0, 0).level is Level.WARN
    assert probes.disk_space(tmp_path, 1 << 60, 1 << 60, 0).level is Level.OK
    assert probes.probe_directory(str(tmp_path / "a" / "b")) == tmp_path
    assert probes.probe_directory("") is None


def test_gpu_and_leftovers(tmp_path):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun\n")
    assert "580.65.06" in probes.gpu(tmp_path / "version").sentence
    assert probes.gpu(tmp_path / "none", tmp_path / "none").level is Level.NOTE
    (tmp_path / "kvstore-host").write_text("")
    assert probes.leftovers(tmp_path).level is Level.WARN


def test_locked_memory_matters_with_a_gpu():
    assert probes.locked_memory(1 << 61, None, uses_gpu=True).level in (Level.BAD, Level.OK)
    note, bad = (probes.locked_memory(1 << 61, None, uses_gpu=gpu).level for gpu in (False, True))
    assert (note, bad) in ((Level.NOTE, Level.BAD), (Level.OK, Level.OK))


def test_doctor_works_without_a_daemon(kvctl):
    ran = kvctl("doctor", "-o", "json")
    by_name = {finding["name"]: finding for finding in ran.json}
    assert by_name["daemon"]["level"] == "note"
    assert {"huge pages", "locked memory", "memory", "sealed memory", "direct I/O", "native kernels", "GPU"} <= set(
        by_name
    )
    wrong = [f for f in ran.json if f["level"] in ("warn", "bad")]
    assert ran.code == (Exit.NO if wrong else Exit.OK)
    assert all(finding["commands"] for finding in wrong)


def test_doctor_repeats_what_the_daemon_warns_of(kvctl, daemon, tmp_path):
    status = admin_pb2.StatusResponse(version="1", warnings=["The HOST arena lies on small pages: do this."])
    status.tiers.add(tier=common_pb2.TIER_SSD, state="degraded", last_error="EIO")
    daemon.replies["Admin/Status"] = status
    daemon.replies["Admin/DiskUsage"] = admin_pb2.DiskUsageResponse(directory=str(tmp_path), cap_bytes=1 << 60)
    ran = kvctl("doctor")
    assert ran.code == Exit.NO
    assert "lies on small pages" in ran.out
    assert "SSD is degraded: EIO" in ran.out
    assert "the disk fills first" in ran.out


@pytest.mark.parametrize(("level", "times"), [(Level.WARN, 0), (Level.OK, 2)])
def test_small_pages_are_told_once_with_the_pages_of_all_arenas(kvctl, daemon, monkeypatch, level, times):
    names = ("kvstore-device", "kvstore-host")
    warnings = [f"{name} is on 4 KiB pages, which halve the speed: sysctl vm.nr_hugepages=4" for name in names]
    daemon.replies["Admin/Status"] = admin_pb2.StatusResponse(warnings=[*warnings, "Something else."])
    daemon.replies["Admin/DiskUsage"] = admin_pb2.DiskUsageResponse()
    monkeypatch.setattr(probes, "huge_pages", lambda _: probes.Finding("huge pages", level, "Arenas."))
    found = kvctl("doctor", "-o", "json").json
    assert sum("4 KiB pages" in finding["sentence"] for finding in found) == times
    assert "Something else." in [finding["sentence"] for finding in found]


def test_doctor_goes_on_when_the_daemon_refuses(kvctl, daemon):
    daemon.replies["Admin/Status"] = Unavailable("no daemon answers at x")
    assert "huge pages" in kvctl("doctor").out
