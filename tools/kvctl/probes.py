"""What ``kvctl doctor`` looks at on this machine. Each probe reads, tries or asks one thing and returns one finding.

The paths of the kernel's files are arguments, so that tests can show a probe a machine of their own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import re
import resource
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from kvstore.tools import python_build, text

SYS_SHMEM: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
SYS_HUGETLB: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
HUGE_PAGE_BYTES: Final = 2 << 20
F_SEAL_FUTURE_WRITE: Final = 0x0010
SESSIONS_USUAL: Final = 1024
"""Sessions that a daemon admits if its configuration does not say otherwise."""

DESCRIPTORS_NEEDED: Final = 2 * SESSIONS_USUAL + 1024
"""As ``kvstored --check`` counts: a socket and a buffer for each session, and what the daemon itself opens."""

_UNLIMITED: Final = 1 << 62


class Level(StrEnum):
    """How a finding stands; WARN and BAD are what an operator should mend."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: one sentence, and the command that mends it (the first) or would do as well."""

    name: str
    level: Level
    sentence: str
    commands: tuple[str, ...] = ()


def huge_pages(needed_bytes: int, shmem: Path = SYS_SHMEM, hugetlb: Path = SYS_HUGETLB) -> Finding:
    """Whether arenas of ``needed_bytes`` can lie on huge pages: reserved ones, or transparent ones where shared."""
    free = _number(hugetlb / "free_hugepages") * HUGE_PAGE_BYTES
    total = _number(hugetlb / "nr_hugepages") * HUGE_PAGE_BYTES
    mode = _chosen(shmem)
    wanted = max(needed_bytes, HUGE_PAGE_BYTES)
    pages = str(-(-wanted // HUGE_PAGE_BYTES)) if needed_bytes else "N   # one for each 2 MiB of DEVICE and HOST"
    # Pages that the running daemon has taken are no longer free, but they are its own: the total counts then.
    if max(free, total if needed_bytes else 0) >= wanted:
        return Finding(
            "huge pages", Level.OK, f"{text.size(total)} of 2 MiB pages are reserved, {text.size(free)} free."
        )
    if mode in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", Level.OK, f"Shared memory may use transparent huge pages ({mode}).")
    return Finding(
        "huge pages",
        Level.WARN,
        f"Arenas lie on 4 KiB pages (shmem_enabled is {mode or 'absent'}, {text.size(free)} reserved): "
        "direct disk reads run at about half speed.",
        (f"echo advise > {shmem}", f"sysctl -w vm.nr_hugepages={pages}"),
    )


def locked_memory(needed_bytes: int, pid: int | None, uses_gpu: bool) -> Finding:
    """Whether the arenas may be locked, which pinning them for a GPU needs."""
    limit = _locked_limit(pid)
    whose = f"process {pid}" if pid else "this shell"
    if limit >= _UNLIMITED or limit >= needed_bytes > 0:
        shown = "unlimited" if limit >= _UNLIMITED else text.size(limit)
        return Finding("locked memory", Level.OK, f"The limit of {whose} is {shown}.")
    level = Level.BAD if uses_gpu else Level.NOTE
    return Finding(
        "locked memory",
        level,
        f"The limit of {whose} is {text.size(limit)}"
        + (f", less than the arenas' {text.size(needed_bytes)}" if needed_bytes else "")
        + (": pinning fails." if uses_gpu else "; it matters only with a GPU."),
        ("ulimit -l unlimited", "systemctl edit kvstored   # [Service] LimitMEMLOCK=infinity"),
    )


def descriptors(pid: int | None, proc: Path = Path("/proc")) -> Finding:
    """Whether the limit of open files is enough for as many sessions as the daemon admits if nobody says otherwise."""
    whose = f"process {pid}" if pid else "this shell"
    try:
        limits = (proc / f"{pid or 'self'}/limits").read_text()
        hard = re.search(r"^Max open files\s+\S+\s+(\d+)", limits, re.MULTILINE)
        limit = int(hard[1]) if hard is not None else _UNLIMITED
        opened = len(os.listdir(proc / f"{pid}/fd")) if pid else 0
    except OSError as error:
        return Finding("descriptors", Level.NOTE, f"Not looked at: {error.strerror}.")
    shown = f"{limit:,}" if limit < _UNLIMITED else "unlimited"
    told = f"The limit of {whose} is {shown}" + (f", of which {opened:,} are open" if pid else "")
    if limit >= DESCRIPTORS_NEEDED and opened < limit * 0.8:
        return Finding("descriptors", Level.OK, f"{told}.")
    return Finding(
        "descriptors",
        Level.WARN,
        f"{told}: {DESCRIPTORS_NEEDED:,} are needed for {SESSIONS_USUAL:,} sessions.",
        ("systemctl edit kvstored   # [Service] LimitNOFILE=65536", "ulimit -n 65536"),
    )


def memory_limit(needed_bytes: int, pid: int | None) -> Finding:
    """Whether the arenas fit the memory limit of the container and the machine's memory."""
    limit = cgroup_limit(pid)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound, what = (limit, "the container's limit") if limit < machine else (machine, "the machine's memory")
    if needed_bytes and needed_bytes > bound * 0.9:
        return Finding(
            "memory",
            Level.BAD,
            f"The arenas take {text.size(needed_bytes)} of {what}, {text.size(bound)}: the kernel may kill the daemon.",
            (f"kvstored --check   # with device and host of {text.size(bound * 0.8)} together at most",),
        )
    share = f", of which the arenas take {text.size(needed_bytes)}" if needed_bytes else ""
    return Finding("memory", Level.OK, f"{what.capitalize()} is {text.size(bound)}{share}.")


def sealed_memory() -> Finding:
    """Whether this kernel can make memory that clients map read-only for good."""
    descriptor = os.memfd_create("kvctl-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError as error:
        return Finding(
            "sealed memory",
            Level.BAD,
            f"The kernel refuses F_SEAL_FUTURE_WRITE ({error.strerror}): clients cannot be kept from writing.",
            ("uname -r   # Linux 5.1 or newer is needed",),
        )
    finally:
        os.close(descriptor)
    return Finding("sealed memory", Level.OK, "The host arena can be sealed against writing by clients.")


def direct_io(directory: Path) -> Finding:
    """Whether the SSD directory takes O_DIRECT, by writing one page to a file without a name."""
    name = "direct I/O"
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as error:
        return Finding(
            name,
            Level.BAD,
            f"{directory} does not open files for direct I/O ({error.strerror}).",
            (f"findmnt --target {directory}   # a local ext4 or xfs that this user may write is needed",),
        )
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwrite(descriptor, page, 0)
    except OSError as error:
        return Finding(name, Level.BAD, f"A direct write in {directory} fails: {error.strerror}.", ("dmesg | tail",))
    finally:
        os.close(descriptor)
    return Finding(name, Level.OK, f"{directory} takes direct reads and writes.")


def disk_space(directory: Path, cap_bytes: int, used_bytes: int, floor_bytes: int) -> Finding:
    """Whether the file system has room for what the cap still allows, beside the floor of free space."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    wanted = max(0, cap_bytes - used_bytes) + floor_bytes
    if cap_bytes and free < wanted:
        return Finding(
            "disk space",
            Level.WARN,
            f"{text.size(free)} are free, but cap and floor ask for {text.size(wanted)}: the disk fills first.",
            (f"kvstored --check   # with ssd of {text.size(max(0, free + used_bytes - floor_bytes))} at most",),
        )
    beside = f"; the cap may still take {text.size(max(0, cap_bytes - used_bytes))}" if cap_bytes else ""
    return Finding("disk space", Level.OK, f"{text.size(free)} are free in {directory}{beside}.")


def native_kernels() -> Finding:
    """Whether the C++ kernels are here, and at which level."""
    from kvstore.kernels import native  # noqa: PLC0415 - loads the extension, which only doctor needs

    status = native.native_status()
    if status.available:
        taken = [(kind, one.form, one.speeds[one.form]) for kind, one in native.copy_variant().items()]
        copies = ", ".join(f"{kind} {form} ({speed:.1f} GB/s)" for kind, form, speed in taken)
        says = f"The C++ kernels run at level {status.levels[0]}; copies as timed here: {copies}."
        return Finding("native kernels", Level.OK, says)
    return Finding(
        "native kernels",
        Level.WARN,
        f"The C++ kernels are absent, attention takes the slower torch path: {status.reason}.",
        ("apt-get install g++ && pip install --force-reinstall --no-deps .   # in the clone",),
    )


def index_form(form: str) -> Finding:
    """Whether the daemon's index of blocks is the native one."""
    if form == "native":
        return Finding("index", Level.OK, "The index of blocks is the native one.")
    return Finding(
        "index",
        Level.WARN,
        "The daemon's index of blocks is the one in Python: calls take longer, and a block half as much memory again."
        " Its log says why.",
        ("apt-get install g++ && pip install --force-reinstall --no-deps .   # in the clone, then restart kvstored",),
    )


def python() -> Finding:
    """Whether this Python, which the daemon's mostly is too, was built for speed."""
    if python_build.optimised():
        return Finding("Python", Level.OK, f"{python_build.told()} was built with optimisations.")
    return Finding(
        "Python",
        Level.NOTE,
        f"{python_build.told()}: calls take up to 1.6 times as long as with a distribution's.",
        (
            "PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto' pyenv install --force "
            + platform.python_version(),
        ),
    )


def gpu(driver: Path = Path("/proc/driver/nvidia/version"), amd: Path = Path("/dev/kfd")) -> Finding:
    """Which GPU driver is loaded, if any."""
    if driver.exists():
        first = driver.read_text(errors="replace").splitlines()[0]
        version = re.search(r"\d+\.\d+(?:\.\d+)?", first)
        return Finding("GPU", Level.OK, f"The NVIDIA driver {version.group() if version else ''} is loaded.")
    if amd.exists():
        return Finding("GPU", Level.NOTE, "An AMD GPU is here; DEVICE is a shared arena in host memory.")
    return Finding("GPU", Level.NOTE, "No GPU: DEVICE is a shared arena in host memory.")


def leftovers(folder: Path = Path("/dev/shm")) -> Finding:
    """Whether anything of this service lies in /dev/shm, where nothing of it ever should."""
    found = sorted(path.name for path in folder.glob("*kvstore*")) if folder.is_dir() else []
    if found:
        return Finding("leftovers", Level.WARN, f"{folder} holds {', '.join(found[:3])}.", (f"rm {folder}/{found[0]}",))
    return Finding("leftovers", Level.OK, f"Nothing of the service lies in {folder}.")


def cgroup_limit(pid: int | None, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Bytes that the control group of ``pid`` (or of this process) may take, version 1 or 2; a huge number for none."""
    lowest = _UNLIMITED
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / str(pid or "self") / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        folder = base / path.lstrip("/")
        # A limit of any group above counts too; in a container the path may be the host's, then only the root is here.
        for group in [folder, *folder.parents]:
            if base not in [group, *group.parents]:
                break
            lowest = min(lowest, _number(group / name, _UNLIMITED))
    return lowest


def probe_directory(directory: str) -> Path | None:
    """The directory to try, or its nearest parent that exists; None for an empty name."""
    if not directory:
        return None
    path = Path(directory).absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _locked_limit(pid: int | None) -> int:
    if pid:
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
                if line.startswith("Max locked memory"):
                    soft = line.split()[3]
                    return _UNLIMITED if soft == "unlimited" else int(soft)
    soft_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return _UNLIMITED if soft_limit == resource.RLIM_INFINITY else soft_limit


def _number(path: Path, default: int = 0) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def _chosen(path: Path) -> str:
    """The word in brackets of a kernel setting such as ``always [never]``; empty where the file is absent."""
    try:
        found = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return ""
    return found.group(1) if found else ""
