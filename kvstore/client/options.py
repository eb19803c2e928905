"""What a client is told. Nothing here reads files or the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvstore.client.state import Backoff
from kvstore.core.errors import InvalidArgument

GRPC_PREFIX = "grpc://"


class Control(Enum):
    """How a same-host client carries its calls."""

    SOCKET = "socket"
    """Over the session socket: the fast path."""
    GRPC = "grpc"
    """Over gRPC on the daemon's Unix socket; memory still comes over the session socket."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Credentials:
    """How a client of a ``grpc://`` target proves who it is, and what proves the daemon to it.

    ``token`` is what the daemon's policy knows. ``ca`` are the PEM roots of the daemon's certificate (empty: those that
    gRPC comes with), ``cert`` and ``key`` the client's own for mutual TLS. ``tls`` False sends the token in plain text:
    for a daemon on loopback.
    """

    token: str = ""
    ca: bytes = b""
    cert: bytes = b""
    key: bytes = b""
    tls: bool = True

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            raise InvalidArgument("credentials.cert", "without its key, or a key without it", "both or neither")
        if self.token and (not self.token.isascii() or not self.token.isprintable()):
            raise InvalidArgument("credentials.token", "not shown", "printable ASCII")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Settings of a client.

    ``strict`` false (the default) means that a cache failure never raises into the caller: the answer is that of an
    empty, full cache, and the failure is counted and logged. Errors in the caller's program raise always.
    """

    name: str = "client"
    buffer_bytes: int = 64 << 20
    """Size of the private buffer: what is written or read into it at one time. 0 maps no memory at all."""
    device: bool = True
    """Map the DEVICE arena, if the daemon has one and ``buffer_bytes`` is not 0."""
    strict: bool = False
    control: Control = Control.SOCKET
    timeout_s: float = 10.0
    """Deadline of a call, beyond what the call itself was asked to wait."""
    connect_timeout_s: float = 10.0
    job_timeout_s: float = 60.0
    """A job (of ``fetch`` or ``prefetch``) that has not ended by then ends as misses, whatever the daemon does."""
    lease_ttl_ms: int = 60_000
    """Time to live of the leases that put and get use themselves."""
    lossless: bool = True
    """Take and send chunks of streams coded, in namespaces whose policy asks for that. Without it they are plain."""
    copy_threads: int = 2
    """Threads that copy in put and get, the caller's included."""
    remote_ttl_ms: int = 30_000
    """How long a remote session outlives its last keepalive."""
    backoff: Backoff = field(default_factory=Backoff)
    credentials: Credentials | None = None
    """For a ``grpc://`` target: TLS and a bearer token. None connects in plain text, which daemons take on loopback."""

    def __post_init__(self) -> None:
        if self.buffer_bytes < 0:
            raise InvalidArgument("buffer_bytes", self.buffer_bytes, "0 or more")
        for name in ("timeout_s", "connect_timeout_s", "job_timeout_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise InvalidArgument(name, getattr(self, name), "above 0, at most 3600 seconds")
        if not 1 <= self.copy_threads <= 64:
            raise InvalidArgument("copy_threads", self.copy_threads, "1 to 64")


@dataclass(frozen=True, slots=True)
class Target:
    """Where the daemon is: a session socket of this host, or ``grpc://host:port``."""

    text: str
    socket: str = ""
    address: str = ""

    @classmethod
    def parse(cls, target: str | Path) -> Target:
        """Read a target; InvalidArgument if it is neither a path nor a gRPC address."""
        text = str(target)
        if text.startswith(GRPC_PREFIX):
            address = text.removeprefix(GRPC_PREFIX)
            if not address:
                raise InvalidArgument("target", repr(text), "grpc://host:port")
            return cls(text, address=address)
        if not text or "://" in text:
            raise InvalidArgument("target", repr(text), "the path of a session socket, or grpc://host:port")
        return cls(text, socket=text)
