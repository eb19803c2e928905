"""Both transports by hand: what is sent is bytes, what comes back is the status alone."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc

from kvstore.tools.fuzz.mutate import damaged
from kvstore.v1 import session_pb2
from kvstore.wire.errors import SESSION_METADATA
from kvstore.wire.paths import grpc_socket

HEADER: Final = struct.Struct("<IQBBH")
REQUEST, REPLY, ERROR, HELLO = 0, 1, 2, 4
OPEN: Final = "kvstore.v1.Sessions/OpenRemote"
CLOSE: Final = "kvstore.v1.Sessions/CloseRemote"
ANSWER_SECONDS_MAX: Final = 5.0
OK, INTERNAL, UNKNOWN = 0, 13, 2
SILENT: Final = -1
"""No answer: the connection was closed, or the call waits for longer than anybody looks."""


class SessionWire:
    """The session socket; connects again whenever the daemon ended the connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._calls = 10
        self._socket = self._open()

    def _open(self) -> socket.socket:
        fresh = socket.socket(socket.AF_UNIX)
        fresh.settimeout(ANSWER_SECONDS_MAX)
        fresh.connect(str(self._path))
        hello = session_pb2.Hello(protocol_version=1, name="fuzz").SerializeToString()
        fresh.sendall(HEADER.pack(12 + len(hello), 1, HELLO, 0, 0) + hello)
        self._buffer = b""
        return fresh

    def send(self, method: str, payload: bytes) -> int:
        """One request; its status."""
        self._calls += 1
        name = method.encode()
        frame = HEADER.pack(12 + len(name) + len(payload), self._calls, REQUEST, 0, len(name)) + name + payload
        try:
            self._socket.sendall(frame)
            return self._status(self._calls)
        except OSError:
            self.again()
            return SILENT

    def send_frame(self, rng: random.Random, method: str, payload: bytes) -> None:
        """A frame that lies about itself. The daemon may end the connection, so a new one follows."""
        name = method.encode()
        frame = HEADER.pack(12 + len(name) + len(payload), rng.choice((0, 1, 2**64 - 1)), REQUEST, 0, len(name))
        odd = HEADER.pack(
            rng.choice((0, 11, 12, 64, 4 << 20, 2**32 - 1)), 5, rng.randrange(256), rng.randrange(256),
            rng.choice((0, 5, 65535)),
        )  # fmt: skip
        data = rng.choice((damaged(rng, frame + name + payload), odd + name + payload, odd))
        try:
            self._socket.sendall(data[: 8 << 20])
        except OSError:
            self.again()
            return
        self.again()

    def again(self) -> None:
        """A new connection."""
        self._socket.close()
        self._socket = self._open()

    def _status(self, call: int) -> int:
        while True:
            if len(self._buffer) >= HEADER.size:
                length, answered, kind, code, _ = HEADER.unpack_from(self._buffer)
                if len(self._buffer) >= 4 + length:
                    self._buffer = self._buffer[4 + length :]
                    if answered == call and kind in (REPLY, ERROR):
                        return int(code) if kind == ERROR else OK
                    continue
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionResetError
            self._buffer += data

    def close(self) -> None:
        """End the session."""
        self._socket.close()


class GrpcWire:
    """gRPC on the daemon's Unix socket, with a remote session's token, an odd one, or none."""

    def __init__(self, path: Path) -> None:
        self._channel: Any = grpc.insecure_channel(f"unix:{grpc_socket(path)}")
        self._opened: list[bytes] = []
        self.open()

    def open(self) -> None:
        """A new remote session: messages before may have closed the last one."""
        request = session_pb2.OpenRemoteRequest(ttl_ms=20_000).SerializeToString()
        reply = self._channel.unary_unary(f"/{OPEN}")(request, timeout=ANSWER_SECONDS_MAX)
        self._token = self._remember(reply)

    def _remember(self, reply: bytes) -> bytes:
        """A session may live for as long as it asked to; those of mutated asks are closed at the end, too."""
        self._opened.append(session_pb2.OpenRemoteResponse.FromString(reply).token)
        return self._opened[-1]

    def send(self, rng: random.Random, method: str, payload: bytes) -> int:
        """One call; its status."""
        token = self._token.hex()
        if rng.random() < 0.1:
            token = rng.choice(("", "zz", token[:-2], "00" * 16, "f" * 5000))
        metadata = ((SESSION_METADATA, token),)
        try:
            if method.endswith(("/Read", "/Subscribe")):
                stream = self._channel.unary_stream(f"/{method}")(payload, timeout=1.0, metadata=metadata)
                first(stream)
                stream.cancel()
            elif method.endswith("/Write"):
                parts = [payload, damaged(rng, payload)][: rng.choice((1, 1, 2))]
                self._channel.stream_unary(f"/{method}")(iter(parts), timeout=1.0, metadata=metadata)
            else:
                reply = self._channel.unary_unary(f"/{method}")(payload, timeout=ANSWER_SECONDS_MAX, metadata=metadata)
                if method == OPEN:
                    self._remember(reply)
        except grpc.RpcError as error:
            return int(error.code().value[0])
        return OK

    def close(self) -> None:
        """End every session that was opened, and the channel."""
        for token in self._opened:
            metadata = ((SESSION_METADATA, token.hex()),)
            try:
                self._channel.unary_unary(f"/{CLOSE}")(b"", timeout=ANSWER_SECONDS_MAX, metadata=metadata)
            except grpc.RpcError:
                continue  # It has ended already: that is as good.
        self._channel.close()


def first(stream: Iterator[Any]) -> None:
    """Read one message of a stream that may have none."""
    next(stream, None)
