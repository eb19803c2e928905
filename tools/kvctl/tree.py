"""``kvctl tree``: what a namespace holds as a tree of prefixes, the most used first."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import find_namespace, namespace_label, tier_letters
from kvstore.tools.output import columns
from kvstore.v1 import inspect_pb2

NODES_MAX = 1000


def tree(
    call: Call,
    namespace: Annotated[str, typer.Argument(help="Name, model or start of the id; not needed for the only one.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-l", help="At most this many rows.", min=1, max=NODES_MAX)] = 40,
) -> Exit:
    """Prefixes as a tree: what is shared, how large, how hot.

    A row is a run of blocks without a branch. Blocks and Size count all that hangs below it, Hits its last block.
    """
    need(1 <= limit <= NODES_MAX, "--limit", limit, f"1 to {NODES_MAX}")
    info = find_namespace(call, namespace)
    request = inspect_pb2.TreeRequest(namespace_id=info.namespace_id, limit=limit)
    answer = call.ask("Admin/Tree", request, inspect_pb2.TreeResponse)
    printer = call.printer
    if not printer.for_people:
        printer.answer(answer)
        return Exit.OK
    printer.line(Text(f"{namespace_label(info)}: {text.plural(answer.blocks, 'block')}", style="bold"))
    if answer.nodes:
        printer.line()
    tokens = info.spec.block_tokens
    rows = [
        (
            branch + text.short_key(node.key)[:8],
            text.count(node.blocks * tokens),
            text.count(node.total_blocks),
            text.size(node.total_bytes),
            text.count(node.hits),
            text.duration(node.idle_seconds),
            tier_letters(node.residency),
        )
        for branch, node in zip(branches([node.level for node in answer.nodes]), answer.nodes, strict=True)
    ]
    printer.table(columns("Prefix|>Tokens|>Blocks|>Size|>Hits|?>Idle|?Tiers"), rows)
    hidden = answer.hidden + sum(node.hidden for node in answer.nodes)
    if hidden:
        printer.talk(f"{hidden:,} more {'branch' if hidden == 1 else 'branches'}: --limit shows them", style="dim")
    return Exit.OK


def branches(levels: list[int]) -> list[str]:
    """The lines before each row of a tree, from the levels of its rows in order."""
    drawn = []
    for at, level in enumerate(levels):
        parts = []
        for above in range(1, level + 1):
            # Whether another row of this level follows below the same parent.
            more = next((later == above for later in levels[at + 1 :] if later <= above), False)
            last = above == level
            parts.append(("├─ " if more else "└─ ") if last else ("│  " if more else "   "))
        drawn.append("".join(parts))
    return drawn
