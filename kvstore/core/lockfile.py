"""Lock files: an advisory lock that dies with its process, on a file that holds the pid of whoever has it.

Only a plain file of one name that is ours or root's is ever written. Whoever may write to the folder could else have
us write to any file of ours by a link. Such a link is taken away, which touches nothing behind it.

Own code, though the package filelock locks files: its lock says nobody's pid, which is what an operator asks first, and
where flock is missing it falls back to a marker file, which a kill leaves behind.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

_TRIES: Final = 8
_NO_LOCK_FILE: Final = (errno.ELOOP, errno.EISDIR, errno.ENXIO)


class LockHeldError(Exception):
    """Another process has the lock; ``pid`` is what its file says, or "unknown"."""

    def __init__(self, path: Path, pid: str) -> None:
        super().__init__(f"{path} is locked by pid {pid}")
        self.pid = pid


class NoLockFileError(Exception):
    """Something else stands at the path, and can not be taken away; the message says what."""


def take_lock_file(path: Path) -> int:
    """Lock the file at ``path``, made if it is missing, and write our pid into it; returns its descriptor.

    Closing that gives the lock up. Raises LockHeldError, NoLockFileError, or OSError as open does.
    """
    why = ""
    for _ in range(_TRIES):
        try:
            fd = _open(path)
        except PermissionError as error:
            # It may be another daemon's, which has it locked: then it is its right to the place.
            raise NoLockFileError(f"lock file {path}: {os.strerror(error.errno or errno.EACCES)}") from error
        except OSError as error:
            if error.errno not in _NO_LOCK_FILE:
                raise
            why = os.strerror(error.errno)
        else:
            found = os.fstat(fd)
            why = f"mode {found.st_mode:o}, {found.st_nlink} names, uid {found.st_uid}"
            if stat.S_ISREG(found.st_mode):
                # A file with other names, as backups by hard links make them, may be locked all the same.
                _lock(fd, path)
                found = os.fstat(fd)
                if not _is_current(fd, path):
                    # The holder before removed it between our open and our lock: that file guards nothing.
                    os.close(fd)
                    continue
                if found.st_nlink == 1 and found.st_uid in (0, os.geteuid()):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, str(os.getpid()).encode(), 0)
                    return fd
            os.close(fd)
        log.warning("%s is no lock file of ours (%s): removed; what it names is left alone", path, why)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            why = f"{why}; {error.strerror}"
            break
    raise NoLockFileError(f"lock file {path}: {why or 'others make and remove it'}")


def lock_holder(path: Path) -> int:
    """Pid of the process that has locked the file at ``path``, as far as proc_locks(5) tells; 0 if nobody has.

    Nothing is locked, opened or made. Who asks may be wrong a moment later, so this is for words and not for rights.
    """
    try:
        found = path.stat(follow_symlinks=False)
        locks = Path("/proc/locks").read_text()
    except OSError:
        return 0
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == name:  # noqa: PLR2004  columns of the table
            return int(fields[4])
    return 0


def _open(path: Path) -> int:
    """Open the file, made if it is missing. Without O_CREAT first, with which the kernel refuses files of others in
    folders such as /tmp (fs.protected_regular)."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o600)


def _lock(fd: int, path: Path) -> None:
    """Take the lock on a descriptor, which is closed where that fails."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise LockHeldError(path, pid) from error
        raise


def _is_current(fd: int, path: Path) -> bool:
    try:
        return os.fstat(fd).st_ino == os.stat(path, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return False
