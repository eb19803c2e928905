"""Probes, each shown a machine of the test's own."""

from __future__ import annotations

import os
import platform
import resource
import sysconfig

import pytest

from kvstore.core.errors import Unavailable
from kvstore.daemon import plan
from kvstore.daemon.config import Config
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


def test_limits_of_other_controllers_and_above_the_root_do_not_count(tmp_path):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    for group in ("a", "b"):
        (root / "memory" / group).mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("4:memory:/a\n3:cpu,io:/b\n")
    (root / "memory" / "b" / "memory.limit_in_bytes").write_text("1")
    (root / "memory.limit_in_bytes").write_text("2")
    assert probes.cgroup_limit(None, root, proc) > 1 << 60


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


@pytest.mark.parametrize(
    ("arguments", "level"), [("'--prefix=/usr' '--enable-optimizations'", Level.OK), ("", Level.NOTE)]
)
def test_a_python_that_was_not_built_for_speed_is_named(monkeypatch, arguments, level):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: arguments)
    found = probes.python()
    assert (found.level, bool(found.commands)) == (level, level is Level.NOTE)
    assert platform.python_version() in found.sentence


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


@pytest.fixture
def recorded(daemon, monkeypatch):
    """A daemon of known numbers, a machine where all is well, and what each probe was asked."""
    status = admin_pb2.StatusResponse(version="1", pid=4321)
    status.tiers.add(tier=common_pb2.TIER_DEVICE, capacity_bytes=1 * MIB)
    status.tiers.add(tier=common_pb2.TIER_HOST, capacity_bytes=2 * MIB)
    status.tiers.add(tier=common_pb2.TIER_SSD, capacity_bytes=4 * MIB)
    daemon.replies["Admin/Status"] = status
    daemon.replies["Admin/DiskUsage"] = admin_pb2.DiskUsageResponse(
        directory="/", cap_bytes=5, ledger_bytes=6, free_floor_bytes=7
    )
    asked = {}
    for name in ("huge_pages", "locked_memory", "memory_limit", "sealed_memory", "direct_io", "disk_space",
                 "native_kernels", "python", "gpu", "leftovers"):  # fmt: skip
        fine = probes.Finding(name, Level.OK, "All is well. " * 8, ("mend " + name + " now" * 60,))
        monkeypatch.setattr(probes, name, lambda *a, n=name, f=fine, **k: asked.update({n: (*a, *k.values())}) or f)
    return status, asked


def test_probes_are_given_what_the_daemon_tells(kvctl, recorded, monkeypatch):
    _, asked = recorded
    ran = kvctl("doctor")
    assert ran.code == Exit.OK
    assert asked["huge_pages"] == (3 * MIB,)
    assert asked["locked_memory"] == (3 * MIB, 4321, True)
    assert asked["memory_limit"] == (3 * MIB, 4321)
    assert [str(part) for part in asked["disk_space"]] == ["/", "5", "6", "7"]
    monkeypatch.setattr(probes, "gpu", lambda: probes.Finding("GPU", Level.NOTE, "None."))
    kvctl("doctor")
    assert asked["locked_memory"][2] is False


def test_a_directory_that_is_named_is_looked_at(kvctl, recorded, tmp_path):
    kvctl("doctor", "--ssd", str(tmp_path))
    assert recorded[1]["direct_io"] == (tmp_path,)


def test_sentences_fill_the_line_and_commands_stay_whole(kvctl, recorded):
    lines = kvctl("doctor").out.splitlines()
    assert f"      $ mend huge_pages{' now' * 60}".rstrip() in lines
    assert any(line.startswith("ok") and line.count("All is well.") == 8 for line in lines)


@pytest.mark.parametrize(
    ("level", "code"), [(Level.OK, Exit.OK), (Level.NOTE, Exit.OK), (Level.WARN, Exit.NO), (Level.BAD, Exit.NO)]
)
def test_the_exit_code_is_that_of_the_worst_finding(kvctl, recorded, monkeypatch, level, code):
    monkeypatch.setattr(probes, "leftovers", lambda: probes.Finding("leftovers", level, "So it is."))
    assert kvctl("doctor").code == code


def test_a_warning_of_the_daemon_is_one(kvctl, recorded):
    recorded[0].warnings.append("Look at this.")
    ran = kvctl("doctor", "-o", "json")
    assert ran.code == Exit.NO
    assert [f["level"] for f in ran.json if f["sentence"] == "Look at this."] == ["warn"]


