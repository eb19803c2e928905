"""The picture of ``kvbench crowd``: calls of all clients together, how long one takes, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from kvstore.tools.kvbench.crowd import BATCH, BLOCK_BYTES, COPY_THREADS, Crowd
from kvstore.tools.kvbench.crowd_report import SHARE_MIN
from kvstore.tools.pictures import BLUE, DPI, GREY, INK, RED, new_figure, set_title


def draw_crowd(found: Sequence[Crowd], path: Path) -> None:
    """Totals with every round, times of puts and gets, processor time a call; each by clients."""
    figure, panels = new_figure(3, (15, 4.8))
    for axes, draw in zip(panels, (_totals, _waits, _costs), strict=True):
        draw(axes, found)
        axes.set_xticks(range(len(found)), [f"{one.clients:,}" for one in found])
        axes.set_xlabel("clients, each a session of its own")
        axes.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path, dpi=DPI)


def _totals(axes: Axes, found: Sequence[Crowd]) -> None:
    places, totals = range(len(found)), [one.per_second for one in found]
    for place, one in zip(places, found, strict=True):
        rounds = [each.per_second for each in one.rounds]
        axes.plot([place] * len(rounds), rounds, "o", color=BLUE, alpha=0.3, markersize=4, markeredgewidth=0)
    axes.plot(places, totals, "o-", color=BLUE, markersize=7, linewidth=1.6, label="median of the rounds; pale: each")
    wanted = [SHARE_MIN * max(totals[: place + 1]) for place in places]
    axes.plot(places, wanted, "--", color=RED, linewidth=1.2, label=f"{SHARE_MIN} of the best up to there")
    axes.set_ylim(0, 1.35 * max(each.per_second for one in found for each in one.rounds))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("calls a second, all clients")
    set_title(axes, f"Put and get of {BATCH} x {BLOCK_BYTES >> 10} KiB")
    copies = [one.middle(lambda each: each.copies) for one in found]
    words = f"memcpy of as many bytes, {COPY_THREADS} threads: {min(copies):,.0f} to {max(copies):,.0f} a second"
    axes.annotate(words, (0.98, 0.04), xycoords="axes fraction", ha="right", fontsize=9, color=INK)


def _waits(axes: Axes, found: Sequence[Crowd]) -> None:
    for verb, color in (("puts", BLUE), ("gets", INK)):
        for share, style in ((0.5, "o-"), (0.99, "o--")):
            values = [one.milliseconds(verb, share) for one in found]
            label = f"{verb[:-1]}, p{share * 100:.0f}"
            axes.plot(range(len(found)), values, style, color=color, markersize=5, linewidth=1.4, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("ms")
    set_title(axes, "How long a call takes")


def _costs(axes: Axes, found: Sequence[Crowd]) -> None:
    daemon = [one.middle(lambda each: each.daemon_s / each.calls) * 1e3 for one in found]
    clients = [one.middle(lambda each: each.clients_s / each.calls) * 1e3 for one in found]
    axes.bar(range(len(found)), daemon, 0.6, color=BLUE, label="daemon")
    axes.bar(range(len(found)), clients, 0.6, bottom=daemon, color=GREY, label="clients")
    axes.set_ylim(0, 1.35 * max(a + b for a, b in zip(daemon, clients, strict=True)))
    axes.set_ylabel("ms of processor time")
    set_title(axes, "What a call costs")
