"""A disk in memory behind the SSD tier's port: power cuts, torn and reordered writes, failing and stalling calls.

What is written stays volatile until its file is synced, and a name until its directory is. ``crash`` gives the disk
that a restart would find: what was synced, and of the rest as much as the mode and the seed let survive.
Everything is decided by counts and seeds, so a failure repeats. The one lock guards everything.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvstore.core.errors import TierUnavailable
from kvstore.tiers.ssd.port import FileStat

SECTOR_BYTES: Final = 512
PAGE_BYTES: Final = 4096


class Crash(Enum):
    """What survives of bytes and names that were not synced."""

    KILL = "kill"
    """Everything: the process died, the machine lives on."""
    LOST = "lost"
    """Nothing."""
    REORDERED = "reordered"
    """Each write, or not, by chance."""
    TORN = "torn"
    """Each sector of each write, or not, by chance."""


@dataclass(slots=True, eq=False)
class _File:
    """One file: as seen now, as synced, and the changes in between (offset and bytes, or a new size)."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytearray = field(default_factory=bytearray)
    changes: list[tuple[int, bytes] | int] = field(default_factory=list)
    links: int = 1

    def apply(self, change: tuple[int, bytes] | int, image: bytearray) -> None:
        if isinstance(change, int):
            del image[change:]
            image.extend(bytes(change - len(image)))
            return
        offset, data = change
        image.extend(bytes(max(0, offset + len(data) - len(image))))
        image[offset : offset + len(data)] = data

    def change(self, change: tuple[int, bytes] | int) -> None:
        self.apply(change, self.data)
        self.changes.append(change)


@dataclass(frozen=True, slots=True)
class _Naming:
    """One change of names: ``target`` None removes ``name``; ``old`` is the name that a rename takes away."""

    name: str
    target: _File | None
    old: str = ""


