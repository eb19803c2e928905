"""``kvctl ls``: the namespaces, or the blocks of one, coldest first."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import (
    PAGE_BLOCKS,
    TierOption,
    all_namespaces,
    block_pages,
    find_namespace,
    parse_tier,
    tier_letters,
)
from kvstore.tools.kvctl.status import saved_of
from kvstore.tools.output import columns, plain
from kvstore.v1 import admin_pb2


def ls(
    call: Call,
    namespace: Annotated[str, typer.Argument(help="List the blocks of this namespace: name, model or id.")] = "",
    tier: TierOption = "",
    limit: Annotated[int, typer.Option("--limit", "-l", help="At most this many blocks; 0 for all.", min=0)] = 40,
) -> Exit:
    """List namespaces; with one, its blocks, coldest first."""
    if not namespace and not tier:
        return _namespaces(call)
    return _blocks(call, namespace, tier, limit)


def _namespaces(call: Call) -> Exit:
    namespaces, printer = all_namespaces(call), call.printer
    if not printer.for_people:
        printer.json({"namespaces": [plain(info) for info in namespaces]})
        return Exit.OK
    rows = []
    for info in namespaces:
        spec, tiers = info.spec, [*info.blocks_by_tier, 0, 0, 0][:3]
        shape = f"{spec.dtype} {spec.layers}x{spec.kv_heads}x{spec.head_dim}"
        if spec.opaque_slice_bytes:
            shape = f"opaque {spec.layers}x{text.size(spec.opaque_slice_bytes)}"
        rows.append(
            (
                text.short_key(info.namespace_id),
                info.name or spec.model,
                f"{shape} {spec.codec}" + (f" raw {','.join(map(str, spec.raw_layers))}" if spec.raw_layers else ""),
                text.count(info.blocks),
                *map(text.count, tiers),
                text.size(info.layout.stored_bytes),
                saved_of(info.saved_bytes),
            )
        )
    printer.table(columns("Id|~Name|?~Shape|?>Blocks|>DEVICE|>HOST|>SSD|?>Each|?>Saved"), rows)
    if not rows:
        printer.talk("no namespace is open, and none has blocks")
    return Exit.OK


def _blocks(call: Call, namespace: str, tier: str, limit: int) -> Exit:
    need(limit >= 0, "--limit", limit, "0 or more")
    request = admin_pb2.ListBlocksRequest(tier=parse_tier(tier), limit=min(limit or PAGE_BLOCKS, PAGE_BLOCKS))
    if namespace:
        request.namespace_id = find_namespace(call, namespace).namespace_id
    blocks: list[admin_pb2.BlockInfo] = []
    for page in block_pages(call, request):
        blocks += page.blocks
        if limit and len(blocks) >= limit:
            break
    more = bool(page.next_page_token) or (limit and len(blocks) > limit)
    shown = blocks[: limit or None]
    if not call.printer.for_people:
        call.printer.json({"blocks": [plain(block) for block in shown], "more": bool(more)})
        return Exit.OK
    titles = columns("Key|?Parent|Tiers|?State|?Codec|>Idle|>Hits|>Pins|>Holds|?>Children")
    call.printer.table(titles, [_row(block) for block in shown])
    if more:
        call.printer.talk(f"the {len(shown)} coldest; --limit 0 lists all", style="dim")
    elif not shown:
        call.printer.talk("no blocks")
    return Exit.OK


def _row(block: admin_pb2.BlockInfo) -> tuple[str, ...]:
    return (
        text.short_key(block.key),
        text.short_key(block.parent),
        tier_letters(block.residency),
        block.state,
        block.codec,
        text.duration(block.idle_seconds),
        text.count(block.hits),
        str(block.pins),
        str(block.holds),
        str(block.children),
    )
