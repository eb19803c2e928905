"""A Unix socket that one daemon owns: locked, private by mode, stale files replaced, gone at the end.

The lock is an advisory lock on ``<socket>.lock``. It dies with its process, so after ``kill -9`` the next
daemon takes the lock, knows that the socket file is stale, and replaces it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument, Unavailable

PATH_BYTES_MAX: Final = 107
"""Longest path of a Unix socket on Linux."""

_UCRED: Final = struct.Struct("3i")
_BACKLOG: Final = 128


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who is at the other end, as the kernel vouches for it."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """SO_PEERCRED of a connected Unix socket."""
    return PeerCredentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


class SocketLock:
    """The right to serve at a path; held until ``release`` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._fd = self._take()

    def _take(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                raise Unavailable(
                    f"another kvstored (pid {holder}) serves at {str(self._path)[: -len('.lock')]}; "
                    "stop it, or give this one another --socket",
                    field="socket",
                    value=holder,
                ) from error
            if self._is_current(fd):
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
                return fd
            # The holder before removed the file between our open and our lock: that file guards nothing.
            os.close(fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.fstat(fd).st_ino == os.stat(self._path).st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove the file and let the lock go. Idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def check_socket_path(path: Path) -> None:
    """Raise InvalidArgument unless a socket can be bound at ``path``."""
    size = len(os.fsencode(path))
    if size > PATH_BYTES_MAX:
        raise InvalidArgument("socket", f"a path of {size} bytes", f"at most {PATH_BYTES_MAX} bytes: {path}")


def bind_unix(path: Path, mode: int) -> socket.socket:
    """Bind and listen at ``path``, replacing a stale file; the caller holds the path's SocketLock."""
    check_socket_path(path)
    remove_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    # The mask makes the file private from its first moment; chmod then gives what was asked for.
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        if error.errno == errno.ENOENT:
            raise InvalidArgument("socket", str(path), "a path in a directory that exists") from error
        raise
    finally:
        os.umask(mask)
    path.chmod(mode)
    listener.listen(_BACKLOG)
    return listener


def remove_socket(path: Path) -> None:
    """Remove a socket file if there is one; any other kind of file is left and refused."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if (found.st_mode & 0o170000) != 0o140000:
        raise InvalidArgument("socket", str(path), "a path where nothing but an old socket lies")
    path.unlink()
