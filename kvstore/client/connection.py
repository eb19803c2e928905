"""What a connection is to the client, whatever carries it: calls with deadlines, and jobs that end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvstore.client.handshake import Welcome


class Connection(Protocol):
    """One session. Once ``closed`` it never works again; the client makes a new one."""

    welcome: Welcome
    pushes: bool
    """Whether ends of jobs are pushed; else the client asks with WaitJob."""

    @property
    def closed(self) -> bool:
        """Whether the daemon or the transport has gone."""

    def call(self, method: str, payload: bytes, timeout_s: float) -> bytes:
        """Send one request and return the reply's bytes. Raises domain errors, DeadlineExceeded after ``timeout_s``."""

    def send(self, method: str, payload: bytes, timeout_s: float) -> int:
        """Send a request without waiting; its reply is taken with ``wait`` or dropped with ``forget``."""

    def wait(self, call_id: int, method: str, timeout_s: float) -> bytes:
        """Wait for the reply of ``send``."""

    def forget(self, call_id: int) -> None:
        """Drop the reply of ``send`` when it comes."""

    def pump(self) -> None:
        """Take in the ends of jobs that are there already. Does not block."""

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Take in ends of jobs until ``ready()``, or the time is over, or the connection has ended."""

    def fileno(self) -> int:
        """A descriptor that is readable when ``pump`` may find something."""

    def close(self) -> None:
        """End the session. Idempotent."""


class StreamConnection(Connection, Protocol):
    """A connection that also carries streams: gRPC."""

    def stream(self, method: str, payload: bytes, timeout_s: float) -> Iterator[bytes]:
        """Messages of a server stream."""

    def upload(self, method: str, payloads: Iterable[bytes], timeout_s: float) -> bytes:
        """Send a client stream and return its reply."""
