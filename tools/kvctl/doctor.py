"""``kvctl doctor``: what this machine could do better for the daemon, each with the command that mends it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Final

import typer
from rich.text import Text

from kvstore.core.errors import KVStoreError
from kvstore.tools.kvctl import probes
from kvstore.tools.kvctl.command import Call
from kvstore.tools.kvctl.exits import Exit
from kvstore.tools.kvctl.probes import Finding, Level
from kvstore.tools.output import Printer, clean
from kvstore.v1 import admin_pb2, common_pb2

MARKS: Final = {
    Level.OK: ("ok  ", "green"),
    Level.NOTE: ("note", "cyan"),
    Level.WARN: ("warn", "bold yellow"),
    Level.BAD: ("bad ", "bold red"),
}


ARENA_ON_SMALL_PAGES: Final = "is on 4 KiB pages"
"""Words of the daemon's warning, one for each such arena."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """What the running daemon tells, for the probes; empty where none answers."""

    findings: tuple[Finding, ...]
    pid: int | None = None
    arena_bytes: int = 0
    directory: str = ""
    cap_bytes: int = 0
    used_bytes: int = 0
    floor_bytes: int = 0


def doctor(
    call: Call, ssd: Annotated[str, typer.Option("--ssd", help="Look at this directory, if no daemon runs.")] = ""
) -> Exit:
    """What this machine could do better, and how to mend it.

    Looks at huge pages, limits, direct I/O, disk, kernels and GPU; each in one sentence with one command.
    Works without a daemon.
    Exits with 1 if something should be mended.
    """
    daemon = _ask_daemon(call)
    findings = _told_once([*daemon.findings, *_machine(daemon, ssd)])
    if call.printer.for_people:
        _print(call.printer, findings)
    else:
        call.printer.json([asdict(finding) for finding in findings])
    return Exit.NO if any(f.level in (Level.WARN, Level.BAD) for f in findings) else Exit.OK


def _told_once(findings: list[Finding]) -> list[Finding]:
    """Without the daemon's warnings of single arenas on small pages, where the finding on huge pages says it of all.

    Each of these names the pages of one arena, so the command of the last would undo that of the first.
    """
    said = any(finding.name == "huge pages" and finding.level is Level.WARN for finding in findings)
    return [f for f in findings if not (said and f.name == "daemon" and ARENA_ON_SMALL_PAGES in f.sentence)]


def _ask_daemon(call: Call) -> Daemon:
    try:
        status = call.ask("Admin/Status", admin_pb2.StatusRequest(), admin_pb2.StatusResponse)
        usage = call.ask("Admin/DiskUsage", admin_pb2.DiskUsageRequest(), admin_pb2.DiskUsageResponse)
    except KVStoreError as error:
        finding = Finding(
            "daemon",
            Level.NOTE,
            f"{error.message[:1].upper()}{error.message[1:]}.",
            ("kvstored --config kvstored.toml",),
        )
        return Daemon((finding,))
    findings = [Finding("daemon", Level.OK, f"kvstored {status.version} answers, pid {status.pid}.")]
    findings += [Finding("daemon", Level.WARN, warning) for warning in status.warnings]
    findings += [probes.index_form(status.index)] if status.index else []
    for tier in status.tiers:
        if tier.state == "degraded":
            name = common_pb2.Tier.Name(tier.tier).removeprefix("TIER_")
            findings.append(Finding("daemon", Level.BAD, f"{name} is degraded: {tier.last_error}.", ("kvctl status",)))
    memory = (common_pb2.TIER_DEVICE, common_pb2.TIER_HOST)
    return Daemon(
        tuple(findings),
        pid=status.pid,
        arena_bytes=sum(tier.capacity_bytes for tier in status.tiers if tier.tier in memory),
        directory=usage.directory,
        cap_bytes=usage.cap_bytes,
        used_bytes=usage.ledger_bytes,
        floor_bytes=usage.free_floor_bytes,
    )


def _machine(daemon: Daemon, ssd: str) -> list[Finding]:
    device = probes.gpu()
    findings = [
        probes.huge_pages(daemon.arena_bytes),
        probes.locked_memory(daemon.arena_bytes, daemon.pid, uses_gpu=device.level is Level.OK),
        probes.memory_limit(daemon.arena_bytes, daemon.pid),
        probes.sealed_memory(),
        probes.descriptors(daemon.pid),
    ]
    directory = probes.probe_directory(ssd or daemon.directory)
    if directory is None:
        findings.append(
            Finding("direct I/O", Level.NOTE, "Not looked at: no SSD directory is known.", ("kvctl doctor --ssd DIR",))
        )
    else:
        findings.append(probes.direct_io(directory))
        findings.append(probes.disk_space(directory, daemon.cap_bytes, daemon.used_bytes, daemon.floor_bytes))
    return [*findings, probes.native_kernels(), probes.python(), device, probes.leftovers()]


def _print(printer: Printer, findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, style = MARKS[finding.level]
        indent = " " * (len(mark) + width + 4)
        head = Text.assemble((mark, style), "  ", (finding.name.ljust(width), "bold"), "  ")
        lines = Text(clean(finding.sentence)).wrap(printer.console, max(30, printer.columns - len(indent)))
        for number, line in enumerate(lines):
            printer.line(head + line if number == 0 else Text(indent) + line)
        for command in finding.commands:
            # Commands are never wrapped, since they are there to be copied.
            printer.whole_line(Text.assemble("      ", ("$ ", "dim"), (command, "cyan")))
