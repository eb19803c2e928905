"""A row: one figure, the limit beside it, and what others published."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.text import Text

from kvstore.tools.output import Printer, columns

RATES: Final = frozenset({"MB/s", "GB/s", "calls/s", "tokens/s", "times"})
"""Units of which more is better; of any other unit less is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. ``limit`` was measured in the same run, and so were ``peers`` if ``peers_measured``, else published.

    ``target`` is what docs/performance.md aims at, for people: it stands in ``conditions`` of the JSON form.
    """

    bench: str
    case: str
    value: float
    unit: str
    limit: float | None = None
    limit_unit: str = ""
    limit_name: str = ""
    target: str = ""
    peers: Mapping[str, float] = field(default_factory=dict)
    peers_measured: bool = False
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fraction(self) -> float | None:
        """How much of the limit is reached: 1 is at the limit, whatever the unit; None where that has no meaning."""
        if self.limit is None or self.limit_unit != self.unit or self.value <= 0 or self.limit <= 0:
            return None
        return self.value / self.limit if self.unit in RATES else self.limit / self.value

    def plain(self) -> dict[str, Any]:
        """The row as programs read it."""
        row = asdict(self)
        name, target = row.pop("limit_name"), row.pop("target")
        measured = row.pop("peers_measured")
        conditions = dict(self.conditions)
        conditions |= {"limit": name} if name else {}
        conditions |= {"target": target} if target else {}
        conditions |= {"peers": "same run" if measured else "published"} if self.peers else {}
        return {
            "bench": row["bench"],
            "case": row["case"],
            "value": row["value"],
            "unit": row["unit"],
            "limit": row["limit"],
            "limit_unit": row["limit_unit"],
            "fraction": self.fraction,
            "peers": dict(self.peers),
            "conditions": conditions,
        }


def number(value: float | None) -> str:
    """Three significant digits, thousands apart."""
    if value is None:
        return "-"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def print_rows(printer: Printer, rows: Sequence[Row]) -> None:
    """Rows as a table with the published figures under it, or as JSON."""
    if not printer.for_people:
        printer.json([row.plain() for row in rows])
        return
    shown = []
    for row in rows:
        limit = f"{number(row.limit)} {row.limit_unit}  {row.limit_name}" if row.limit is not None else "-"
        fraction = "-" if row.fraction is None else f"{row.fraction:.2f}"
        shown.append((row.case, f"{number(row.value)} {row.unit}", limit, fraction, row.target or "-"))
    printer.table(columns("~Case|>Figure|~Limit, same run|>Of it|~Target"), shown)
    for measured, title in (
        (True, "Others, same run:"),
        (False, "Published for this kind of machine, not measured here:"),
    ):
        chosen = [row for row in rows if row.peers and row.peers_measured is measured]
        if chosen:
            printer.line()
            printer.line(Text(title, style="dim"))
        for row in chosen:
            printer.line(Text(f"  {row.case}, {row.unit}", style="dim"))
            for name, value in row.peers.items():
                printer.line(Text(f"    {number(value):>8}  {name}", style="dim"))


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def take_turns(cases: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Run each case once a round, so that what else the machine does falls on all alike; seconds a run by case."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm_up + rounds):
        for name, work in cases.items():
            taken = timed(work)
            if turn >= warm_up:
                seconds[name].append(taken)
    return seconds


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of all lie (nearest rank)."""
    ordered = sorted(values)
    # A hundredth of a place less, so that 0.99 of 100 values is the 99th although 0.99 has no exact form.
    return ordered[max(0, math.ceil(share * len(ordered) - 0.01) - 1)]


def rate(nbytes: int, seconds: float) -> float:
    """MB/s, a million bytes each."""
    return nbytes / seconds / 1e6
