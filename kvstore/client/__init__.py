"""The client: one session with a daemon, synchronous or asyncio, meeting ``kvstore.cache.Cache``.

It must not know arenas' insides, disks or models, and imports grpc only when a gRPC transport is used. Names are
loaded when they are first asked for, so that admin tools start without numpy. Read ``steps.py`` and ``flows.py`` first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.client.aio import AsyncClient
    from kvstore.client.copying import aligned_buffer
    from kvstore.client.engine import EngineClient
    from kvstore.client.flow_put import Staged
    from kvstore.client.options import ClientOptions, Control, Credentials
    from kvstore.client.payloads import BlockView, GotBlocks, PutBlocks
    from kvstore.client.pieces import Pieces, Pointer
    from kvstore.client.state import Backoff, Completion
    from kvstore.client.sync import Client
    from kvstore.client.transfers import Found, Transfer
    from kvstore.wire.paths import default_socket

__all__ = [
    "AsyncClient",
    "Backoff",
    "BlockView",
    "Client",
    "ClientOptions",
    "Completion",
    "Control",
    "Credentials",
    "EngineClient",
    "Found",
    "GotBlocks",
    "Pieces",
    "Pointer",
    "PutBlocks",
    "Staged",
    "Transfer",
    "aligned_buffer",
    "default_socket",
]

_HOMES = {
    "AsyncClient": "kvstore.client.aio",
    "Backoff": "kvstore.client.state",
    "BlockView": "kvstore.client.payloads",
    "Client": "kvstore.client.sync",
    "ClientOptions": "kvstore.client.options",
    "Completion": "kvstore.client.state",
    "Control": "kvstore.client.options",
    "Credentials": "kvstore.client.options",
    "EngineClient": "kvstore.client.engine",
    "Found": "kvstore.client.transfers",
    "GotBlocks": "kvstore.client.payloads",
    "Pieces": "kvstore.client.pieces",
    "Pointer": "kvstore.client.pieces",
    "PutBlocks": "kvstore.client.payloads",
    "Staged": "kvstore.client.flow_put",
    "Transfer": "kvstore.client.transfers",
    "aligned_buffer": "kvstore.client.copying",
    "default_socket": "kvstore.wire.paths",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(home), name)
