"""How a session begins on the session socket: Hello out, Welcome with descriptors in."""

from __future__ import annotations

import logging
import os
import socket
import struct
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvstore.client.arenas import Arenas, map_arenas
from kvstore.core.errors import InternalError, Unavailable
from kvstore.v1 import session_pb2
from kvstore.wire.errors import from_detail
from kvstore.wire.framing import DESCRIPTORS_MAX, PROTOCOL_VERSION, FrameDecoder, FrameKind, pack_frame

log = logging.getLogger("kvstore.client")

_RECEIVE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client asks for. Without a buffer nothing is mapped, which is enough for admin calls and matches."""

    name: str
    buffer_bytes: int = 0
    device: bool = False
    index: bool = True
    """With a buffer: map the daemon's index too, if it lets us."""


class Bell:
    """The eventfd that wakes the daemon's reader of plans, closed when nobody has this any more."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def another(self) -> int:
        """A descriptor of the caller's own."""
        return os.dup(self._fd)

    def __del__(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a session got."""

    boot_id: bytes
    token: bytes
    arenas: Arenas
    version: str
    bell: Bell | None = None
    index: Any = None
    """What ``native.mapped_index`` gave; None where matches are calls."""


def open_session(path: str, hello: Hello, timeout_s: float) -> tuple[socket.socket, Welcome]:
    """Connect, greet, map. The socket belongs to the caller. Raises Unavailable or what the daemon refused with."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # A blocking connect waits in the kernel while the daemon's queue is full; with a time-out of Python's it fails.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        connection.connect(path)
        connection.settimeout(timeout_s)
        message = session_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            name=hello.name,
            buffer_bytes=hello.buffer_bytes,
            device=hello.device,
            plans=hello.buffer_bytes > 0,
            index=hello.index and hello.buffer_bytes > 0 and _native().available(),
        )
        connection.sendall(pack_frame(1, FrameKind.HELLO, message.SerializeToString()))
        return connection, _receive(connection, hello)
    except OSError as error:
        connection.close()
        raise Unavailable(
            f"no daemon answers at {path}: {error}; start kvstored, or name its socket", field="socket", value=path
        ) from error
    except BaseException:
        connection.close()
        raise


def _native() -> Any:
    # By name, since it loads numpy, which clients without a buffer start without.
    return import_module("kvstore.kernels.native")


def _map_index(fd: int) -> Any:
    """The daemon's index, mapped from a descriptor that is closed here; None where this process can not read it."""
    try:
        return _native().mapped_index(fd)
    except ValueError as error:
        log.info("the daemon's index is not mapped, matches are calls: %s", error)
        return None
    finally:
        os.close(fd)


def _timeval(seconds: float) -> bytes:
    """``struct timeval`` of socket(7); 0 would be for ever."""
    micros = max(1, int(seconds * 1e6))
    return struct.pack("ll", *divmod(micros, 1_000_000))


def _receive(connection: socket.socket, hello: Hello) -> Welcome:
    decoder = FrameDecoder()
    fds: list[int] = []
    try:
        while True:
            data, received, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, DESCRIPTORS_MAX)
            fds.extend(received)
            if not data:
                raise Unavailable("the daemon closed the connection before its Welcome")
            frames = decoder.feed(data)
            if frames:
                break
        frame = frames[0]
        if frame.kind == FrameKind.ERROR:
            raise from_detail(frame.payload, frame.code)
        if frame.kind != FrameKind.WELCOME:
            raise InternalError(f"the daemon's first frame is of kind {frame.kind}; expected a Welcome")
        welcome = session_pb2.Welcome.FromString(frame.payload)
        index = _map_index(fds.pop()) if welcome.index and fds else None
        bell = Bell(fds.pop()) if welcome.plan_bell and fds else None
        taken, fds = fds, []
        arenas = map_arenas(welcome.arenas, taken, wanted=bool(hello.buffer_bytes) or hello.device)
        return Welcome(welcome.boot_id, welcome.token, arenas, welcome.version, bell, index)
    finally:
        for fd in fds:
            os.close(fd)
