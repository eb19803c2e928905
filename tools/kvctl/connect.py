"""The way to the daemon: a session without memory on its session socket."""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import Message

from kvstore.client.handshake import Hello
from kvstore.client.session_connection import SessionConnection
from kvstore.core.errors import InvalidArgument, Unavailable
from kvstore.v1 import session_pb2

Reply = TypeVar("Reply", bound=Message)

PACKAGE: Final = "kvstore.v1."


class DaemonPort:
    """A session of an admin tool; meets ``command.Port``."""

    def __init__(self, path: str, timeout: float) -> None:
        self._connection = SessionConnection(path, Hello("kvctl"), timeout, _no_jobs)

    def call(self, method: str, request: Message, reply_class: type[Reply], timeout: float) -> Reply:
        """See ``command.Port``."""
        return reply_class.FromString(self._connection.call(PACKAGE + method, request.SerializeToString(), timeout))

    def close(self) -> None:
        """See ``command.Port``."""
        self._connection.close()


def _no_jobs(_done: session_pb2.JobDone) -> None:
    """An admin session starts no jobs, so none ends."""


def connect_daemon(path: str, timeout: float) -> DaemonPort:
    """Open a session; Unavailable where no daemon answers, or something else does."""
    try:
        return DaemonPort(path, timeout)
    except InvalidArgument as error:
        raise Unavailable(f"what answers at {path} is no kvstored: {error.message}", field="--socket") from error
