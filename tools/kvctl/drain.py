"""``kvctl drain``: before a daemon is stopped, take no new blocks and write what is in memory to SSD."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.waiting import waiting
from kvstore.v1 import admin_pb2


@slow(120.0)
def drain(
    call: Call, resume: Annotated[bool, typer.Option("--resume", help="End draining: take new blocks again.")] = False
) -> Exit:
    """Get ready for a stop: take no new blocks, write to SSD.

    What is only in memory is written, so that a restart is warm.
    Exits with 1 if some blocks could not be written within --timeout.
    """
    # The daemon gives up a little earlier than this side, so that its report still arrives.
    request = admin_pb2.DrainRequest(resume=resume, timeout_ms=max(1, int(call.timeout * 900)))
    with waiting(call, "writing to SSD", "ssd_blocks_written", "block"):
        answer = call.ask("Admin/Drain", request, admin_pb2.DrainResponse)
    if not call.printer.for_people:
        call.printer.answer(answer)
    elif resume:
        call.printer.line("takes new blocks again")
    else:
        call.printer.line(f"draining; {text.plural(answer.flushed_blocks, 'block')} written to SSD")
        if answer.unflushed_blocks:
            call.printer.talk(f"{text.plural(answer.unflushed_blocks, 'block')} are still only in memory")
    return Exit.NO if answer.unflushed_blocks else Exit.OK
