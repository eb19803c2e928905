"""``kvctl why``: which block of a prompt was the first to miss, and why."""

from __future__ import annotations

from rich.text import Text

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, need
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.match import runs
from kvstore.tools.kvctl.options import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TextOption,
    TokensOption,
    find_namespace,
    whole_keys,
)
from kvstore.tools.kvctl.tokens import TokenSource
from kvstore.tools.output import columns, enum_word
from kvstore.v1 import admin_pb2, common_pb2


def why(
    call: Call,
    keys: KeysArgument = None,
    tokens: TokensOption = "",
    text_: TextOption = "",
    model: ModelOption = "",
    namespace: NamespaceOption = "",
) -> Exit:
    """Why a prompt would miss.

    Walks its blocks from the start on and explains the first that is not here. Exits with 1 unless every block is here.
    """
    info = find_namespace(call, namespace)
    request, source = admin_pb2.WhyRequest(namespace_id=info.namespace_id), TokenSource(tokens, text_, model)
    if keys:
        source.refuse_beside_keys()
        request.keys = b"".join(whole_keys(call, info, keys))
    else:
        given = source.read()
        wanted = info.spec.block_tokens
        need(len(given) >= wanted, "--tokens", f"{len(given)} tokens", f"{wanted} at least, one whole block")
        request.token_ids.extend(given)
    answer = call.ask("Admin/Why", request, admin_pb2.WhyResponse)
    complete = answer.matched == answer.blocks
    printer = call.printer
    if not printer.for_people:
        printer.answer(answer)
        return Exit.OK if complete else Exit.NO
    printer.table(columns(">Blocks|>Count|Tiers"), runs(answer.residency))
    if answer.matched:
        printer.line()
    if complete:
        printer.line(
            Text(
                "The one block is here." if answer.blocks == 1 else f"All {answer.blocks:,} blocks are here.",
                style="green",
            )
        )
        return Exit.OK
    reason = enum_word(common_pb2.Reason.DESCRIPTOR, answer.reason).replace("_", " ")
    when = f", {text.duration(answer.seconds_ago)} ago" if answer.seconds_ago else ""
    printer.line(
        Text.assemble(
            f"Block {answer.matched} of {answer.blocks} ({text.short_key(answer.key)}) is a miss: ",
            (f"{reason}{when}", "bold yellow"),
        )
    )
    if answer.explanation:
        printer.line(answer.explanation)
    for near in answer.near:
        printer.line(
            f"Namespace {text.short_key(near.namespace_id)} differs in {', '.join(near.fields)} "
            f"and has {text.plural(near.blocks, 'block')}."
        )
    return Exit.NO
