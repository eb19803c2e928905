"""Rows as a section of docs/performance.md: one command measures and writes what the document says."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from kvstore.tools import python_build
from kvstore.tools.kvbench.rows import Row, number


def section(rows: Sequence[Row]) -> str:
    """Tables of the rows and of what others reach, with the conditions that all rows share."""
    lines = [conditions(rows), "", "| what | figure | limit, same run | of it | target |", "|---|---|---|---|---|"]
    for row in rows:
        limit = "-" if row.limit is None else f"{number(row.limit)} {row.limit_unit}, {row.limit_name}"
        fraction = "-" if row.fraction is None else f"{row.fraction:.2f}"
        figure = f"{number(row.value)} {row.unit}"
        lines.append(f"| {row.case} | {figure} | {limit} | {fraction} | {row.target or '-'} |")
    compared = [row for row in rows if row.peers]
    if compared:
        measured = "measured in the same run" if compared[0].peers_measured else "published, not measured here"
        lines += ["", f"| what | others ({measured}) |", "|---|---|"]
    for row in compared:
        others = ", ".join(f"{name} {number(value)}" for name, value in row.peers.items())
        lines.append(f"| {row.case}, {row.unit} | {others} |")
    return "\n".join(lines)


def conditions(rows: Sequence[Row]) -> str:
    """Cores, load and what all rows have in common, as a sentence."""
    shared = dict(rows[0].conditions) if rows else {}
    for row in rows:
        shared = {name: value for name, value in shared.items() if row.conditions.get(name) == value}
    words = [f"{name.replace('_', ' ')} {value}" for name, value in shared.items()]
    load = f"{python_build.told()}, load average {os.getloadavg()[0]:.1f} at the end"
    return f"On {os.cpu_count()} cores, {load}" + (f"; {', '.join(words)}." if words else ".")


def write_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of section ``name`` in a document, or behind its end where there are none."""
    begin, end = f"<!-- kvbench {name} -->", f"<!-- end of kvbench {name} -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = f"{begin}\n{text}\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if pattern.search(old):
        path.write_text(pattern.sub(lambda _: new, old), encoding="utf-8")
    else:
        path.write_text(f"{old.rstrip()}\n\n{new}\n".lstrip(), encoding="utf-8")
