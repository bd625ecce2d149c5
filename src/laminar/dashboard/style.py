"""How pictures look: colours, fonts, grid, the same in all of them. Drawn without a display and without pyplot."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK = "#22272e"
GREY = "#8b949e"
FAINT = "#e4e7eb"
BLUE = "#2f6fb7"
SOFT_BLUE = "#bcd4ee"
GREEN = "#2a9d5c"
ORANGE = "#e07b29"
SOFT_ORANGE = "#f8dcc0"
RED = "#d1343f"

VERSION_COLOURS = ("#4c78a8", "#f2a04b", "#54a27a", "#d8616b", "#7f6bb0", "#5fb3bf", "#d9b53f", "#b5739d")
"""Versions that follow each other have colours that are easy to tell apart; every eighth is the same."""

_STALENESS_COLOURS = ("#2f6fb7", "#69a3d6", "#b9d4ea", "#f6c79b", "#e9924a", "#c9512f", "#8a2b1d")

_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c3c9d0",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": "#5b6570",
    "ytick.color": "#5b6570",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.titlesize": 13,
    "figure.titleweight": "bold",
    "lines.solid_capstyle": "round",
}


@contextmanager
def applied() -> Iterator[None]:
    """Draw in this style inside; matplotlib's own settings are as before afterwards."""
    with matplotlib.rc_context(_RC):
        yield


def figure(rows: int, columns: int, *, width: float, height: float, title: str, **grid: Any) -> tuple[Figure, Any]:
    """A figure with its title at the left, and its axes as `Figure.subplots` gives them; sizes in inches."""
    canvas = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(title, x=0.01, ha="left")
    return canvas, canvas.subplots(rows, columns, **grid)


def version_colour(version: int) -> str:
    """The colour of a weight version."""
    return VERSION_COLOURS[version % len(VERSION_COLOURS)]


def staleness_colour(level: int) -> str:
    """Blue for fresh, red for stale."""
    return _STALENESS_COLOURS[min(level, len(_STALENESS_COLOURS) - 1)]


def second_axis(axes: Axes, label: str, colour: str) -> Axes:
    """An axis of its own for a second quantity, at the right and below what is drawn on the first."""
    second = axes.twinx()
    axes.set_zorder(second.get_zorder() + 1)
    axes.patch.set_visible(False)
    second.set_ylabel(label, color=colour)
    second.grid(visible=False)
    second.spines["right"].set_visible(True)
    return second


def legend(axes: Axes, entries: Sequence[tuple[str, str]], **where: Any) -> None:
    """A legend of lines in these colours."""
    axes.legend([Line2D([], [], color=colour, lw=2) for _, colour in entries], [name for name, _ in entries], **where)
