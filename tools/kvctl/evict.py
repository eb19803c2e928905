"""``kvctl evict``: make room in a tier, or drop named blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

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

_WHY: Final = {
    "pinned": "a reader has it pinned, see kvctl leases",
    "held": "a lease or an operator's pin holds it, see kvctl leases",
    "children": "blocks behind it in its chain lie in this tier: evict those first, or with it",
    "io": "it is being copied",
    "filling": "a copy of it is on its way",
}
"""What the words of ``Kept`` mean."""


def evict(
    call: Call,
    keys: KeysArgument = None,
    tier: TierOption = "",
    nbytes: Annotated[
        str, typer.Option("--bytes", help="Instead of keys: blocks of so many bytes, such as 64MiB.")
    ] = "",
    namespace: NamespaceOption = "",
) -> Exit:
    """Demote or drop blocks, or make room in a tier.

    Takes the named blocks out of --tier, or the coldest ones, --bytes of them.
    Exits with 4 if a named block has to stay; says so if fewer bytes went than were asked for.
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
        for outcome, key, kept in zip(answer.outcomes, _keys(request), answer.kept, strict=False):
            if outcome == common_pb2.OUTCOME_BUSY:
                call.printer.talk(f"{text.short_key(key)} stayed: {why_it_stays(kept.split())}")
        if busy and not answer.kept:
            # A daemon from before it said why.
            call.printer.talk(f"{text.plural(busy, 'block')} stayed: leased, pinned or in flight; see kvctl leases")
        if request.bytes > answer.bytes:
            call.printer.talk(_too_little(request.bytes - answer.bytes, answer.kept_bytes))
    else:
        call.printer.answer(answer)
    return Exit.REFUSED if busy else Exit.OK


def why_it_stays(kept: Sequence[str]) -> str:
    """Reasons of the daemon as one sentence, each with where to look."""
    return "; ".join(_WHY.get(word, word) for word in kept) or "its bytes could not be moved to a colder tier"


def _too_little(missing: int, kept_bytes: int) -> str:
    why = f"{text.size(kept_bytes)} are leased or pinned, see kvctl leases" if kept_bytes else "no more may go now"
    return f"{text.size(missing)} less than asked: {why}"


def _keys(request: admin_pb2.EvictRequest) -> list[bytes]:
    return [request.keys[begin : begin + 32] for begin in range(0, len(request.keys), 32)]
