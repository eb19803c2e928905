"""``kvctl du``: what the SSD tier uses, by kind and by segment."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.output import columns
from kvstore.v1 import admin_pb2


def du(
    call: Call, segments: Annotated[bool, typer.Option("--segments", help="Also list the segment files.")] = False
) -> Exit:
    """What the SSD tier uses of its cap, by kind.

    The amount used is what du says of the directory.
    Exits with 1 if the ledger is above the cap or the file system is below its floor.
    """
    answer = call.ask("Admin/DiskUsage", admin_pb2.DiskUsageRequest(), admin_pb2.DiskUsageResponse)
    over = answer.ledger_bytes > answer.cap_bytes
    low = answer.filesystem_free_bytes < answer.free_floor_bytes
    if call.printer.for_people:
        live = sum(segment.live_bytes for segment in answer.segments)
        share = answer.ledger_bytes / answer.cap_bytes if answer.cap_bytes else 0.0
        used = f"{text.size(answer.ledger_bytes)} of {text.size(answer.cap_bytes)} ({share:.1%})"
        room = f"{text.size(answer.filesystem_free_bytes)} free, floor {text.size(answer.free_floor_bytes)}"
        call.printer.facts(
            [
                ("directory", answer.directory),
                ("used", _alarm(used, over)),
                ("  live blocks", text.size(live)),
                ("  saved by lz4", text.size(answer.coded_saved_bytes)),
                ("  metadata", text.size(answer.metadata_bytes)),
                ("  quarantine", text.size(answer.quarantine_bytes)),
                ("fragmentation", f"{answer.fragmentation:.2f} of the bytes written to segments are dead"),
                ("amplification", f"{answer.write_amplification:.2f} bytes written a byte stored"),
                ("file system", _alarm(room, low)),
            ]
        )
        if segments:
            call.printer.line()
            rows = [_segment(segment) for segment in answer.segments]
            call.printer.table(columns(">Segment|?>File|>Written|>Live|>Dead|>Blocks|State"), rows)
    else:
        call.printer.answer(answer)
    return Exit.NO if over or low else Exit.OK


def _alarm(sentence: str, wrong: bool) -> Text:
    return Text(sentence, style="bold red" if wrong else "")


def _segment(segment: admin_pb2.SegmentUsage) -> tuple[str, ...]:
    # A daemon from before it said how much is written counts what is behind as dead.
    written = segment.used_bytes or segment.file_bytes
    dead = max(0.0, 1 - segment.live_bytes / written) if written else 0.0
    return (
        str(segment.segment_id),
        text.size(segment.file_bytes),
        text.size(written),
        text.size(segment.live_bytes),
        f"{dead:.0%}",
        text.count(segment.blocks),
        "open" if segment.open else "",
    )
