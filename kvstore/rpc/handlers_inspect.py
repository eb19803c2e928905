"""Handlers of the admin service that look into a cache, and Forget; the messages of ``inspect.proto``."""

from __future__ import annotations

from typing import Final

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES
from kvstore.rpc.context import CallContext
from kvstore.rpc.handlers_admin import fill
from kvstore.v1 import inspect_pb2
from kvstore.wire import messages as convert

TREE_NODES_MAX: Final = 1000
TREE_NODES: Final = 40
FORGET_MAX: Final = 65_536
FORGET_DEFAULT: Final = 4096


def explain(ctx: CallContext, request: inspect_pb2.ExplainRequest) -> inspect_pb2.ExplainResponse:
    """Admin/Explain."""
    if not 4 <= len(request.key_prefix) <= KEY_BYTES:
        raise InvalidArgument("key_prefix", f"{len(request.key_prefix)} bytes", f"4 to {KEY_BYTES} bytes")
    report = ctx.store.explain(convert.namespace_of(request.namespace_id), request.key_prefix)
    reply = inspect_pb2.ExplainResponse()
    fill(reply, report, skip=("copies", "keepers"))
    for copy in report.copies:
        message = reply.copies.add(kept=copy.kept)
        fill(message, copy, skip=("kept",))
    for keeper in report.keepers:
        fill(reply.keepers.add(), keeper)
    return reply


def tree(ctx: CallContext, request: inspect_pb2.TreeRequest) -> inspect_pb2.TreeResponse:
    """Admin/Tree."""
    if request.limit > TREE_NODES_MAX:
        raise InvalidArgument("limit", request.limit, f"at most {TREE_NODES_MAX}")
    report = ctx.store.tree(convert.namespace_of(request.namespace_id), request.limit or TREE_NODES)
    reply = inspect_pb2.TreeResponse(blocks=report.blocks, hidden=report.hidden)
    for node in report.nodes:
        fill(reply.nodes.add(bytes_by_tier=node.bytes_by_tier), node, skip=("bytes_by_tier",))
    return reply


def forget(ctx: CallContext, request: inspect_pb2.ForgetRequest) -> inspect_pb2.ForgetResponse:
    """Admin/Forget."""
    if request.limit > FORGET_MAX:
        raise InvalidArgument("limit", request.limit, f"at most {FORGET_MAX}")
    namespace = convert.namespace_of(request.namespace_id)
    report = ctx.store.forget(namespace, request.limit or FORGET_DEFAULT, ctx.gone.is_set)
    reply = inspect_pb2.ForgetResponse()
    fill(reply, report)
    return reply


def trace(ctx: CallContext, request: inspect_pb2.TraceRequest) -> inspect_pb2.TraceResponse:
    """Admin/Trace."""
    report = ctx.store.trace(request.after_sequence)
    reply = inspect_pb2.TraceResponse(sequence=report.sequence, lost=report.lost)
    for entry in report.entries:
        fill(reply.entries.add(prefix_ids=entry.prefix_ids), entry, skip=("prefix_ids",))
    return reply
