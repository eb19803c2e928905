"""``kvctl top``: the daemon live: how full, how many hits, what moves, which namespaces are busy."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Annotated, Final

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from kvstore.tools import text
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.options import TIER_NAMES, all_namespaces
from kvstore.tools.kvctl.status import usage
from kvstore.tools.output import Printer, clean, columns
from kvstore.v1 import admin_pb2

NAMESPACES_SHOWN: Final = 8
TIER_WORDS: Final = ("device", "host", "ssd")


def top(
    call: Call,
    every: Annotated[float, typer.Option("--every", "-e", help="Seconds between two looks.", min=0.2, max=3600)] = 2.0,
    count: Annotated[int, typer.Option("--count", "-c", help="Looks, then end; 0 goes on until Ctrl-C.", min=0)] = 0,
) -> Exit:
    """The daemon live: tiers, hits, what moves, busy namespaces.

    On a terminal one picture that is renewed; elsewhere a picture, or with -o json an object a line, for each look.
    """
    before, looks = _look(call), 0
    live = sys.stdout.isatty() and call.printer.for_people
    if live:
        from rich.live import Live  # noqa: PLC0415 - which the help need not load

        with Live(console=call.printer.console, auto_refresh=False, screen=False) as shown:
            while not count or looks < count:
                time.sleep(every)
                after = _look(call)
                shown.update(_picture(call.printer, before, after), refresh=True)
                before, looks = after, looks + 1
        return Exit.OK
    while not count or looks < count:
        time.sleep(every)
        after = _look(call)
        if call.printer.for_people:
            call.printer.line(_picture(call.printer, before, after))
        else:
            call.printer.json_line(rates(before, after))
        before, looks = after, looks + 1
    return Exit.OK


class _Look:
    """One moment."""

    def __init__(self, status: admin_pb2.StatusResponse, namespaces: list[admin_pb2.NamespaceInfo]) -> None:
        self.at = time.monotonic()
        self.status = status
        self.namespaces = {info.namespace_id: info for info in namespaces}


def _look(call: Call) -> _Look:
    status = call.ask("Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse)
    return _Look(status, all_namespaces(call))


def rates(before: _Look, after: _Look) -> dict[str, object]:
    """What happened between two looks, a second."""
    seconds = max(after.at - before.at, 1e-9)
    new, old = after.status.counters, before.status.counters
    grown = {name: new[name] - old.get(name, 0) for name in new}
    found, missed = grown.get("match_found", 0), total(grown, "match_missed_")
    return {
        "seconds": round(seconds, 3),
        "hit_ratio": round(found / (found + missed), 4) if found + missed else None,
        "found_per_second": round(found / seconds, 1),
        "missed_per_second": round(missed / seconds, 1),
        "put_per_second": round(grown.get("put_new", 0) / seconds, 1),
        "evicted_per_second": {tier: round(grown.get(f"{tier}_evicted", 0) / seconds, 1) for tier in TIER_WORDS},
        "promoted_per_second": {tier: round(grown.get(f"{tier}_promoted", 0) / seconds, 1) for tier in TIER_WORDS},
        "disk_read_bytes_per_second": round(grown.get("disk_read_bytes", 0) / seconds),
        "disk_written_bytes_per_second": round(grown.get("disk_written_bytes", 0) / seconds),
        "used_bytes": {TIER_NAMES.get(t.tier, "?").lower(): t.used_bytes for t in after.status.tiers},
    }


def total(counters: Mapping[str, int], prefix: str) -> int:
    """Sum of the counters that begin so."""
    return sum(value for name, value in counters.items() if name.startswith(prefix))


def _picture(printer: Printer, before: _Look, after: _Look) -> RenderableType:
    status, now = after.status, rates(before, after)
    ratio = now["hit_ratio"]
    hits = "no questions" if ratio is None else f"{ratio:.0%} of the blocks asked for are here"
    head = Text.assemble(
        (f"kvstored {clean(status.version)}", "bold"), f"  up {text.duration(status.uptime_seconds)}  ",
        ("draining", "bold yellow") if status.draining else ("ready", "bold green"),
    )  # fmt: skip
    counts = (
        f"{text.plural(max(0, status.sessions - 1), 'session')} beside this one, "
        f"{text.plural(status.leases, 'lease')}, {text.plural(status.jobs, 'job')}"
    )
    rows = []
    for tier in status.tiers:
        word = TIER_NAMES.get(tier.tier, "?")
        gone, back = now["evicted_per_second"], now["promoted_per_second"]
        key = word.lower()
        rows.append(
            (
                Text(word, style="bold"), usage(tier), text.size(tier.capacity_bytes), text.count(tier.blocks),
                f"{gone.get(key, 0):g}/s" if isinstance(gone, dict) else "-",
                f"{back.get(key, 0):g}/s" if isinstance(back, dict) else "-",
            )
        )  # fmt: skip
    disk = (
        f"disk: {text.size(_number(now['disk_read_bytes_per_second']))}/s read, "
        f"{text.size(_number(now['disk_written_bytes_per_second']))}/s written"
    )
    parts: list[RenderableType] = [
        head,
        Text(counts, style="dim"),
        Text(
            f"{hits}; {_number(now['found_per_second']):g} found, {_number(now['missed_per_second']):g} missed, "
            f"{_number(now['put_per_second']):g} put a second"
        ),
        Text(""),
        printer.as_table(columns("Tier|Used|>Of|?>Blocks|>Evicted|>Promoted"), rows),
        Text(disk, style="dim"),
    ]
    busy = _namespaces(before, after)
    if busy:
        parts += [Text(""), printer.as_table(columns("~Namespace|>Blocks|>Change|?>HOST|?>SSD"), busy)]
    return Group(*parts)


def _namespaces(before: _Look, after: _Look) -> list[tuple[str, ...]]:
    """Those that changed most, then the largest."""
    found = []
    for namespace_id, info in after.namespaces.items():
        old = before.namespaces.get(namespace_id)
        change = info.blocks - (old.blocks if old is not None else 0)
        found.append((abs(change), info.blocks, change, info))
    found.sort(key=lambda entry: entry[:2], reverse=True)
    rows: list[tuple[str, ...]] = []
    for _, blocks, change, info in found[:NAMESPACES_SHOWN]:
        tiers = [*info.blocks_by_tier, 0, 0, 0]
        rows.append(
            (info.name or info.spec.model, text.count(blocks), f"{change:+,}" if change else "-",
             text.count(tiers[1]), text.count(tiers[2]))
        )  # fmt: skip
    return rows


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
