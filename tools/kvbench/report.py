"""A report: rows for programs, and tables of its own for people and documents, where one figure a line reads badly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from kvstore.tools.kvbench.markdown import conditions
from kvstore.tools.kvbench.rows import Row
from kvstore.tools.output import Printer, columns


@dataclass(frozen=True, slots=True)
class Table:
    """``titles`` are those of ``output.columns``; ``note`` is a sentence that stands below."""

    title: str
    titles: str
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What one bench found."""

    rows: Sequence[Row]
    tables: Sequence[Table]


def print_report(printer: Printer, report: Report) -> None:
    """The tables, or the rows as JSON."""
    if not printer.for_people:
        printer.json([row.plain() for row in report.rows])
        return
    for index, table in enumerate(report.tables):
        if index:
            printer.line()
        printer.line(Text(table.title, style="bold"))
        printer.table(columns(table.titles), table.rows)
        if table.note:
            printer.line(Text(table.note, style="dim"))


def report_section(report: Report) -> str:
    """The tables as Markdown, with the conditions that all rows share."""
    lines = [conditions(report.rows)]
    for table in report.tables:
        titled = columns(table.titles)
        lines += ["", f"{table.title}:", ""]
        lines.append("| " + " | ".join(column.title for column in titled) + " |")
        lines.append("|" + "|".join("---:" if column.right else "---" for column in titled) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
        lines += ["", table.note] if table.note else []
    return "\n".join(lines)
