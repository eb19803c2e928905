"""``kvctl compact``: rewrite SSD segments whose live share is low."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call, slow
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.waiting import waiting
from kvstore.v1 import admin_pb2


@slow(600.0)
def compact(
    call: Call,
    above: Annotated[
        float, typer.Option("--above", help="Rewrite segments with more than this share of dead bytes.", min=0, max=1)
    ] = 0.0,
) -> Exit:
    """Give back disk space of dropped blocks.

    Rewrites SSD segments with a large share of dead bytes: --above, or as configured.
    """
    with waiting(call, "moving blocks together", "disk_rewritten_bytes", "bytes"):
        answer = call.ask("Admin/Compact", admin_pb2.CompactRequest(fragmentation=above), admin_pb2.CompactResponse)
    if call.printer.for_people:
        call.printer.line(
            f"{text.plural(answer.segments, 'segment')} rewritten: {text.size(answer.bytes_rewritten)} moved, "
            f"{text.size(answer.bytes_freed)} freed"
        )
    else:
        call.printer.answer(answer)
    return Exit.OK
