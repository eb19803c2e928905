"""``kvctl explain``: why one block is where it is, what keeps it, and what would become of it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.evict import why_it_stays
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import TIER_NAMES, NamespaceOption, find_namespace
from kvstore.tools.kvctl.tokens import parse_keys
from kvstore.tools.output import Printer, enum_word
from kvstore.v1 import common_pb2, inspect_pb2


def explain(
    call: Call,
    key: Annotated[str, typer.Argument(help="The block's key in hexadecimal; whole if the block is gone.")],
    namespace: NamespaceOption = "",
) -> Exit:
    """Why a block is here, who keeps it, and what goes before it.

    For each copy: how many of its tier were used longer ago, and what would become of it if the tier needed room.
    Exits with 1 if the block is not here; then it says when it went, and why.
    """
    (prefix,) = parse_keys([key])
    info = find_namespace(call, namespace)
    request = inspect_pb2.ExplainRequest(namespace_id=info.namespace_id, key_prefix=prefix)
    answer = call.ask("Admin/Explain", request, inspect_pb2.ExplainResponse)
    printer = call.printer
    if not printer.for_people:
        printer.answer(answer)
    elif not answer.copies:
        _gone(printer, answer)
    else:
        _here(printer, answer)
    return Exit.OK if answer.copies else Exit.NO


def _gone(printer: Printer, answer: inspect_pb2.ExplainResponse) -> None:
    why = enum_word(common_pb2.Reason.DESCRIPTOR, answer.reason).replace("_", " ")
    when = f", {text.duration(answer.seconds_ago)} ago" if answer.seconds_ago else ""
    printer.line(f"{text.short_key(answer.key)} is not here: {why}{when}.")


def _here(printer: Printer, answer: inspect_pb2.ExplainResponse) -> None:
    behind = text.plural(answer.children, "block") if answer.children else "no block"
    printer.line(f"{text.full_key(answer.key)}")
    printer.line(
        f"Block {answer.depth} of its chain, {behind} directly behind it; used {text.plural(answer.hits, 'time')}, "
        f"last {text.duration(answer.idle_seconds)} ago."
    )
    for copy in answer.copies:
        tier = TIER_NAMES.get(copy.tier, "?")
        printer.line()
        printer.line(
            f"{tier}: {text.size(copy.bytes)}; {text.count(copy.colder)} of {text.count(copy.of)} blocks there were "
            "used longer ago."
        )
        if copy.fate == "stays":
            printer.line(f"It stays: {why_it_stays(copy.kept)}.")
        elif copy.fate == "demoted":
            printer.line("If room is needed it goes to the next colder tier.")
        else:
            rest = "another copy remains" if len(answer.copies) > 1 else "no other copy remains: it would be a miss"
            printer.line(f"If room is needed it is dropped; {rest}.")
    for keeper in answer.keepers:
        left = f"for {text.duration(keeper.seconds_left)} more" if keeper.seconds_left else "until it is let go"
        who = f"pid {keeper.pid}" if keeper.pid else keeper.owner
        printer.line()
        printer.line(f"Kept by the {'pin' if keeper.kind == 'operator' else 'lease'} {keeper.name!r} of {who}, {left}.")
