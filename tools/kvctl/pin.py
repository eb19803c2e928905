"""``kvctl pin``: keep blocks from being dropped, under a name."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import (
    KeysArgument,
    ModelOption,
    NamespaceOption,
    TextOption,
    TokensOption,
    asked_keys,
    find_namespace,
)
from kvstore.tools.kvctl.tokens import TokenSource
from kvstore.v1 import admin_pb2, common_pb2


def pin(  # noqa: PLR0913, PLR0917 - an option each
    call: Call,
    name: Annotated[str, typer.Argument(help="Name of the pin, for kvctl unpin and kvctl leases.")],
    keys: KeysArgument = None,
    tokens: TokensOption = "",
    text_: TextOption = "",
    model: ModelOption = "",
    namespace: NamespaceOption = "",
) -> Exit:
    """Keep blocks from being dropped, under a name.

    They stay until kvctl unpin NAME, or until the daemon ends. Exits with 1 if a block is not here.
    """
    info = find_namespace(call, namespace)
    wanted, _ = asked_keys(call, info, keys, TokenSource(tokens, text_, model))
    request = admin_pb2.PinRequest(namespace_id=info.namespace_id, keys=b"".join(wanted), name=name)
    answer = call.ask("Admin/Pin", request, admin_pb2.PinResponse)
    pinned = sum(outcome == common_pb2.OUTCOME_HIT for outcome in answer.outcomes)
    if call.printer.for_people:
        call.printer.line(f"{pinned} of {text.plural(len(wanted), 'block')} pinned as {name}")
        if pinned < len(wanted):
            call.printer.talk("the others are not resident")
    else:
        call.printer.answer(answer)
    return Exit.OK if pinned == len(wanted) else Exit.NO
