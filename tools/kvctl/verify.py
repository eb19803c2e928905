"""``kvctl verify``: read blocks back and compare their checksums."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import KeysArgument, NamespaceOption, find_namespace, whole_keys
from kvstore.v1 import admin_pb2


@slow(3600.0)
def verify(
    call: Call,
    keys: KeysArgument = None,
    namespace: NamespaceOption = "",
    rate: Annotated[str, typer.Option("--rate", help="Read at most this much a second, such as 200MiB.")] = "",
) -> Exit:
    """Read blocks back and compare their checksums.

    All blocks, those of a namespace, or the named ones. A bad block is quarantined and never served.
    Exits with 1 if one was found.
    """
    request = admin_pb2.VerifyRequest(bytes_per_second=text.parse_size("--rate", rate) if rate else 0)
    if keys or namespace:
        info = find_namespace(call, namespace)
        request.namespace_id = info.namespace_id
        request.keys = b"".join(whole_keys(call, info, keys))
    answer = call.ask("Admin/Verify", request, admin_pb2.VerifyResponse)
    if call.printer.for_people:
        speed = f", {text.size(answer.bytes / answer.seconds)}/s" if answer.seconds else ""
        call.printer.line(
            f"{text.plural(answer.blocks, 'block')}, {text.size(answer.bytes)}, read in "
            f"{text.duration(answer.seconds)}{speed}; {answer.bad or 'none'} bad"
        )
        for key in answer.bad_keys:
            call.printer.line(f"bad: {text.full_key(key)}")
    else:
        call.printer.answer(answer)
    return Exit.NO if answer.bad else Exit.OK
