"""``kvctl show``: all that is known of one block."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import NamespaceOption, find_namespace, tier_letters
from kvstore.tools.kvctl.tokens import parse_keys
from kvstore.v1 import admin_pb2


def show(
    call: Call,
    key: Annotated[str, typer.Argument(help="The block's key in hexadecimal, whole or the first digits.")],
    namespace: NamespaceOption = "",
) -> Exit:
    """All that is known of one block.

    Where its copies lie, who keeps it, when it was used last.
    """
    (prefix,) = parse_keys([key])
    info = find_namespace(call, namespace)
    request = admin_pb2.ShowBlockRequest(namespace_id=info.namespace_id, key_prefix=prefix)
    answer = call.ask("Admin/ShowBlock", request, admin_pb2.ShowBlockResponse)
    if not call.printer.for_people:
        call.printer.answer(answer)
        return Exit.OK
    block = answer.block
    call.printer.facts(
        [
            ("key", block.key.hex()),
            ("parent", block.parent.hex() if any(block.parent) else "none: the first block of its chain"),
            ("namespace", f"{info.name or info.spec.model} ({block.namespace_id.hex()})"),
            ("tiers", tier_letters(block.residency)),
            *((f"  {name}", _place(name, block.places[name])) for name in sorted(block.places)),
            ("state", block.state),
            ("codec", block.codec),
            ("pins", f"{block.pins} in place, {block.holds} held by leases"),
            ("children", str(block.children)),
            ("used", f"{text.plural(block.hits, 'time')}, last {text.duration(block.idle_seconds)} ago"),
        ]
    )
    return Exit.OK


def _place(tier: str, place: str) -> str:
    """A place as a sentence: a bare number is an offset in an arena, on SSD the tier's handle of the block."""
    if not place.isdigit():
        return place
    return f"handle {place}" if tier == "SSD" else f"offset {text.count(int(place))}"
