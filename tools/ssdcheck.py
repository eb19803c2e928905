"""``python -m kvstore.tools.ssdcheck DIRECTORY``: check a closed directory of the SSD tier, byte by byte.

Exit status 0: every block is whole. 1: damage. 2: not checked (no tier there, held by a daemon, unknown version).
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Annotated

import typer

from kvstore.core.errors import KVStoreError
from kvstore.tiers.ssd import LinuxDisk
from kvstore.tiers.ssd.scrub import ScrubReport, check_directory


def render(report: ScrubReport) -> str:
    """The report for people."""
    aside = (len(report.orphans), len(report.temporary), len(report.quarantined))
    lines = [
        f"{report.directory}: {'whole' if report.whole else 'DAMAGED'}",
        f"  {report.good} of {report.blocks} blocks are good; {report.bytes} bytes read, {report.du_bytes} on disk",
        f"  {report.torn_tail_bytes} bytes of torn tail",
        "  {} orphans, {} temporary files, {} quarantined".format(*aside),
    ]
    lines += [f"  damage: {text}" for text in report.damage]
    lines += [f"  block {one['key']}: {one['cause']}" for one in report.corrupt]
    return "\n".join(lines)


def run(
    directory: Annotated[str, typer.Argument(help="The tier's directory; no daemon may hold it.")],
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Check every record and every slice of a closed directory; nothing is changed."""
    if not os.path.isdir(directory):
        print(f"ssdcheck: {directory} is no directory", file=sys.stderr)
        raise typer.Exit(2)
    try:
        report = check_directory(LinuxDisk(directory))
    except (KVStoreError, OSError) as error:
        print(f"ssdcheck: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    if output == "json":
        print(json.dumps(dataclasses.asdict(report) | {"whole": report.whole}))
    else:
        print(render(report))
    raise typer.Exit(0 if report.whole else 1)


def main() -> None:
    """The command."""
    typer.run(run)


if __name__ == "__main__":
    main()
