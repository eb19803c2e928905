"""Where the sockets are if nobody says otherwise; the daemon and its clients ask here, so they agree."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

SOCKET_NAME = "kvstored.sock"
_FOLDER = "kvstore"


def default_directory() -> Path:
    """``/run/kvstore`` for root, ``/run/user/UID/kvstore`` for others where there is one, else ``~/.kvstore``."""
    if os.getuid() == 0:
        return Path("/run") / _FOLDER
    user = Path(f"/run/user/{os.getuid()}")
    return user / _FOLDER if user.is_dir() else Path.home() / f".{_FOLDER}"


def default_socket() -> Path:
    """The session socket."""
    return default_directory() / SOCKET_NAME


def grpc_socket(session_socket: Path | str) -> Path:
    """The gRPC socket that lies beside a session socket."""
    path = Path(session_socket)
    return path.with_name(path.name + ".grpc")


def unix_address(path: Path | str) -> str:
    """What gRPC calls a Unix socket: a URI, so ``%``, ``#``, ``?`` and bytes that are no UTF-8 are quoted."""
    return "unix:" + quote(os.fsencode(path))
