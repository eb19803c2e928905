"""The disk port: every operation that the SSD tier does on files, and the real one on Linux.

Names are relative to the port's directory ("journal-1", "quarantine/x"). All methods raise OSError as the
system call does. ``kvstore.testing`` has a port in memory with seeded faults and power cuts.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvstore.core.errors import TierUnavailable
from kvstore.core.lockfile import LockHeldError, NoLockFileError, take_lock_file

log: Final = logging.getLogger("kvstore.ssd")
PAGE_BYTES: Final = 4096
SECTOR_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class FileStat:
    """``size`` as read, ``allocated`` as ``du`` counts it, ``links`` 0 once the name was removed."""

    size: int
    allocated: int
    links: int


class DiskPort(Protocol):
    """One directory on one filesystem."""

    directory: str
    granule: int
    """Direct I/O takes memory, offsets and lengths that are multiples of this, at most a page."""
    native: bool
    """Whether its descriptors are the system's, so that native code can read from them."""

    def lock(self, name: str) -> int:
        """Hold the file ``name`` alone until its descriptor closes; raises TierUnavailable with the holder's pid."""

    def mkdir(self, name: str) -> None:
        """Make a directory; "" is the port's own. It may exist."""

    def listdir(self, name: str) -> list[str]:
        """Names in a directory, sorted."""

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> int:
        """Open to read and write; ``create`` demands that the name is new. ``direct`` bypasses the page cache."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Read at an offset; returns the bytes read, fewer at the end of the file."""

    def pwrite(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """Write parts one after another at an offset; returns the bytes written."""

    def fdatasync(self, fd: int) -> None:
        """Return when the file's data, and what is needed to read it back, is on stable storage."""

    def sync_directory(self, name: str) -> None:
        """Return when names made, renamed and removed in a directory are on stable storage."""

    def truncate(self, fd: int, size: int) -> None:
        """Cut or extend a file."""

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve space for bytes 0..size and make the file that long."""

    def stat(self, name: str) -> FileStat:
        """Sizes of a name, directories included."""

    def fstat(self, fd: int) -> FileStat:
        """Sizes of an open file."""

    def rename(self, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` in one step."""

    def unlink(self, name: str) -> None:
        """Remove a name."""

    def free_bytes(self) -> int:
        """Bytes of the filesystem that this process may still use."""


class LinuxDisk:
    """The real port. Where the filesystem refuses O_DIRECT, files go through the page cache; ``direct`` says so."""

    native = True

    def __init__(self, directory: str) -> None:
        self.directory = os.path.abspath(directory)
        self.direct = True
        self.granule = PAGE_BYTES

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name) if name else self.directory

    def lock(self, name: str) -> int:
        """See ``take_lock_file``."""
        try:
            fd = take_lock_file(Path(self._path(name)))
        except LockHeldError as held:
            raise TierUnavailable(
                f"{self.directory} is held by pid {held.pid}; stop that daemon or give this one another directory",
                field="directory",
                value=self.directory,
                expected="a directory that no other daemon holds",
            ) from held
        except NoLockFileError as error:
            raise TierUnavailable(
                str(error),
                field="directory",
                value=self.directory,
                expected=f"a plain {name} of the daemon's own user in it, or none at all",
            ) from error
        self._probe()
        return fd

    def _probe(self) -> None:
        """Find out whether the filesystem takes direct I/O, and of what granule, with a file that has no name."""
        page = mmap.mmap(-1, PAGE_BYTES)
        try:
            fd = os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                log.info("%s: direct I/O in pages (no nameless file to try: %s)", self.directory, error)
                return
            log.warning("%s: no direct I/O; files go through the page cache", self.directory)
            self.direct, self.granule = False, 1
            return
        try:
            view = memoryview(page)
            os.pwrite(fd, view[SECTOR_BYTES : 2 * SECTOR_BYTES], SECTOR_BYTES)
            self.granule = SECTOR_BYTES
        except OSError as error:
            log.info("%s: direct I/O in pages (%s)", self.directory, error)
        finally:
            os.close(fd)

    def mkdir(self, name: str) -> None:
        """Make a directory that only this user may enter."""
        os.makedirs(self._path(name), mode=0o700, exist_ok=True)

    def listdir(self, name: str) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(self._path(name)))

    def open(self, name: str, *, create: bool = False, direct: bool = False) -> int:
        """Open with O_DIRECT where asked and possible."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        if direct and self.direct:
            try:
                return os.open(self._path(name), flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The open with O_DIRECT may have made the name before it was refused.
                flags &= ~os.O_EXCL
                self.direct = False
        return os.open(self._path(name), flags, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """One preadv."""
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, parts: Sequence[memoryview], offset: int) -> int:
        """One pwritev."""
        return os.pwritev(fd, parts, offset)

    def fdatasync(self, fd: int) -> None:
        """One fdatasync."""
        os.fdatasync(fd)

    def sync_directory(self, name: str) -> None:
        """Sync a directory through a descriptor of its own."""
        fd = os.open(self._path(name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def truncate(self, fd: int, size: int) -> None:
        """One ftruncate."""
        os.ftruncate(fd, size)

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve space; a filesystem without fallocate writes zeros instead."""
        os.posix_fallocate(fd, 0, size)

    def stat(self, name: str) -> FileStat:
        """One lstat."""
        found = os.lstat(self._path(name))
        return FileStat(found.st_size, found.st_blocks * 512, found.st_nlink)

    def fstat(self, fd: int) -> FileStat:
        """One fstat."""
        found = os.fstat(fd)
        return FileStat(found.st_size, found.st_blocks * 512, found.st_nlink)

    def rename(self, old: str, new: str) -> None:
        """One rename."""
        os.rename(self._path(old), self._path(new))

    def unlink(self, name: str) -> None:
        """One unlink."""
        os.unlink(self._path(name))

    def free_bytes(self) -> int:
        """Free bytes for this user."""
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize


def read_full(port: DiskPort, fd: int, into: memoryview, offset: int) -> int:
    """Read until ``into`` is full or the file ends; returns the bytes read."""
    done = 0
    while done < len(into):
        step = port.pread(fd, into[done:], offset + done)
        if step <= 0:
            break
        done += step
    return done


def write_full(port: DiskPort, fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``; raises OSError (ENOSPC) if the port stops taking bytes."""
    done = 0
    while done < len(data):
        step = port.pwrite(fd, [data[done:]], offset + done)
        if step <= 0:
            raise OSError(errno.ENOSPC, f"a write of {len(data) - done} bytes at {offset + done} took none")
        done += step
