"""The picture of ``kvbench crowd``: calls of all clients together, and how long one takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from kvstore.tools.kvbench.rows import Row

INK, BLUE, RED, GREY = "#1f2933", "#2563a8", "#c0392b", "#9aa5b1"


def draw_crowd(rows: Sequence[Row], limit: float, path: Path) -> None:
    """Totals above with every round, times of a call below, by clients."""
    figure = Figure(figsize=(8, 5.6), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    clients = [row.conditions["clients"] for row in rows]
    places = range(len(clients))
    totals = [row.value for row in rows]
    for place, row in zip(places, rows, strict=True):
        rounds = row.conditions["rounds"]
        above.plot([place] * len(rounds), rounds, "o", color=BLUE, alpha=0.3, markersize=4, markeredgewidth=0)
    above.plot(places, totals, "o-", color=BLUE, markersize=7, linewidth=1.4, label="median of the rounds; pale: each")
    best = [max(totals[: place + 1]) for place in places]
    above.plot(places, [0.9 * one for one in best], "--", color=RED, linewidth=1.2, label="0.9 of the best up to there")
    above.set_ylim(0, 1.35 * max(max(row.conditions["rounds"]) for row in rows))
    above.set_ylabel("calls a second, all clients")
    above.set_title("Put and get of 4 x 256 KiB, by clients at a time", loc="left", color=INK, fontsize=13, pad=14)
    above.annotate(
        f"one memcpy of the same bytes, 2 threads: {limit:,.0f} a second",
        (0.99, 0.04), xycoords="axes fraction", ha="right", fontsize=9, color=GREY,
    )  # fmt: skip
    for name, color, style in (("p50_ms", BLUE, "o-"), ("p99_ms", RED, "s--")):
        values = [row.conditions[name] for row in rows]
        below.plot(places, values, style, color=color, markersize=5, linewidth=1.2, label=name.removesuffix("_ms"))
    below.set_yscale("log")
    below.set_ylabel("ms a call")
    below.set_xlabel("clients")
    below.set_xticks(places, [str(count) for count in clients])
    for axes in (above, below):
        axes.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path, dpi=150)
