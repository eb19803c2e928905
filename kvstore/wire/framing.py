"""Frames of the session socket: a fixed header and a payload, little-endian (``protos/kvstore/v1/session.proto``).

::

    u32 length    bytes after this field
    u64 call_id   chosen by the caller; 0 for what nobody asked for
    u8  kind      FrameKind
    u8  code      gRPC status code of an error, else 0
    u16 name_len  bytes of the method's name, requests only
    name, payload

A frame is valid if and only if its length is at least the header's rest plus ``name_len`` and at most
``FRAME_BYTES_MAX``, its kind is known, and its name is ASCII. Anything else ends the connection: a stream that
has lost its frames can not find them again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple

from kvstore.core.errors import InvalidArgument

PROTOCOL_VERSION: Final = 1
"""Version that Hello and Welcome carry; another one is refused."""

FRAME_BYTES_MAX: Final = 4 << 20
"""Longest frame. A commit of 4,096 keys with 64 token ids each takes 1.6 MB."""

MESSAGE_BYTES_MAX: Final = FRAME_BYTES_MAX
"""Longest gRPC message: the same bound on either transport."""

CHUNK_BYTES_MAX: Final = 1 << 20
"""Most payload bytes in one chunk of a Read or Write stream."""

DESCRIPTORS_MAX: Final = 8
"""Most file descriptors beside a Welcome."""

HEADER: Final = struct.Struct("<IQBBH")
HEADER_BYTES: Final = HEADER.size
LENGTH_BYTES: Final = 4
_REST_BYTES: Final = HEADER_BYTES - LENGTH_BYTES


class FrameKind(IntEnum):
    """What a frame carries."""

    REQUEST = 0
    REPLY = 1
    ERROR = 2
    JOB_DONE = 3
    HELLO = 4
    WELCOME = 5


_KIND_MAX: Final = int(max(FrameKind))


class Frame(NamedTuple):
    """One decoded frame."""

    call_id: int
    kind: int
    code: int
    name: str
    payload: bytes


_NEW_FRAME: Final[Callable[[Iterable[object]], Frame]] = partial(tuple.__new__, Frame)
"""As ``Frame(*fields)``, which is a call more a frame."""


def pack_frame(call_id: int, kind: FrameKind, payload: bytes, *, name: bytes = b"", code: int = 0) -> bytes:
    """Return one frame as bytes. Raises InvalidArgument if it would be longer than FRAME_BYTES_MAX."""
    length = _REST_BYTES + len(name) + len(payload)
    if length > FRAME_BYTES_MAX:
        raise InvalidArgument("message", f"{length} bytes", f"at most {FRAME_BYTES_MAX} bytes; send fewer keys a call")
    return HEADER.pack(length, call_id, kind, code, len(name)) + name + payload


class FrameDecoder:
    """Cuts a byte stream into frames; holds at most one frame and what was read with it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.held = 0
        """Bytes of a part of a frame that waits for the rest."""

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes in and return the frames that are now whole. Raises InvalidArgument for an invalid frame."""
        buffer = self._buffer
        source: bytes | bytearray = data
        if buffer:
            buffer += data
            source = buffer
        frames: list[Frame] = []
        begin, size = 0, len(source)
        while size - begin >= HEADER_BYTES:
            length, call_id, kind, code, name_length = HEADER.unpack_from(source, begin)
            if length > FRAME_BYTES_MAX or length < _REST_BYTES + name_length or kind > _KIND_MAX:
                _check(length, kind, name_length)
            end = begin + LENGTH_BYTES + length
            if end > size:
                break
            body = begin + HEADER_BYTES + name_length
            try:
                name = str(source[begin + HEADER_BYTES : body], "ascii") if name_length else ""
            except UnicodeDecodeError as error:
                held = bytes(source[begin + HEADER_BYTES : body])
                raise InvalidArgument("frame.name", repr(held[:40]), "ASCII") from error
            frames.append(_NEW_FRAME((call_id, kind, code, name, bytes(source[body:end]))))
            begin = end
        if source is buffer:
            del buffer[:begin]
        elif begin < size:
            # Nearly always whole frames come, and are cut from what was read.
            buffer += memoryview(data)[begin:]
        self.held = len(buffer)
        return frames


def first_frame(data: bytes) -> tuple[Frame | None, bytes]:
    """The first frame of ``data``, None if it is not whole, and what comes behind it. Raises InvalidArgument for an
    invalid one; what is behind it is not looked at."""
    if len(data) < HEADER_BYTES:
        return None, b""
    length, _, kind, _, name_length = HEADER.unpack_from(data, 0)
    _check(length, kind, name_length)
    end = LENGTH_BYTES + length
    if end > len(data):
        return None, b""
    return FrameDecoder().feed(data[:end])[0], data[end:]


def _check(length: int, kind: int, name_length: int) -> None:
    low = _REST_BYTES + name_length
    if not low <= length <= FRAME_BYTES_MAX:
        raise InvalidArgument("frame.length", length, f"{low} to {FRAME_BYTES_MAX}")
    if kind > _KIND_MAX:
        raise InvalidArgument("frame.kind", kind, f"0 to {_KIND_MAX}")
