"""Makes the connection that a target and the options ask for. grpc is imported only when it is used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvstore.client.handshake import Hello
from kvstore.client.options import ClientOptions, Control, Target
from kvstore.client.session_connection import SessionConnection
from kvstore.core.errors import InvalidArgument
from kvstore.v1 import session_pb2


def connect(target: Target, options: ClientOptions, on_done: Callable[[session_pb2.JobDone], None]) -> Any:
    """Open a session. Raises Unavailable if there is no daemon, or what it refused with."""
    if target.address:
        return grpc_module("kvstore.client.grpc_connection").RemoteConnection(target.address, options)
    hello = Hello(options.name, options.buffer_bytes, options.device and options.buffer_bytes > 0)
    local = SessionConnection(target.socket, hello, options.connect_timeout_s, on_done)
    if options.control is Control.SOCKET:
        return local
    return grpc_module("kvstore.client.grpc_connection").LocalGrpcConnection(target.socket, local, options)


def grpc_module(name: str) -> Any:
    """A module of this room that imports grpc: a quarter second, which a client on the fast path must not pay for.

    Raises InvalidArgument naming the extra where grpc is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "grpc":
            raise
        expected = "a session socket, or grpc installed (pip install 'tiered-kvstore[grpc]')"
        raise InvalidArgument("target", "gRPC", expected) from error
