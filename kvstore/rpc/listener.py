"""A Unix socket that one daemon owns: locked, private by mode, stale files replaced, gone at the end.

The lock is an advisory lock on ``<socket>.lock``. It dies with its process, so after ``kill -9`` the next
daemon takes the lock, knows that the socket file is stale, and replaces it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.core.lockfile import LockHeldError, NoLockFileError, take_lock_file

log = logging.getLogger(__name__)

PATH_BYTES_MAX: Final = 107
"""Longest path of a Unix socket on Linux."""

_UCRED: Final = struct.Struct("3i")
_BACKLOG: Final = 1024
ACCEPTED_A_TURN: Final = 64
"""Connections taken in one turn of the loop: with one, who comes waits for a turn of all others for each before it."""

ACCEPT_PAUSE_S: Final = 0.2
"""How long accepting rests when the process is out of descriptors."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Who is at the other end, as the kernel vouches for it."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    """SO_PEERCRED of a connected Unix socket."""
    return PeerCredentials(*_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))


def lock_file(path: Path) -> Path:
    """The file whose lock is the right to serve at the socket ``path``."""
    return path.with_name(path.name + ".lock")


class SocketLock:
    """The right to serve at a path; held until ``release`` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = lock_file(path)
        self._fd = self._take()

    def _take(self) -> int:
        try:
            return take_lock_file(self._path)
        except LockHeldError as held:
            raise Unavailable(
                f"another kvstored (pid {held.pid}) serves at {str(self._path)[: -len('.lock')]}; "
                "stop it, or give this one another --socket",
                field="socket",
                value=held.pid,
            ) from held
        except NoLockFileError as error:
            raise InvalidArgument(
                "socket", str(error), "a plain file of the daemon's own user, or none at all"
            ) from error

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


class Acceptor:
    """Takes connections off a listening socket on the event loop, each given to ``accepted``.

    Out of descriptors or memory it pauses, since the loop would else call it again at once for as long as somebody
    waits; that is logged once until a connection was taken again.
    """

    def __init__(self, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._accepted = accepted
        self._timer: asyncio.TimerHandle | None = None
        self._told = False
        self.pauses = 0
        """How often accepting was paused."""
        self._listen()

    def _listen(self) -> None:
        self._timer = None
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_A_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._told = False
            connection.setblocking(False)
            self._accepted(connection)

    def _pause(self, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        self._timer = loop.call_later(ACCEPT_PAUSE_S, self._listen)
        self.pauses += 1
        if not self._told:
            self._told = True
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.error(
                "no connection is accepted for now: %s; descriptors are limited to %d (hard limit %d): "
                "raise LimitNOFILE, or lower sessions_max", error, soft, hard,
            )  # fmt: skip

    def close(self) -> None:
        """Accept no more, and close the listening socket. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise the soft limit of descriptors to the hard one; returns soft limit and hard limit as they are now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)
