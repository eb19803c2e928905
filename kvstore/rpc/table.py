"""The table of methods: name, messages, handler, where it runs, what it needs. Transports are made from it.

Stream methods (Read, Write, Subscribe) are in ``streams.py``; they are gRPC only, since same-host clients
have shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from google.protobuf.message import Message

from kvstore.rpc import handlers_admin as admin
from kvstore.rpc import handlers_cache as cache
from kvstore.rpc import handlers_lease as lease
from kvstore.rpc.context import CallContext
from kvstore.v1 import admin_pb2, cache_pb2, leases_pb2, session_pb2

Handler = Callable[[CallContext, Any], Message | Callable[[], Message]]
"""Returns the reply, or (inline ones only) what waits for it, to be called in the pool for waits."""


class Runs(Enum):
    """Where a handler runs."""

    INLINE = "on the event loop: bookkeeping that takes microseconds"
    WORK = "in the pool for copies, encodes and disk I/O"
    WAIT = "in the pool for calls that mostly wait, so that they never keep work from a thread"
    ADMIN = "in the pool for operators' calls, which may take minutes and end with their caller"


@dataclass(frozen=True, slots=True)
class Method:
    """One unary method. ``runs`` looks at the request, since some block only if they are asked to wait."""

    name: str
    request: type[Message]
    response: type[Message]
    handler: Handler
    runs: Callable[[Any], Runs]
    admin: bool = False
    session: bool = True

    @property
    def service(self) -> str:
        """Full name of the service."""
        return self.name.partition("/")[0]


def _inline(_request: Message) -> Runs:
    return Runs.INLINE


def _work(_request: Message) -> Runs:
    return Runs.WORK


def _wait(_request: Message) -> Runs:
    return Runs.WAIT


def _admin(_request: Message) -> Runs:
    return Runs.ADMIN


def _wait_job_runs(request: cache_pb2.WaitJobRequest) -> Runs:
    return Runs.WAIT if request.timeout_ms else Runs.INLINE


def _service(service: str, module: object, rows: list[tuple[str, Handler, Callable[[Any], Runs]]]) -> list[Method]:
    methods = []
    for name, handler, runs in rows:
        request, response = getattr(module, f"{name}Request"), getattr(module, f"{name}Response", None)
        if response is None:
            response = cache_pb2.FetchResponse
        methods.append(
            Method(
                f"kvstore.v1.{service}/{name}",
                request,
                response,
                handler,
                runs,
                admin=service == "Admin",
                session=service in ("Cache", "Leases") or name in ("Keepalive", "CloseRemote"),
            )
        )
    return methods


METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in [
        *_service(
            "Cache",
            cache_pb2,
            [
                ("OpenNamespace", cache.open_namespace, _work),
                ("Match", cache.match, _inline),
                ("Reserve", cache.reserve, _inline),
                ("Commit", cache.commit, _work),
                ("Abort", cache.abort, _inline),
                ("Fetch", cache.fetch, _inline),
                ("WaitJob", cache.wait_job, _wait_job_runs),
                ("Prefetch", cache.prefetch, _inline),
                ("Remove", cache.remove, _inline),
                ("Flush", cache.flush, _wait),
            ],
        ),
        *_service(
            "Leases",
            leases_pb2,
            [
                ("GrantLease", lease.grant_lease, _inline),
                ("RenewLease", lease.renew_lease, _inline),
                ("HoldLease", lease.hold_lease, _inline),
                ("ReleaseLease", lease.release_lease, _inline),
            ],
        ),
        *_service(
            "Sessions",
            session_pb2,
            [
                ("OpenRemote", lease.open_remote, _inline),
                ("Keepalive", lease.keepalive, _inline),
                ("CloseRemote", lease.close_remote, _inline),
            ],
        ),
        *_service(
            "Admin",
            admin_pb2,
            [
                ("Status", admin.status, _inline),
                ("ListNamespaces", admin.list_namespaces, _admin),
                ("ListBlocks", admin.list_blocks, _admin),
                ("ShowBlock", admin.show_block, _admin),
                ("Why", admin.why, _admin),
                ("Evict", admin.evict, _admin),
                ("Pin", admin.pin, _inline),
                ("Unpin", admin.unpin, _inline),
                ("ListLeases", admin.list_leases, _inline),
                ("Verify", admin.verify, _admin),
                ("Drain", admin.drain, _admin),
                ("Compact", admin.compact, _admin),
                ("DiskUsage", admin.disk_usage, _admin),
                ("ListQuarantine", admin.list_quarantine, _admin),
            ],
        ),
    ]
}
"""Every unary method by full name, as it stands in a gRPC path without the first slash."""
