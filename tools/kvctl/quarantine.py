"""``kvctl quarantine``: what failed a check and was set aside."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.output import columns
from kvstore.v1 import admin_pb2


def quarantine(
    call: Call, empty: Annotated[bool, typer.Option("--empty", help="Delete what is listed.")] = False
) -> Exit:
    """What failed a check and was set aside.

    Such bytes are never served. Exits with 1 if there are any, and they were not deleted.
    """
    request = admin_pb2.ListQuarantineRequest(empty=empty)
    answer = call.ask("Admin/ListQuarantine", request, admin_pb2.ListQuarantineResponse)
    if call.printer.for_people:
        rows = [(e.file, text.size(e.bytes), text.short_key(e.key), e.cause) for e in answer.entries]
        call.printer.table(columns("File|>Bytes|?Key|~Cause"), rows)
        if not rows:
            call.printer.talk("nothing is quarantined")
        elif answer.emptied:
            call.printer.talk(f"{text.plural(len(rows), 'file')} deleted")
    else:
        call.printer.answer(answer)
    return Exit.NO if answer.entries and not answer.emptied else Exit.OK
