"""Makes the connection that a target and the options ask for. grpc is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvstore.client.handshake import Hello
from kvstore.client.options import ClientOptions, Control, Target
from kvstore.client.session_connection import SessionConnection
from kvstore.v1 import session_pb2


def connect(target: Target, options: ClientOptions, on_done: Callable[[session_pb2.JobDone], None]) -> Any:
    """Open a session. Raises Unavailable if there is no daemon, or what it refused with."""
    if target.address:
        return _grpc().RemoteConnection(target.address, options)
    hello = Hello(options.name, options.buffer_bytes, options.device and options.buffer_bytes > 0)
    local = SessionConnection(target.socket, hello, options.connect_timeout_s, on_done)
    if options.control is Control.SOCKET:
        return local
    return _grpc().LocalGrpcConnection(target.socket, local, options)


def _grpc() -> Any:
    # A module of a quarter second, which a client on the fast path must not pay for.
    return import_module("kvstore.client.grpc_connection")
