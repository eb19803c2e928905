"""How pictures of the tools look: one figure, quiet axes, four colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, BLUE, RED, GREY = "#1f2933", "#2563a8", "#c0392b", "#9aa5b1"
DPI: Final = 150


def new_figure(columns: int = 1, size: tuple[float, float] = (8, 4.8)) -> tuple[Figure, list[Axes]]:
    """A white figure with ``columns`` axes beside each other, ``size`` in inches."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = list(figure.subplots(1, columns, squeeze=False)[0])
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(GREY)
        axes.tick_params(colors=INK, labelsize=9)
    return figure, panels


def set_title(axes: Axes, title: str) -> None:
    """A title over the left end of the axes."""
    axes.set_title(title, loc="left", color=INK, fontsize=13, pad=14)