class FaultyDisk:
    """Meets ``DiskPort``. Counts every call in ``operations``, those that change something in
    ``mutations``, those that ``fail`` made fail in ``failed``."""

    def __init__(self, directory: str = "memory", *, capacity_bytes: int = 1 << 40) -> None:
        self.directory = directory
        self.granule = SECTOR_BYTES
        self.native = False
        self.capacity_bytes = capacity_bytes
        self.operations = 0
        self.mutations = 0
        self.failed = 0
        self.log: list[str] = []
        self.cut_after: int | None = None
        """No mutation after this many happens: the power is cut."""
        self.fail: Callable[[int, str, str], int] = lambda _number, _kind, _name: 0
        """Asked for each call's number, kind and name; an errno other than 0 makes it fail without effect."""
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._stalled: frozenset[str] = frozenset()
        self._names: dict[str, _File] = {}
        self._synced_names: dict[str, _File] = {}
        self._naming: list[_Naming] = []
        self._directories = {""}
        self._open: dict[int, tuple[_File, str]] = {}
        self._next_fd = 1000
        self._held: set[_File | None] = set()

    def stall(self, *kinds: str) -> None:
        """Calls of these kinds ("pread", "pwrite", "fdatasync", ...) do not return until ``release``."""
        self._stalled = frozenset(kinds)
        self._flowing.clear()

    def release(self) -> None:
        """Let stalled calls go on."""
        self._stalled = frozenset()
        self._flowing.set()

    def crash(self, mode: Crash, seed: int = 0) -> FaultyDisk:
        """The disk as a restart finds it; this one is left as it is."""
        chance = random.Random(seed)
        after = FaultyDisk(self.directory, capacity_bytes=self.capacity_bytes)
        with self._lock:
            after._directories = set(self._directories)
            names = dict(self._synced_names)
            survive = {Crash.KILL: len(self._naming), Crash.LOST: 0}.get(mode, chance.randint(0, len(self._naming)))
            for naming in self._naming[:survive]:
                _rename(names, naming)
            images = {file: _image(file, mode, chance) for file in dict.fromkeys(names.values())}
            for name, file in names.items():
                after._names[name] = _File(bytearray(images[file]), bytearray(images[file]))
            after._synced_names = dict(after._names)
        return after

    def image(self) -> dict[str, bytes]:
        """Bytes of every file, by name, as seen now."""
        with self._lock:
            return {name: bytes(file.data) for name, file in sorted(self._names.items())}

    def overwrite(self, name: str, data: bytes) -> None:
        """Replace a file's bytes behind the tier's back, synced."""
        with self._lock:
            file = self._names.setdefault(name, _File())
            self._synced_names[name] = file
            file.data[:] = data
            file.synced[:] = data
            file.changes.clear()

    def remove(self, name: str) -> None:
        """Remove a file behind the tier's back."""
        with self._lock:
            self._names.pop(name).links = 0
            self._synced_names.pop(name, None)

    def lock(self, name: str) -> int:
        """Hold a name until the descriptor closes."""
        self._step("lock", name, mutates=False)
        if self._names.get(name) in self._held:
            raise TierUnavailable(f"{self.directory} is held by pid {os.getpid()}")
        fd = self.open(name, create=name not in self._names)
        self._held.add(self._names[name])
        return fd

    def mkdir(self, name: str) -> None:
        """Make a directory."""
        self._step("mkdir", name)
        with self._lock:
            self._directories.add(name)

    def listdir(self, name: str) -> list[str]:
        """Names in a directory."""
        self._step("listdir", name, mutates=False)
        with self._lock:
            head = f"{name}/" if name else ""
            found = {one[len(head) :].partition("/")[0] for one in self._names if one.startswith(head)}
            return sorted(found | {one for one in self._directories if one and not name})

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> int:
        """Open, or make, a file."""
        del direct
        self._step("create" if create else "open", name, mutates=create)
        with self._lock:
            if create:
                if name in self._names:
                    raise FileExistsError(errno.EEXIST, "exists", name)
                naming = _Naming(name, _File())
                _rename(self._names, naming)
                self._naming.append(naming)
            elif name not in self._names:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            self._next_fd += 1
            self._open[self._next_fd] = (self._names[name], name)
            return self._next_fd

    def close(self, fd: int) -> None:
        """Close; a name that was locked is free again."""
        with self._lock:
            file, _ = self._open.pop(fd)
            self._held.discard(file)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Read what is there."""
        file = self._file("pread", fd, mutates=False)
        with self._lock:
            data = file.data[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def pwrite(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """Write, volatile until synced."""
        file = self._file("pwrite", fd)
        data = b"".join(parts)
        with self._lock:
            if self._used() + max(0, offset + len(data) - len(file.data)) > self.capacity_bytes:
                raise OSError(errno.ENOSPC, "no space left on the disk")
            file.change((offset, data))
        return len(data)

    def fdatasync(self, fd: int) -> None:
        """Make a file's bytes durable."""
        file = self._file("fdatasync", fd)
        with self._lock:
            for change in file.changes:
                file.apply(change, file.synced)
            file.changes.clear()

    def sync_directory(self, name: str) -> None:
        """Make a directory's names durable."""
        self._step("sync_directory", name)
        with self._lock:
            rest: list[_Naming] = []
            for naming in self._naming:
                if os.path.dirname(naming.name) == name:
                    _rename(self._synced_names, naming)
                else:
                    rest.append(naming)
            self._naming = rest

    def truncate(self, fd: int, size: int) -> None:
        """Cut or extend."""
        file = self._file("truncate", fd)
        with self._lock:
            file.change(size)

    def fallocate(self, fd: int, size: int) -> None:
        """Extend with zeros."""
        file = self._file("fallocate", fd)
        with self._lock:
            if self._used() + max(0, size - len(file.data)) > self.capacity_bytes:
                raise OSError(errno.ENOSPC, "no space left on the disk")
            file.change(max(size, len(file.data)))

    def stat(self, name: str) -> FileStat:
        """Sizes of a name; directories take a page."""
        self._step("stat", name, mutates=False)
        with self._lock:
            if name in self._directories:
                return FileStat(PAGE_BYTES, PAGE_BYTES, 2)
            if name not in self._names:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            return _stat(self._names[name])

    def fstat(self, fd: int) -> FileStat:
        """Sizes of an open file."""
        file = self._file("fstat", fd, mutates=False)
        with self._lock:
            return _stat(file)

    def rename(self, old: str, new: str) -> None:
        """Replace in one step."""
        self._step("rename", new)
        with self._lock:
            if old not in self._names:
                raise FileNotFoundError(errno.ENOENT, "no such file", old)
            naming = _Naming(new, self._names[old], old)
            _rename(self._names, naming)
            self._naming.append(naming)

    def unlink(self, name: str) -> None:
        """Remove a name."""
        self._step("unlink", name, mutates=name in self._names)
        with self._lock:
            if name not in self._names:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            self._names[name].links = 0
            naming = _Naming(name, None)
            _rename(self._names, naming)
            self._naming.append(naming)

    def free_bytes(self) -> int:
        """Bytes left."""
        self._step("statvfs", "", mutates=False)
        with self._lock:
            return max(0, self.capacity_bytes - self._used())

    def used_bytes(self) -> int:
        """What ``du`` would say."""
        with self._lock:
            return self._used()

    def _used(self) -> int:
        pages = sum(_stat(file).allocated for file in self._names.values())
        return pages + PAGE_BYTES * len(self._directories)

    def _file(self, kind: str, fd: int, *, mutates: bool = True) -> _File:
        with self._lock:
            if fd not in self._open:
                raise OSError(errno.EBADF, "the descriptor is closed")
            file, name = self._open[fd]
        self._step(kind, name, mutates=mutates)
        return file

    def _step(self, kind: str, name: str, *, mutates: bool = True) -> None:
        if kind in self._stalled:
            self._flowing.wait()
        with self._lock:
            self.operations += 1
            self.mutations += mutates
            self.log.append(f"{self.operations} {kind} {name}")
            if self.cut_after is not None and self.mutations > self.cut_after:
                raise OSError(errno.EIO, "the power is cut")
            code = self.fail(self.operations, kind, name)
        if code:
            self.failed += 1
            raise OSError(code, f"{os.strerror(code)} ({kind} {name})")


def _stat(file: _File) -> FileStat:
    return FileStat(len(file.data), -(-len(file.data) // PAGE_BYTES) * PAGE_BYTES, file.links)


def _rename(names: dict[str, _File], naming: _Naming) -> None:
    if naming.old:
        names.pop(naming.old, None)
    if naming.target is None:
        names.pop(naming.name, None)
    else:
        names[naming.name] = naming.target


def _image(file: _File, mode: Crash, chance: random.Random) -> bytearray:
    """A file's bytes after a crash."""
    if mode is Crash.KILL:
        return bytearray(file.data)
    image = bytearray(file.synced)
    if mode is Crash.LOST:
        return image
    for change in file.changes:
        if isinstance(change, int) or mode is Crash.REORDERED:
            if chance.random() < 0.5:
                file.apply(change, image)
            continue
        offset, data = change
        for at in range(0, len(data), SECTOR_BYTES):
            if chance.random() < 0.5:
                file.apply((offset + at, data[at : at + SECTOR_BYTES]), image)
    return image
