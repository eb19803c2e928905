"""Handlers of the admin service: reports of the store as messages."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from kvstore.core.errors import InvalidArgument
from kvstore.core.types import KEY_BYTES, NamespaceId, Tier
from kvstore.rpc.context import CallContext
from kvstore.store.report import BlockReport, NamespaceReport, TierReport
from kvstore.v1 import admin_pb2
from kvstore.wire import messages as convert
from kvstore.wire.verbs.checks import name_of

LIST_MAX = 1000
"""Most blocks in one page."""

LIST_BYTES_MAX = 1 << 20
"""Most bytes in one page of namespaces, whose specs are of any size: a quarter of what a message may have."""

LIST_DEFAULT = 100
WHY_TOKENS_MAX = 1 << 20
DRAIN_MS_DEFAULT = 30_000
DRAIN_MS_MAX = 600_000


def fill(message: Message, value: object, *, skip: Iterable[str] = ()) -> None:
    """Copy the plain fields of ``value`` that the message has under the same name."""
    left_out = set(skip)
    for field in message.DESCRIPTOR.fields:
        if field.name not in left_out and hasattr(value, field.name):
            setattr(message, field.name, getattr(value, field.name))


def status(ctx: CallContext, _request: admin_pb2.StatusRequest) -> admin_pb2.StatusResponse:
    """Admin/Status."""
    report = ctx.store.status()
    reply = admin_pb2.StatusResponse(version=ctx.services.version, pid=ctx.services.pid)
    fill(reply, report, skip=("tiers", "recovery", "counters", "warnings", "version", "pid"))
    fill(reply.recovery, report.recovery)
    reply.tiers.extend(_tier_message(tier) for tier in report.tiers)
    reply.counters.update(report.counters)
    reply.counters.update(ctx.services.counters())
    reply.warnings.extend(report.warnings)
    return reply


def _tier_message(report: TierReport) -> admin_pb2.TierStatus:
    message = admin_pb2.TierStatus()
    fill(message, report)
    return message


def list_namespaces(ctx: CallContext, request: admin_pb2.ListNamespacesRequest) -> admin_pb2.ListNamespacesResponse:
    """Admin/ListNamespaces: a page ends where the next namespace would make it larger than LIST_BYTES_MAX."""
    try:
        after = bytes.fromhex(request.page_token)
    except ValueError as error:
        expected = "the next_page_token of the page before"
        raise InvalidArgument("page_token", repr(request.page_token[:80]), expected) from error
    left = sorted((n for n in ctx.store.namespaces() if n.namespace_id > after), key=lambda n: n.namespace_id)
    reply, nbytes = admin_pb2.ListNamespacesResponse(), 0
    for report in left:
        message = _namespace_message(report)
        nbytes += message.ByteSize()
        if reply.namespaces and nbytes > LIST_BYTES_MAX:
            reply.next_page_token = reply.namespaces[-1].namespace_id.hex()
            break
        reply.namespaces.append(message)
    return reply


def _namespace_message(report: NamespaceReport) -> admin_pb2.NamespaceInfo:
    return admin_pb2.NamespaceInfo(
        namespace_id=report.namespace_id,
        name=report.name,
        spec=convert.spec_message(report.spec),
        policy=convert.policy_message(report.policy),
        layout=convert.layout_message(report.layout),
        blocks=report.blocks,
        blocks_by_tier=report.blocks_by_tier,
        saved_bytes=report.saved_bytes,
    )


def list_blocks(ctx: CallContext, request: admin_pb2.ListBlocksRequest) -> admin_pb2.ListBlocksResponse:
    """Admin/ListBlocks."""
    if request.limit > LIST_MAX:
        raise InvalidArgument("limit", request.limit, f"at most {LIST_MAX}; page with page_token")
    page = ctx.store.list_blocks(
        namespace_id=_namespace(request.namespace_id),
        tier=convert.enum_of("tier", request.tier, Tier) if request.tier else None,
        limit=request.limit or LIST_DEFAULT,
        page_token=request.page_token,
    )
    return admin_pb2.ListBlocksResponse(
        blocks=[_block_message(block) for block in page.blocks], next_page_token=page.next_page_token
    )


def _block_message(report: BlockReport) -> admin_pb2.BlockInfo:
    message = admin_pb2.BlockInfo(codec=report.codec.word)
    fill(message, report, skip=("places", "codec"))
    message.places.update(report.places)
    return message


def show_block(ctx: CallContext, request: admin_pb2.ShowBlockRequest) -> admin_pb2.ShowBlockResponse:
    """Admin/ShowBlock."""
    if not 4 <= len(request.key_prefix) <= KEY_BYTES:
        raise InvalidArgument("key_prefix", f"{len(request.key_prefix)} bytes", f"4 to {KEY_BYTES} bytes")
    report = ctx.store.show_block(request.key_prefix, namespace_id=_namespace(request.namespace_id))
    return admin_pb2.ShowBlockResponse(block=_block_message(report))


def why(ctx: CallContext, request: admin_pb2.WhyRequest) -> admin_pb2.WhyResponse:
    """Admin/Why."""
    namespace = convert.namespace_of(request.namespace_id)
    if bool(request.token_ids) == bool(request.keys):
        held = f"{len(request.token_ids)} tokens with {len(request.keys)} bytes of keys"
        raise InvalidArgument("token_ids", held, "either token_ids or keys")
    if len(request.token_ids) > WHY_TOKENS_MAX:
        raise InvalidArgument("token_ids", f"{len(request.token_ids)} tokens", f"at most {WHY_TOKENS_MAX}")
    keys = convert.keys_of(request.keys, empty=True)
    report = ctx.store.why(namespace, token_ids=request.token_ids, keys=keys)
    reply = admin_pb2.WhyResponse(residency=report.residency, near=convert.near_messages(report.near))
    fill(reply, report, skip=("residency", "near"))
    return reply


def evict(ctx: CallContext, request: admin_pb2.EvictRequest) -> admin_pb2.EvictResponse:
    """Admin/Evict."""
    if bool(request.keys) == bool(request.bytes):
        held = f"{request.bytes} with {len(request.keys)} bytes of keys"
        raise InvalidArgument("bytes", held, "either keys, or the bytes to free")
    report = ctx.store.evict(
        convert.enum_of("tier", request.tier, Tier),
        namespace_id=_namespace(request.namespace_id, needed=bool(request.keys)),
        keys=convert.keys_of(request.keys, empty=True),
        nbytes=request.bytes,
        stop=ctx.gone.is_set,
    )
    return admin_pb2.EvictResponse(
        blocks=report.blocks,
        bytes=report.bytes,
        outcomes=report.outcomes,  # type: ignore[arg-type]
        kept=report.kept,
        kept_bytes=report.kept_bytes,
    )


def pin(ctx: CallContext, request: admin_pb2.PinRequest) -> admin_pb2.PinResponse:
    """Admin/Pin."""
    name = name_of("name", request.name, empty=False)
    outcomes = ctx.store.pin(name, convert.namespace_of(request.namespace_id), convert.keys_of(request.keys))
    return admin_pb2.PinResponse(outcomes=outcomes)  # type: ignore[arg-type]


def unpin(ctx: CallContext, request: admin_pb2.UnpinRequest) -> admin_pb2.UnpinResponse:
    """Admin/Unpin."""
    name = name_of("name", request.name, empty=False)
    keys = convert.keys_of(request.keys, empty=True)
    namespace = _namespace(request.namespace_id, needed=bool(keys))
    return admin_pb2.UnpinResponse(released=ctx.store.unpin(name, namespace, keys))


def list_leases(ctx: CallContext, request: admin_pb2.ListLeasesRequest) -> admin_pb2.ListLeasesResponse:
    """Admin/ListLeases: a page ends where the next entry would make it larger than LIST_BYTES_MAX."""
    told = request.page_token or "0"
    if not (told.isascii() and told.isdecimal()) or len(told) > 9:
        raise InvalidArgument("page_token", repr(told[:80]), "the next_page_token of the page before")
    reply, nbytes, begin = admin_pb2.ListLeasesResponse(), 0, int(told)
    leases, sessions = ctx.store.leases(), ctx.store.sessions()
    for place in range(begin, len(leases) + len(sessions)):
        into, report = (
            (reply.leases, leases[place]) if place < len(leases) else (reply.sessions, sessions[place - len(leases)])
        )
        entry = into.add()
        fill(entry, report)
        nbytes += entry.ByteSize()
        if nbytes > LIST_BYTES_MAX and place > begin:
            del into[-1]
            reply.next_page_token = str(place)
            break
    return reply


def verify(ctx: CallContext, request: admin_pb2.VerifyRequest) -> admin_pb2.VerifyResponse:
    """Admin/Verify."""
    keys = convert.keys_of(request.keys, empty=True)
    report = ctx.store.verify(
        namespace_id=_namespace(request.namespace_id, needed=bool(keys)),
        keys=keys,
        bytes_per_second=request.bytes_per_second,
        stop=ctx.gone.is_set,
    )
    reply = admin_pb2.VerifyResponse(bad_keys=report.bad_keys)
    fill(reply, report, skip=("bad_keys",))
    return reply


def drain(ctx: CallContext, request: admin_pb2.DrainRequest) -> admin_pb2.DrainResponse:
    """Admin/Drain."""
    if request.timeout_ms > DRAIN_MS_MAX:
        raise InvalidArgument("timeout_ms", request.timeout_ms, f"at most {DRAIN_MS_MAX} ms")
    timeout_ms = request.timeout_ms or DRAIN_MS_DEFAULT
    report = ctx.store.drain(resume=request.resume, timeout_ms=timeout_ms, stop=ctx.gone.is_set)
    reply = admin_pb2.DrainResponse()
    fill(reply, report)
    return reply


def compact(ctx: CallContext, request: admin_pb2.CompactRequest) -> admin_pb2.CompactResponse:
    """Admin/Compact."""
    if not 0.0 <= request.fragmentation <= 1.0:
        raise InvalidArgument("fragmentation", request.fragmentation, "0 to 1; 0 takes the configured one")
    reply = admin_pb2.CompactResponse()
    fill(reply, ctx.store.compact(request.fragmentation, ctx.gone.is_set))
    return reply


def disk_usage(ctx: CallContext, _request: admin_pb2.DiskUsageRequest) -> admin_pb2.DiskUsageResponse:
    """Admin/DiskUsage."""
    usage = ctx.store.disk_usage()
    reply = admin_pb2.DiskUsageResponse()
    fill(reply, usage)
    for segment in ctx.store.segments():
        fill(reply.segments.add(), segment)
    return reply


def list_quarantine(ctx: CallContext, request: admin_pb2.ListQuarantineRequest) -> admin_pb2.ListQuarantineResponse:
    """Admin/ListQuarantine."""
    reply = admin_pb2.ListQuarantineResponse(emptied=request.empty)
    for entry in ctx.store.quarantine(empty=request.empty):
        fill(reply.entries.add(), entry)
    return reply


def _namespace(data: bytes, *, needed: bool = False) -> NamespaceId | None:
    return convert.namespace_of(data) if data or needed else None
