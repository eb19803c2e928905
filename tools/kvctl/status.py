"""``kvctl status``: what the daemon holds, how full it is, and what an operator should know."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from kvstore.core.durations import BOUNDS_MS
from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import TIER_NAMES, TIER_WORDS
from kvstore.tools.output import Printer, columns, plain
from kvstore.v1 import admin_pb2

BAR_COLUMNS = 10
STATE_STYLES = {"ready": "green", "degraded": "bold red", "off": "dim"}


def status(
    call: Call, counters: Annotated[bool, typer.Option("--counters", help="Also print every counter.")] = False
) -> Exit:
    """What the daemon holds, how full it is, and how it is.

    Exits with 1 if a tier is degraded.
    """
    answer = call.ask("Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse)
    printer = call.printer
    if not printer.for_people:
        printer.json({**plain(answer), "own_sessions": 1})
    else:
        _head(printer, answer)
        printer.line()
        _tiers(printer, answer)
        printer.line()
        _moves(printer, answer)
        printer.line()
        _recovery(printer, answer)
        _held(printer, answer)
        for warning in [*_failed_checks(answer), *answer.warnings]:
            printer.whole_line(Text.assemble(("! ", "bold yellow"), (warning, "yellow")))
        if counters:
            rows = [(name, text.count(answer.counters[name])) for name in sorted(answer.counters)]
            printer.line()
            printer.table(columns("Counter|>Value"), rows)
    return Exit.NO if any(tier.state == "degraded" for tier in answer.tiers) else Exit.OK


def _head(printer: Printer, answer: admin_pb2.StatusResponse) -> None:
    state = ("draining", "bold yellow") if answer.draining else ("ready", "bold green")
    printer.line(
        Text.assemble(
            (f"kvstored {answer.version}", "bold"),
            f"  pid {answer.pid}  up {text.duration(answer.uptime_seconds)}  boot {answer.boot_id.hex()[:8]}  ",
            state,
        )
    )
    parts = [
        text.plural(answer.namespaces, "namespace"),
        # This command has one itself.
        f"{text.plural(max(0, answer.sessions - 1), 'session')} beside this one",
        text.plural(answer.leases, "lease"),
        text.plural(answer.reservations, "reservation"),
        text.plural(answer.jobs, "job"),
    ]
    printer.line(Text(", ".join(parts), style="dim"))


def _held(printer: Printer, answer: admin_pb2.StatusResponse) -> None:
    """How long the event loop and the store's lock kept all others waiting: more than 5 ms is too long."""
    counters = answer.counters
    for what, many, one in (
        ("turns of the loop", "loop_turns", "loop_turn"),
        ("their CPU time", "loop_work", "loop_work"),
        ("locked sections", "locked_sections", "locked_section"),
        ("their CPU time", "locked_work", "locked_work"),
    ):
        if f"{one}_longest_us" in counters:
            over = ", ".join(f"{text.count(counters[f'{many}_over_{bound}_ms'])} over {bound}" for bound in BOUNDS_MS)
            longest = counters[f"{one}_longest_us"] / 1000
            printer.line(Text(f"{what}: {over} ms, longest {longest:.1f} ms", style="dim"))


def _tiers(printer: Printer, answer: admin_pb2.StatusResponse) -> None:
    rows = []
    for tier in answer.tiers:
        rows.append(
            (
                Text(TIER_NAMES.get(tier.tier, "?"), style="bold"),
                Text(tier.state, style=STATE_STYLES.get(tier.state, "")),
                usage(tier),
                text.size(tier.capacity_bytes),
                text.count(tier.blocks),
                text.size(tier.pinned_bytes) if tier.pinned_bytes else "-",
                saved_of(tier.saved_bytes),
            )
        )
    printer.table(columns("Tier|State|Used|>Of|?>Blocks|?>Pinned|?>Saved"), rows)
    saved = sum(tier.saved_bytes for tier in answer.tiers)
    if saved:
        raw = sum(tier.raw_bytes for tier in answer.tiers)
        printer.line(f"Codecs save {saved_of(saved)} of the {text.size(raw)} that these blocks would take raw.")
    for tier in answer.tiers:
        if tier.last_error:
            printer.line(Text(f"{TIER_NAMES.get(tier.tier, '?')}: {tier.last_error}", style="red"))


def saved_of(nbytes: int) -> str:
    """Bytes saved by codecs; below 0 where raw layers made blocks larger."""
    return f"-{text.size(-nbytes)}" if nbytes < 0 else text.size(nbytes) if nbytes else "-"


def usage(tier: admin_pb2.TierStatus) -> Text:
    """A bar of the used share, then the amount; yellow from the high watermark on."""
    share = min(1.0, tier.used_bytes / tier.capacity_bytes) if tier.capacity_bytes else 0.0
    full = round(share * BAR_COLUMNS)
    if tier.used_bytes and not full:
        full = 1
    style = "yellow" if tier.high_watermark and share >= tier.high_watermark else "green"
    return Text.assemble(("━" * full, style), ("─" * (BAR_COLUMNS - full), "dim"), f" {text.size(tier.used_bytes)}")


def _moves(printer: Printer, answer: admin_pb2.StatusResponse) -> None:
    rows = [
        (
            Text(TIER_NAMES.get(tier.tier, "?"), style="bold"),
            text.count(tier.promoted),
            text.count(tier.demoted),
            text.count(tier.evicted),
            text.count(tier.removed),
            tier.backing,
        )
        for tier in answer.tiers
    ]
    printer.table(columns("Tier|>Promoted|>Demoted|>Evicted|>Removed|?~Backing"), rows)


def _failed_checks(answer: admin_pb2.StatusResponse) -> list[str]:
    """Copies that failed a check since the daemon began: nothing else in this answer would tell of them."""
    failed = sum(answer.counters.get(f"{word}_quarantined", 0) for word in TIER_WORDS)
    if not failed:
        return []
    copies = "1 copy" if failed == 1 else f"{text.count(failed)} copies"
    return [f"{copies} of blocks failed a check and will not be served: kvctl quarantine, then kvctl verify"]


def _recovery(printer: Printer, answer: admin_pb2.StatusResponse) -> None:
    if not answer.HasField("recovery") or answer.recovery.mode == "off":
        return
    report = answer.recovery
    sentence = (
        f"Recovered {text.plural(report.blocks, 'block')}, {text.size(report.bytes)}, "
        f"in {text.duration(report.seconds)} ({report.mode or 'normal'} mode)"
    )
    extras = []
    if report.cut_bytes:
        extras.append(f"{text.size(report.cut_bytes)} of torn tail cut")
    if report.quarantined:
        extras.append(f"{text.plural(report.quarantined, 'block')} quarantined")
    if report.orphans_removed:
        extras.append(f"{text.plural(report.orphans_removed, 'orphan')} removed")
    printer.line(Text("; ".join([sentence, *extras]) + ".", style="" if extras else "dim"))
