"""The two pictures: what a step costs at each length, and which needles were found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.tools.million.needles import Found
from kvstore.tools.pictures import BLUE, DPI, GREY, INK, RED, new_figure, set_title


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through times of steps: seconds at no context, seconds a token, and how well it fits."""

    base: float
    slope: float
    r2: float


def fit_steps(found: Found) -> Fit | None:
    """The line through the fastest step of each length; None for fewer than two lengths.

    The fastest: what else runs on a machine makes steps slower, and never faster.
    """
    x = np.array([reached.length for reached in found.reached], float)
    y = np.array([reached.fastest_s for reached in found.reached])
    if len(x) < 2:
        return None
    slope, base = np.polyfit(x, y, 1)
    rest, spread = y - (base + slope * x), y - y.mean()
    return Fit(float(base), float(slope), 1.0 - float(rest @ rest) / max(float(spread @ spread), 1e-12))


def draw_steps(found: Found, path: Path) -> None:
    """Time of a decode step against context, with the line that fits and what the disk alone would take."""
    figure, (axes,) = new_figure()
    lengths = np.array([reached.length for reached in found.reached], float)
    times = [[step.seconds for step in reached.steps] for reached in found.reached]
    fastest = np.array([reached.fastest_s for reached in found.reached])
    cold = [np.median([step.nbytes["ssd"] for step in reached.steps]) for reached in found.reached]
    for length, values in zip(lengths, times, strict=True):
        axes.plot([length] * len(values), values, "o", color=BLUE, alpha=0.25, markersize=4, markeredgewidth=0)
    axes.plot(lengths, fastest, "o", color=BLUE, markersize=7, label="decode step, the fastest; pale: the others")
    fit = fit_steps(found)
    if fit is not None:
        ends = np.array([0.0, lengths[-1] * 1.03])
        label = f"linear fit, r² = {fit.r2:.4f}, {fit.slope * 1e9:.0f} ns a token"
        axes.plot(ends, fit.base + fit.slope * ends, "-", color=INK, linewidth=1.2, label=label)
    disk = np.array(cold) / found.disk_bytes_per_s
    axes.plot(lengths, disk, "--", color=RED, linewidth=1.2, label="bytes from SSD / disk bandwidth of this run")
    set_title(axes, "Exact attention: what one more token costs")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("seconds a decode step")
    axes.set_xlim(0, lengths[-1] * 1.04)
    axes.set_ylim(0, max(2.5 * fastest.max(), 1.1 * np.median([step for values in times for step in values])))
    axes.xaxis.set_major_formatter(_tokens)
    axes.grid(axis="y", color=GREY, alpha=0.3, linewidth=0.6)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(path, dpi=DPI)


def draw_needles(found: Found, path: Path) -> None:
    """Each needle by depth and length: found or not."""
    figure, (axes,) = new_figure()
    for column, reached in enumerate(found.reached):
        for depth, answer, wanted in reached.answers:
            right = answer == wanted
            axes.plot(column, 100 * depth, "s", color=BLUE if right else RED, markersize=17, markeredgewidth=0)
            axes.annotate(
                "✓" if right else "✗", (column, 100 * depth), ha="center", va="center", color="white", fontsize=11
            )
    right, asked = (sum(values) for values in zip(*((r.right, len(r.answers)) for r in found.reached), strict=True))
    set_title(axes, f"Needles: {right} of {asked} answered with their value")
    axes.set_xticks(range(len(found.reached)), [_tokens(reached.length) for reached in found.reached])
    axes.set_xlim(-0.7, len(found.reached) - 0.3)
    axes.set_ylim(107, -7)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("depth of the needle, %")
    figure.savefig(path, dpi=DPI)


def _tokens(count: float, _: object = None) -> str:
    if count >= 1_000_000:
        return f"{count / 1e6:g} M"
    return f"{count / 1e3:g} k" if count >= 1000 else f"{count:g}"
