"""How much memory this process may still take: what the machine has left, and what its container leaves it.

A container's limit is the lowest of those of its control group and of the groups above that one (version 1 and 2). What
such a group has in use counts against it, but for the page cache, which the kernel gives up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

OWN_BYTES: Final = 64 << 20
"""Left to the daemon itself, beside arenas and buffers: interpreter, index of a small cache, messages under way."""

BUFFERS_SHARE: Final = 0.75
"""Of what is left beside the arenas, the share that buffers of sessions may take where nothing else is configured."""

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Room:
    """``available`` as the machine tells; ``limit`` of the container, None without one, of which ``left`` is free."""

    available: int
    limit: int | None = None
    left: int = 0

    @property
    def nbytes(self) -> int:
        """What may still be taken."""
        return self.available if self.limit is None else min(self.available, self.left)

    def buffers(self, arenas: int) -> int:
        """Bytes that buffers of sessions may take together beside ``arenas`` bytes that are yet to be made."""
        return max(0, int((self.nbytes - arenas - OWN_BYTES) * BUFFERS_SHARE))


def memory_room(proc: Path = _PROC, groups: Path = _GROUPS) -> Room:
    """Look at the machine now. The folders are those of tests."""
    available = meminfo("MemAvailable", proc=proc)
    limits = list(_limits(proc, groups))
    if not limits:
        return Room(available)
    left, limit = min(limits)
    return Room(available, limit, left)


def meminfo(name: str, *, unit: int = 1024, proc: Path = _PROC) -> int:
    """A line of /proc/meminfo; 0 if there is none of this name."""
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * unit
    return 0


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """Left and limit of each limited group above this process."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        for root in [groups / controllers, groups / "memory"] if controllers else [groups, groups / "unified"]:
            # A group outside of this process's namespace shows as one above the root, which is not there to be read.
            folder = root.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
            while True:
                limit, used = (_number(folder / name) for name in names)
                if limit is not None and limit < _UNLIMITED:
                    yield limit - max(0, (used or 0) - _page_cache(folder)), limit
                if folder == root:
                    break
                folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _page_cache(folder: Path) -> int:
    """Bytes of files that a group caches: the kernel frees them before it refuses memory."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = {name: int(number) for name, _, number in (line.partition(" ") for line in lines) if number.isdigit()}
    prefix = "total_" if "total_inactive_file" in found else ""
    return found.get(f"{prefix}inactive_file", 0) + found.get(f"{prefix}active_file", 0)
