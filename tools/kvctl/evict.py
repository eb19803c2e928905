"""``kvctl evict``: make room in a tier, or drop named blocks."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import (
    TIER_NAMES,
    KeysArgument,
    NamespaceOption,
    TierOption,
    find_namespace,
    parse_tier,
    whole_keys,
)
from kvstore.v1 import admin_pb2, common_pb2


def evict(
    call: Call,
    keys: KeysArgument = None,
    tier: TierOption = "",
    nbytes: Annotated[str, typer.Option("--bytes", help="Instead of keys: free this much, such as 64MiB.")] = "",
    namespace: NamespaceOption = "",
) -> Exit:
    """Demote or drop blocks, or make room in a tier.

    Takes the named blocks out of --tier, or the coldest until --bytes of it are free.
    Exits with 4 if a named block is leased, pinned or in flight.
    """
    need(bool(keys) != bool(nbytes), "KEY and --bytes", "both" if keys else "neither", "one of them")
    need(bool(tier), "--tier", "not given", "device, host or ssd")
    request = admin_pb2.EvictRequest(tier=parse_tier(tier))
    if nbytes:
        request.bytes = text.parse_size("--bytes", nbytes)
    else:
        info = find_namespace(call, namespace)
        request.namespace_id = info.namespace_id
        request.keys = b"".join(whole_keys(call, info, keys))
    answer = call.ask("Admin/Evict", request, admin_pb2.EvictResponse)
    busy = sum(outcome == common_pb2.OUTCOME_BUSY for outcome in answer.outcomes)
    if call.printer.for_people:
        left = f"left {TIER_NAMES[request.tier]}"
        call.printer.line(f"{text.plural(answer.blocks, 'block')}, {text.size(answer.bytes)}, {left}")
        if busy:
            call.printer.talk(f"{text.plural(busy, 'block')} stayed: leased, pinned or in flight; see kvctl leases")
    else:
        call.printer.answer(answer)
    return Exit.REFUSED if busy else Exit.OK
