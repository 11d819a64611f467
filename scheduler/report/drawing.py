"""What the report's plots share: colours, letters and the way to SVG. Same figure, same bytes; no state outside it."""

from __future__ import annotations

import io
import re
from html import escape
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK: Final = "#1f2933"
MUTED: Final = "#66727f"
GRID: Final = "#e3e8ed"
BLUE: Final = "#1b6ac9"
GREY: Final = "#8a97a5"
GREEN: Final = "#1a7f4b"
PAPER: Final = "#ffffff"
#: The page's variables for these colours, so that a plot is light or dark with its page.
VARIABLES: Final = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    BLUE: "--blue",
    GREEN: "--green",
    GREY: "--grey",
    PAPER: "--paper",
}
WIDTH_IN: Final = 4.7  # narrow, so that the letters stay readable on a phone

STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.titlesize": 9.0,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.unicode_minus": False,
}


def short(name: str, num_chars: int) -> str:
    """A name, cut to so many characters."""
    return name if len(name) <= num_chars else name[: num_chars - 1] + "…"


def bare(axes: Axes, grid: str) -> None:
    """Axes without a frame, with grid lines across `grid`, x or y."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if grid == "x" else "y", color=GRID, linewidth=0.8)


def svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an SVG element; its ids begin with `name`, because two plots share a page."""
    FigureCanvasSVG(figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = out.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, count=1, flags=re.DOTALL)
    drawn = re.sub(r' (width|height)="[\d.]+pt"', "", drawn, count=2)
    drawn = re.sub(r'(\bid="|xlink:href="#|url\(#)', rf"\g<1>{name}-", drawn)
    drawn = re.sub("|".join(VARIABLES), lambda found: f"var({VARIABLES[found[0]]})", drawn)
    text = escape(alt, quote=True)
    return drawn.replace("<svg", f'<svg role="img" aria-label="{text}"', 1).strip()
