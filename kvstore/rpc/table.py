"""The table of methods that transports are made from: the data verbs (``kvstore.wire.verbs``, whose rows both ends
share), and here the rows of sessions and of operators, which only the daemon has.

Stream methods (Read, Write, Subscribe) are in ``streams.py``; they are gRPC only, since same-host clients
have shared memory.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.message import Message

from kvstore.rpc import handlers_admin as admin
from kvstore.rpc import handlers_inspect as inspect
from kvstore.rpc import handlers_session as session
from kvstore.v1 import admin_pb2, inspect_pb2, session_pb2
from kvstore.wire.verbs import VERBS, Method, Runs

Handler = Callable[[Any, Any], Message]


def _admin(name: str, handler: Handler, runs: Runs = Runs.ADMIN) -> Method:
    module = admin_pb2 if hasattr(admin_pb2, f"{name}Request") else inspect_pb2
    request, reply = getattr(module, f"{name}Request"), getattr(module, f"{name}Response")
    return Method(
        name=f"kvstore.v1.Admin/{name}",
        request=request,
        reply=reply,
        serve=handler,
        runs=runs,
        admin=True,
        session=False,
    )


def _session(name: str, handler: Handler, *, opened: bool = True, runs: Runs = Runs.INLINE) -> Method:
    request, reply = getattr(session_pb2, f"{name}Request"), getattr(session_pb2, f"{name}Response")
    return Method(
        name=f"kvstore.v1.Sessions/{name}", request=request, reply=reply, serve=handler, session=opened, runs=runs
    )


OTHERS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        _session("OpenRemote", session.open_remote, opened=False),
        _session("Keepalive", session.keepalive),
        # It gives back all that the session has.
        _session("CloseRemote", session.close_remote, runs=Runs.WORK),
        _admin("Status", admin.status, Runs.INLINE),
        _admin("ListNamespaces", admin.list_namespaces),
        _admin("ListBlocks", admin.list_blocks),
        _admin("ShowBlock", admin.show_block),
        _admin("Why", admin.why),
        _admin("Explain", inspect.explain),
        _admin("Tree", inspect.tree),
        _admin("Forget", inspect.forget),
        _admin("Trace", inspect.trace),
        _admin("Evict", admin.evict),
        _admin("Pin", admin.pin, Runs.INLINE),
        _admin("Unpin", admin.unpin, Runs.INLINE),
        _admin("ListLeases", admin.list_leases),
        _admin("Verify", admin.verify),
        _admin("Drain", admin.drain),
        _admin("Compact", admin.compact),
        _admin("DiskUsage", admin.disk_usage),
        _admin("ListQuarantine", admin.list_quarantine),
    )
}

METHODS: Final[Mapping[str, Method]] = ChainMap(VERBS, OTHERS)
"""Every unary method by full name, as it stands in a gRPC path without the first slash. Verbs may be added."""
