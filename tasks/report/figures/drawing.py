"""Draw plots and patterns as PNG and SVG files for print: equal inputs give identical files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from tasks.report.figures.plot import CONTROL, ORIGINAL, Figure, Line, Pattern, Plot, labels_of
from tasks.report.plot_style import INK, MARKERS, MUTED, file_of, looks, set_ticks, tick_number

Format = Literal["png", "svg"]

# Okabe and Ito's colors, which people with any color vision tell apart, without yellow; marks and dashes differ as well
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5539")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (3, 3)))
_FIXED: Mapping[str, dict[str, Any]] = {
    ORIGINAL: {"color": INK, "marker": "o", "linestyle": "-"},
    CONTROL: {"color": MUTED, "marker": ".", "linestyle": (0, (1, 1.5))},
}
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 11,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "savefig.dpi": 200,
}
_SINGLE, _PANEL = (6.2, 4.0), (3.1, 2.3)  # width and height of a single panel and of one of several, in inches
_ACROSS = 3  # most panels side by side
_BESIDE = 4.0  # points between marks at the same x
_CHARACTERS = 13  # of a text in an inch
_LARGEST = 1e250  # of what is drawn: beyond it, matplotlib's margins overflow


def draw(figure: Figure, kind: Format) -> bytes:
    """Return the file of a figure."""
    settings = _STYLE | {"svg.hashsalt": figure.name}  # otherwise ids would be random
    unsaid = ["Software"] if kind == "png" else ["Date", "Creator"]
    return file_of(lambda: _plot(figure) if isinstance(figure, Plot) else _pattern(figure), kind, settings, unsaid)


def _canvas(panels: int, title: str, panel: tuple[float, float], same_y: bool = False) -> tuple[Canvas, list[Axes]]:
    """Return a canvas with a title, and its empty panels."""
    columns = min(panels, _ACROSS)
    rows = math.ceil(panels / columns)
    canvas = Canvas(figsize=(columns * panel[0], rows * panel[1] + 0.8), layout="constrained")
    wide = round(columns * panel[0] * 10)  # characters in a line
    canvas.suptitle("\n".join(textwrap.wrap(title, wide)), x=0.01, ha="left", fontweight="bold")
    grid = canvas.subplots(rows, columns, squeeze=False, sharey=same_y)
    for axes in grid.flat[panels:]:
        axes.set_axis_off()
    return canvas, [*grid.flat[:panels]]


def _plot(plot: Plot) -> Canvas:
    panel = _PANEL if len(plot.panels) > 1 else _SINGLE
    canvas, grid = _canvas(len(plot.panels), plot.title, panel, plot.same_y)
    columns = min(len(grid), _ACROSS)
    for number, (axes, title) in enumerate(zip(grid, plot.panels, strict=True)):
        _panel(axes, plot, title, panel[0])
        axes.set_xlabel(plot.x if number + columns >= len(grid) else "")
        axes.set_ylabel(plot.y if number % columns == 0 else "")
    _legend(canvas, plot, columns * panel[0])
    return canvas


def _panel(axes: Axes, plot: Plot, title: str, width: float) -> None:
    lines, looks_of = plot.panels[title], _looks(plot)
    axes.set_title(title)
    for label, height in plot.levels.get(title, {}).items():
        axes.axhline(min(height, _LARGEST), **_level(label))
    together = _scale(axes, plot, lines)
    if together:
        axes.margins(x=0.08 + _BESIDE * len(lines) / 2 / 72 / width)  # else the outer marks would be cut off
    for position, (label, line) in enumerate(lines.items()):
        away = _BESIDE * (position - (len(lines) - 1) / 2) if together and line.low else 0.0
        _line(axes, plot, _finite(line), looks_of[label], away)


def _finite(line: Line) -> Line:
    """Return a line whose values can be drawn: a larger one, the perplexity of a collapsed model, becomes the limit."""
    parts = {"y": line.y, "low": line.low, "high": line.high}
    return line.model_copy(update={name: tuple(min(y, _LARGEST) for y in part) for name, part in parts.items() if part})


def _looks(plot: Plot) -> dict[str, dict[str, Any]]:
    """Return label → color, marker and dashes. Plots that have the same `order` give its labels the same look."""
    free = [label for label in dict.fromkeys([*plot.order, *labels_of(plot)]) if label not in _FIXED]
    return {**looks(free, color=_COLORS, marker=MARKERS, linestyle=_DASHES), **_FIXED}


def _look(plot: Plot, look: Mapping[str, Any]) -> dict[str, Any]:
    dashes = "-" if plot.steps else look["linestyle"]
    return {**look, "marker": look["marker"] if plot.marks else None, "linestyle": dashes}


def _line(axes: Axes, plot: Plot, line: Line, look: Mapping[str, Any], away: float) -> None:
    """Draw a line, shifted to the right by some points of the page.

    Matplotlib leaves shifted lines out of the limits of the axes, so their points are added here.
    """
    beside = ScaledTranslation(away / 72, 0, axes.figure.dpi_scale_trans)
    place: dict[str, Any] = {"transform": axes.transData + beside}
    shown = _look(plot, look) if len(line.x) > 1 else look
    if plot.steps:
        axes.step(line.x, line.y, where="post", **{**shown, "linewidth": 1}, **place)
        axes.fill_between(line.x, line.y, step="post", color=look["color"], alpha=0.25, linewidth=0)
    else:
        axes.plot(line.x, line.y, **shown, **place)
    axes.update_datalim([*zip(line.x, line.y, strict=True)])
    if line.low and line.high:
        if plot.marks:
            axes.vlines(line.x, line.low, line.high, color=look["color"], linewidth=3, alpha=0.3, **place)
        else:
            axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.18, linewidth=0)
        axes.update_datalim([*zip(line.x, line.low, strict=True), *zip(line.x, line.high, strict=True)])
    axes.autoscale_view()


def _level(label: str) -> dict[str, Any]:
    dashes = _FIXED[CONTROL]["linestyle"] if label == CONTROL else (0, (4, 2))
    return {"color": MUTED, "linewidth": 1, "linestyle": dashes}


def _scale(axes: Axes, plot: Plot, lines: Mapping[str, Line]) -> bool:
    """Set scales and ticks, and return whether lines share a few x, at which their points would hide one another."""
    xs = sorted({x for line in lines.values() for x in line.x})
    apart = min((b - a for a, b in pairwise(xs)), default=0.0)
    together = plot.marks and 1 < len(xs) <= 6 and apart > 0.06 * (xs[-1] - xs[0])
    if together:
        axes.xaxis.set_major_locator(FixedLocator(xs))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=bool(xs) and all(x == round(x) for x in xs)))
    if not xs or xs[-1] > 1e-3:  # else matplotlib writes a power of ten once, at the end of the axis
        axes.xaxis.set_major_formatter(lambda value, _: tick_number(value, 4))
    if plot.logarithmic:
        axes.set_yscale("log")
        ys = [y for line in lines.values() for y in line.y if y > 0]
        few = bool(ys) and max(ys) < 1000 * min(ys)  # decades, so that there is room for numbers between them
        set_ticks(axes.yaxis, LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)), tick_number)
    return together


def _legend(canvas: Canvas, plot: Plot, width: float) -> None:
    """Draw the legend below the plot, unless it would have one entry."""
    entry, looks_of = partial(Line2D, [], []), _looks(plot)
    handles = [entry(label=label, **_look(plot, looks_of[label])) for label in labels_of(plot)]
    levels = dict.fromkeys(chain.from_iterable(plot.levels.values()))
    handles += [entry(label=label, **_level(label)) for label in levels]
    if len(handles) > 1:
        longest = max(len(str(handle.get_label())) for handle in handles)
        columns = max(1, min(len(handles), int(width * _CHARACTERS / (longest + 8))))
        canvas.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=2.6)


def _pattern(pattern: Pattern) -> Canvas:
    shapes = [mask.shape for mask in pattern.panels.values()]
    tall = max(height / width for height, width in shapes)
    canvas, grid = _canvas(len(pattern.panels), pattern.title, (3.1, 3.1 * min(tall, 2)))
    for axes, (title, mask) in zip(grid, pattern.panels.items(), strict=True):
        axes.imshow(mask, cmap="Greys", vmin=0, vmax=1, aspect="equal", interpolation="antialiased", rasterized=True)
        axes.set(title=title, xlabel="input", ylabel="output (row)")
        axes.grid(visible=False)
        for side in axes.spines.values():
            side.set_visible(True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
    return canvas
