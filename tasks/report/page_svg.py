"""Make SVG elements of plots for the page, in the colors and the font of its style sheet.

A plot of several panels is a key and a sequence of `<svg>` elements, which the page arranges in columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.report.plot_style import INK, MARKERS, MUTED, RULE, file_of, looks
from tasks.report.results import Results

COLORS = (  # each is legible on white and on near black
    "#3f7fd6", "#e0791f", "#2d9d5f", "#d34a5f", "#8b68d0", "#1fa3a8", "#c95fa6", "#9a7047", "#8c9a1f", "#6b7f93",
)  # fmt: skip
PAPER = "#ffffff"
PAGE_STYLE = {
    "font.size": 10,
    "axes.grid.axis": "y",
    "axes.titlesize": "medium",
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), PAPER),
}
_PANEL = (3.9, 2.7)  # width and height of a panel, in inches
_UNSAID = ("Date", "Creator", "Format", "Type")


def looks_of_recipes(results: Results) -> dict[str, dict[str, Any]]:
    """Return the color and marker of each recipe in all plots."""
    return looks(results.recipes, color=COLORS, marker=MARKERS)


def svg(draw: Callable[[], Figure], salt: str) -> Markup:
    """Return the `<svg>` element of a figure. Matplotlib has escaped all text.

    Elements of equal `salt` have equal ids, those of different salts different ones.
    """
    text = file_of(draw, "svg", PAGE_STYLE | {"svg.hashsalt": salt}, _UNSAID, transparent=True).decode()
    text = text[text.index("<svg") :]
    # Drop ids that nothing refers to: they would occur several times on a page with several plots.
    text = re.sub(r'<g id="[\w.]+">', "<g>", text).replace("'DejaVu Sans'", "var(--font)")
    return Markup(_css(text))


def panel_svgs(draws: Iterable[Callable[[Axes], None]], salt: str) -> Markup:
    """Draw each panel as an SVG of its own."""

    def panel(draw: Callable[[Axes], None]) -> Figure:
        figure = Figure(figsize=_PANEL, layout="constrained")
        draw(figure.add_subplot())
        return figure

    return Markup("").join(svg(partial(panel, draw), f"{salt} {number}") for number, draw in enumerate(draws))


def key(*entries: Markup) -> Markup:
    """Return the key of a plot of several panels."""
    return Markup('<div class="key">{}</div>').format(Markup("").join(entries))


def entry(
    label: str, color: str, dashes: Sequence[float] = (), width: float = 2, kind: Literal["line", "dot"] = "line"
) -> Markup:
    """Return an entry of a key: a stroke, whose dashes are multiples of its width, or a dot; and what it stands for."""
    line = '<line x2="24" y1="5" y2="5" stroke="{}" stroke-width="{}" stroke-dasharray="{}"/>'
    shape = Markup('<circle cx="12" cy="5" r="4" fill="{}"/>' if kind == "dot" else line)
    drawn = shape.format(_css(color), width, " ".join(f"{width * part:g}" for part in dashes))
    return Markup('<span><i class="swatch"><svg viewBox="0 0 24 10">{}</svg></i>{}</span>').format(drawn, label)


def _css(text: str) -> str:
    """Replace colors with variables of the page's style sheet."""
    for name, color in {"ink": INK, "muted": MUTED, "rule": RULE, "paper": PAPER}.items():
        text = text.replace(color, f"var(--{name})")
    return text