def test_a_degraded_tier_is_bad_and_one_that_is_off_is_not(kvctl, recorded):
    recorded[0].tiers[2].state = "off"
    assert kvctl("doctor").code == Exit.OK
    recorded[0].tiers[2].state = "degraded"
    ran = kvctl("doctor", "-o", "json")
    assert (ran.code, ran.json[1]["level"], ran.json[1]["commands"]) == (Exit.NO, "bad", ["kvctl status"])


def test_memory_is_bounded_by_the_lower_of_container_and_machine(monkeypatch):
    monkeypatch.setattr(probes, "cgroup_limit", lambda pid: 100 * MIB)
    fits, not_quite = probes.memory_limit(90 * MIB, None), probes.memory_limit(91 * MIB, None)
    assert (fits.level, not_quite.level) == (Level.OK, Level.BAD)
    assert fits.sentence == "The container's limit is 100 MiB, of which the arenas take 90 MiB."
    monkeypatch.setattr(probes, "cgroup_limit", lambda pid: 1 << 62)
    assert probes.memory_limit(0, None).sentence.startswith("The machine's memory is ")


def test_disk_space_counts_what_the_cap_still_allows_and_the_floor(tmp_path, monkeypatch):
    class Found:
        f_bavail, f_frsize = 100, 1 << 20

    monkeypatch.setattr(probes.os, "statvfs", lambda _: Found)
    for cap, used, floor, level in (
        (90, 0, 10, Level.OK),
        (90, 0, 11, Level.WARN),
        (200, 110, 10, Level.OK),
        (200, 109, 10, Level.WARN),
    ):
        assert probes.disk_space(tmp_path, cap * MIB, used * MIB, floor * MIB).level is level


def test_the_lock_limit_is_the_daemon_s(monkeypatch):
    monkeypatch.setattr(probes, "_locked_limit", lambda pid: 8 * MIB if pid == 7 else probes._UNLIMITED)
    assert probes.locked_memory(8 * MIB, 7, uses_gpu=True).level is Level.OK
    bad, unknown = probes.locked_memory(9 * MIB, 7, uses_gpu=True), probes.locked_memory(0, 7, uses_gpu=True)
    assert (bad.level, unknown.level) == (Level.BAD, Level.BAD)
    assert "of process 7 is 8 MiB, less than the arenas' 9 MiB: pinning fails." in bad.sentence
    assert probes.locked_memory(9 * MIB, None, uses_gpu=True).sentence == "The limit of this shell is unlimited."


def test_missing_kernels_are_told_with_the_reason(monkeypatch):
    from kvstore.kernels import native  # noqa: PLC0415 - as the probe loads it

    class Absent:
        available, reason, levels = False, "no compiler was found", ()

    monkeypatch.setattr(native, "native_status", lambda: Absent)
    finding = probes.native_kernels()
    assert (finding.level, "no compiler was found" in finding.sentence) == (Level.WARN, True)


def test_reserved_pages_that_a_daemon_took_are_its_own(machine):
    files = machine("[never]", 0, 32)
    assert probes.huge_pages(0, *files).level is Level.WARN
    assert probes.huge_pages(64 * MIB, *files).level is Level.OK


def test_an_amd_gpu_is_named(tmp_path):
    (tmp_path / "kfd").write_text("")
    assert "AMD" in probes.gpu(tmp_path / "none", tmp_path / "kfd").sentence


def test_the_soft_limit_of_a_process_is_read():
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
        assert probes._locked_limit(os.getpid()) == probes._locked_limit(None) == 65536
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


@pytest.mark.parametrize(
    ("limit", "opened", "level"),
    [(3072, 9, Level.OK), ("unlimited", 9, Level.OK), (1024, 9, Level.WARN), (4096, 4000, Level.WARN)],
)
def test_descriptors(tmp_path, limit, opened, level):
    (tmp_path / "7/fd").mkdir(parents=True)
    line = f"Max open files            {limit}                 {limit}                files\n"
    (tmp_path / "7/limits").write_text("Limit   Soft Limit   Hard Limit   Units\n" + line)
    for number in range(opened):
        (tmp_path / f"7/fd/{number}").touch()
    assert probes.descriptors(7, tmp_path).level is level
    assert probes.descriptors(8, tmp_path).level is Level.NOTE


def test_descriptors_are_counted_as_the_plan_of_the_daemon_counts_them():
    assert Config().sessions_max == probes.SESSIONS_USUAL
    assert 2 * Config().sessions_max + plan.DESCRIPTORS_BESIDE == probes.DESCRIPTORS_NEEDED
