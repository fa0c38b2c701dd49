"""The plots: metric against size, and training curves. The same inputs give the same bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy.stats import spearmanr

from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.report.numbers import count, score
from tasks.report.results import CONTROL, DENSE, CandidateResults, Curve, Results
from tasks.report.scale import ScaleOfDense, of_dense, tick_text

# Each is legible on white and on near black.
_COLOURS = (
    "#3f7fd6",
    "#e0791f",
    "#2d9d5f",
    "#d34a5f",
    "#8b68d0",
    "#1fa3a8",
    "#c95fa6",
    "#9a7047",
    "#8c9a1f",
    "#6b7f93",
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_WIDTH = 11  # inches
_COLUMNS = 3  # of panels of training curves, at most
_MEASURES = 4  # panels of measures in a row
_DECADES = 6  # ticks of a logarithmic axis, about
_STROKES: tuple[dict[str, Any], ...] = (  # of keeps, in turn; the first is pale and broad, so that others show on it
    {"linestyle": "-", "linewidth": 2.6, "alpha": 0.6},
    {"linestyle": (0, (5, 1.5)), "linewidth": 1.4},
    {"linestyle": (0, (1, 1)), "linewidth": 1.4},
    {"linestyle": (0, (6, 1.5, 1, 1.5)), "linewidth": 1.4},
    {"linestyle": (0, (3, 3)), "linewidth": 1.4},
    {"linestyle": (0, (9, 2)), "linewidth": 1.4},
)
_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
}


Series = Mapping[str, list[tuple[int, float]]]
"""Keep → its points: step and value."""

Panels = Mapping[str, Series]
"""Title → what is drawn under it."""


@dataclass(frozen=True)
class Palette:
    """The colours that depend on the background."""

    ink: str
    muted: str
    rule: str
    paper: str


_PICTURE = Palette(ink="#1d2530", muted="#5d6876", rule="#dfe3e8", paper="#ffffff")
# Placeholders that no other colour equals; on the page each becomes a variable of its style sheet.
_PAGE = Palette(ink="#010203", muted="#010204", rule="#010205", paper="#010206")


@dataclass(frozen=True)
class Look:
    """The colour and marker of a recipe in all plots."""

    colour: str
    marker: str


def tradeoff_svg(results: Results) -> str:
    """Draw metric against size for the page."""
    return _svg(lambda: _tradeoff(results, _PAGE), "tradeoff")


def tradeoff_png(results: Results) -> bytes:
    """Draw metric against size as a picture."""
    with _style(_PICTURE):
        file = io.BytesIO()
        _tradeoff(results, _PICTURE).savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def curves_svg(results: Results) -> str:
    """Draw the task loss of the original model's training and, for every keep, of each recovery."""
    return _svg(lambda: _curves(results, _PAGE), "curves")


def search_svgs(results: Results) -> dict[str, str]:
    """Draw task loss and measures of shaping and rank search, for each recipe that trains for them."""
    drawn = {}
    for recipe in results.recipes:
        curves = _by_keep(results, recipe, lambda candidate: candidate.search_curve)
        loss = {keep: [(point.step, point.compared_loss) for point in curve] for keep, curve in curves.items()}
        drawn[recipe] = {"task loss": loss, **_measured(curves)} if curves else {}
    return _measures_svgs(results, drawn, "search")


def recovery_svgs(results: Results) -> dict[str, str]:
    """Draw the measures of recovery besides the loss, for each recipe that has some."""
    drawn = {
        recipe: _measured(_by_keep(results, recipe, lambda candidate: candidate.curve)) for recipe in results.recipes
    }
    return _measures_svgs(results, drawn, "recovery")


def predictions_svg(results: Results) -> str | None:
    """Draw predicted against measured loss of every target, a panel per recipe; None where nothing was measured."""
    shown = {recipe: pairs for recipe in results.recipes if (pairs := _predictions(results, recipe))}
    return _svg(partial(_draw_predictions, results, shown, _PAGE), "predictions") if shown else None


def looks(recipes: tuple[str, ...]) -> dict[str, Look]:
    pairs = zip(cycle(_COLOURS), cycle(_MARKERS), strict=False)  # 10 × 9 different ones
    return dict(zip(recipes, (Look(*pair) for pair in islice(pairs, len(recipes))), strict=True))


def _tradeoff(results: Results, palette: Palette) -> Figure:
    figure = Figure(figsize=(_WIDTH, 5.2), layout="constrained")
    axes = figure.add_subplot()
    keeps = sorted(results.keeps, key=float)
    _mark_dense(axes, results, palette)
    for recipe, x, look in _set_apart(results, keeps):
        candidates = sorted(results.of(recipe), key=lambda candidate: float(candidate.keep))
        _draw_recipe(axes, x, candidates, look, palette)
        _draw_intervals(axes, x, candidates, results, look)
    axes.set_xticks(range(len(keeps)), [_size_label(results, keep) for keep in keeps])
    axes.set_xlim(-0.5, len(keeps) - 0.5)
    axes.set_xlabel("size: keep over targets, parameters of the whole model")
    _scale(axes, results)
    figure.legend(handles=_legend(results, palette), loc="outside right upper", labelcolor=palette.ink)
    return figure


def _scale(axes: Axes, results: Results) -> None:
    """Set the axis of the metric: even, or finest at dense where values span more than a decade."""
    notes = ["lower is better"] if results.metric.lower_is_better else []
    values = [
        results.metric_of(DENSE),
        results.metric_of(CONTROL),
        *(candidate.recovered for candidate in results.candidates),
    ]
    values += [candidate.factorized for candidate in results.candidates if candidate.factorized is not None]
    if results.spans_decades(values):
        _widen(axes, of_dense(results.metric_of(DENSE), values))
        notes.append("scale finest at dense")
    note = f"\n({', '.join(notes)})" if notes else ""
    axes.set_ylabel(f"{results.metric.title} on the test split{note}")


def _widen(axes: Axes, scale: ScaleOfDense) -> None:
    axes.set_ylim(scale.bottom, scale.top)  # before the scale, which has no place for the 0 and less of an even one
    axes.set_yscale("function", functions=(scale.stretched, scale.back))
    axes.yaxis.set_major_locator(FixedLocator(scale.ticks()))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))


def _set_apart(results: Results, keeps: list[str]) -> Iterable[tuple[str, list[float], Look]]:
    """Yield every recipe with its places on the axis, side by side, so that no point hides another."""
    step = min(0.1, 0.7 / len(results.recipes))
    for position, (recipe, look) in enumerate(looks(results.recipes).items()):
        shift = step * (position - (len(results.recipes) - 1) / 2)
        yield recipe, [place + shift for place in range(len(keeps))], look


def _mark_dense(axes: Axes, results: Results, palette: Palette) -> None:
    axes.axhline(results.metric_of(DENSE), color=palette.muted, linewidth=1.2)
    axes.axhline(results.metric_of(CONTROL), color=palette.muted, linewidth=1.2, linestyle=":")


def _draw_recipe(axes: Axes, x: list[float], candidates: list[CandidateResults], look: Look, palette: Palette) -> None:
    """Draw factorized hollow and dashed, recovered filled, with a thin line from one to the other."""
    common: dict[str, Any] = {"color": look.colour, "marker": look.marker, "markersize": 6.5}
    scored = [
        (place, candidate.factorized, candidate)
        for place, candidate in zip(x, candidates, strict=True)
        if candidate.factorized is not None
    ]
    for place, before, candidate in scored:
        axes.vlines(place, before, candidate.recovered, color=look.colour, linewidth=0.8, alpha=0.5)
    places, metrics = [place for place, _, _ in scored], [before for _, before, _ in scored]
    axes.plot(places, metrics, linestyle="--", linewidth=0.9, alpha=0.75, markerfacecolor=palette.paper, **common)
    axes.plot(x, [candidate.recovered for candidate in candidates], linewidth=1.8, **common)


def _draw_intervals(
    axes: Axes, x: list[float], candidates: list[CandidateResults], results: Results, look: Look
) -> None:
    """Draw the intervals of the difference from the original model on its line."""
    for place, candidate in zip(x, candidates, strict=True):
        found, dense = results.difference(candidate.after, DENSE), results.metric_of(DENSE)
        axes.vlines(place, dense + found.low, dense + found.high, color=look.colour, linewidth=3, alpha=0.35)


def _size_label(results: Results, keep: str) -> str:
    """Return the keep and, as the recipes differ a little, the range of the whole model's parameters."""
    sizes = sorted(
        candidate.evaluation.size.model_parameters for candidate in results.candidates if candidate.keep == keep
    )
    dense = results.dense.size.model_parameters
    parts = [(count(value), f"{100 * value / dense:.0f} %") for value in (sizes[0], sizes[-1])]
    parameters, share = (" to ".join(dict.fromkeys(pair)) for pair in zip(*parts, strict=True))
    return f"keep {keep}\n{parameters}\n{share}"


def _legend(results: Results, palette: Palette) -> list[Line2D]:
    entry = partial(Line2D, [], [])
    ink: dict[str, Any] = {"color": palette.ink, "marker": "o"}
    muted: dict[str, Any] = {"color": palette.muted, "linewidth": 1.2}
    dense, control = (score(results.metric_of(model)) for model in (DENSE, CONTROL))
    return [
        *(entry(color=look.colour, marker=look.marker, label=name) for name, look in looks(results.recipes).items()),
        entry(**ink, label="recovered"),
        entry(**ink, label="factorized", linestyle="--", markerfacecolor=palette.paper),
        entry(**muted, label=f"dense {dense}"),
        entry(**muted, label=f"{CONTROL_NAME} {control}", linestyle=":"),
    ]


def _grid(panels: int, columns: int, height: float, margin: float = 0.0, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of rows of the same height, with axes for the panels and then the hidden, free ones."""
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(_WIDTH, margin + height * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in places[panels:]:
        axes.set_axis_off()
    return figure, places


def _curves(results: Results, palette: Palette) -> Figure:
    count_of_panels = 1 + len(results.keeps)
    columns = 2 if count_of_panels == 4 else min(_COLUMNS, count_of_panels)
    figure, panels = _grid(count_of_panels, columns, 2.7, margin=0.4, sharey=True)
    _draw_panel(panels[0], "original model", [(results.curve, palette.ink)], palette)
    shown = looks(results.recipes)
    for axes, keep in zip(panels[1:], results.keeps, strict=False):
        at_keep = [candidate for candidate in results.candidates if candidate.keep == keep]
        lines = [(candidate.curve, shown[candidate.recipe].colour) for candidate in at_keep]
        lines.append((results.control_curve, palette.muted))
        _draw_panel(axes, f"recovery at keep {keep}", lines, palette)
    for axes in panels[::columns]:
        axes.set_ylabel("task loss")
    handles = [Line2D([], [], color=look.colour, label=recipe) for recipe, look in shown.items()]
    handles.append(Line2D([], [], color=palette.muted, label=CONTROL_NAME))
    figure.legend(handles=handles, loc="outside right upper", labelcolor=palette.ink)
    return figure


def _draw_panel(axes: Axes, title: str, lines: list[tuple[Curve, str]], palette: Palette) -> None:
    axes.set_title(title, loc="left", fontsize="medium", color=palette.ink)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelleft=True)
    for curve, colour in lines:
        steps, losses = [point.step for point in curve], [point.compared_loss for point in curve]
        axes.plot(steps, losses, color=colour, linewidth=1.4, marker="." if len(curve) == 1 else None)
    if not any(curve for curve, _ in lines):
        axes.text(0.5, 0.5, "no training", transform=axes.transAxes, ha="center", color=palette.muted)


def _by_keep(results: Results, recipe: str, curve_of: Callable[[CandidateResults], Curve]) -> dict[str, Curve]:
    """Return the curves of the candidates of `recipe` that have one, by keep."""
    return {
        candidate.keep: curve_of(candidate)
        for candidate in results.candidates
        if candidate.recipe == recipe and curve_of(candidate)
    }


def _measured(curves: Mapping[str, Curve]) -> Panels:
    """Return a panel for each measure, in the order of its first appearance in the curves."""
    names = dict.fromkeys(name for curve in curves.values() for point in curve for name in point.measures)
    return {
        name: {
            keep: points
            for keep, curve in curves.items()
            if (points := [(point.step, point.measures[name]) for point in curve if name in point.measures])
        }
        for name in names
    }


def _measures_svgs(results: Results, drawn: Mapping[str, Panels], salt: str) -> dict[str, str]:
    return {
        recipe: _svg(partial(_draw_measures, results, recipe, panels, _PAGE), f"{salt} {recipe}")
        for recipe, panels in drawn.items()
        if panels
    }


def _draw_measures(results: Results, recipe: str, panels: Panels, palette: Palette) -> Figure:
    """Draw panels side by side, each with its own scale over the same steps, and a line for each keep."""
    figure, places = _grid(len(panels), _MEASURES, 2.2, sharex=True)
    colour = looks(results.recipes)[recipe].colour
    strokes = {keep: {"color": colour, **stroke} for keep, stroke in zip(results.keeps, cycle(_STROKES), strict=False)}
    for axes, (name, series) in zip(places, panels.items(), strict=False):
        _draw_measure(axes, name, series, strokes, palette)
    free = places[len(panels) :]
    shown = dict.fromkeys(keep for series in panels.values() for keep in series)
    handles = [Line2D([], [], label=f"keep {keep}", **strokes[keep]) for keep in shown]
    beside: Any = free[0] if free else figure
    beside.legend(
        handles=handles, loc="upper left" if free else "outside right upper", handlelength=3, labelcolor=palette.ink
    )
    return figure


def _predictions(results: Results, recipe: str) -> dict[str, list[tuple[float, float]]]:
    """Return by keep the predicted and measured loss of each target that has both, above 0."""
    found: dict[str, list[tuple[float, float]]] = {}
    for candidate in results.of(recipe):
        predicted = candidate.decision.predicted_loss or {}
        both = ((predicted.get(name), target.loss_alone) for name, target in candidate.evaluation.targets.items())
        pairs = [
            (expected, measured) for expected, measured in both if expected and measured and min(expected, measured) > 0
        ]
        if pairs:
            found[candidate.keep] = pairs
    return found


def _draw_predictions(
    results: Results, shown: Mapping[str, Mapping[str, list[tuple[float, float]]]], palette: Palette
) -> Figure:
    """Draw both on logarithmic axes, a marker for each keep, and the line on which they are equal."""
    figure, places = _grid(len(shown), min(_COLUMNS, len(shown)), 3.2, margin=0.4)
    markers = dict(zip(results.keeps, cycle(_MARKERS), strict=False))
    for axes, (recipe, by_keep) in zip(places, shown.items(), strict=False):
        everything = [pair for pairs in by_keep.values() for pair in pairs]
        axes.set_title(f"{recipe}: rank correlation {_rank_correlation(everything):.2f}", loc="left", fontsize="medium")
        axes.set(xscale="log", yscale="log", xlabel="predicted", ylabel="measured")
        for name, values in zip("xy", zip(*everything, strict=True), strict=True):
            _decades(axes, name, values)
        for keep, pairs in by_keep.items():
            predicted, measured = zip(*pairs, strict=True)
            colour = looks(results.recipes)[recipe].colour
            axes.plot(predicted, measured, markers[keep], color=colour, markersize=4, alpha=0.75, linestyle="")
        axes.axline((1, 1), (10, 10), color=palette.muted, linewidth=1)  # equal on both scales
    handles = [
        Line2D([], [], color=palette.ink, marker=markers[keep], linestyle="", label=f"keep {keep}")
        for keep in results.keeps
        if any(keep in by_keep for by_keep in shown.values())
    ]
    handles.append(Line2D([], [], color=palette.muted, linewidth=1, label="equal"))
    figure.legend(handles=handles, loc="outside right upper", labelcolor=palette.ink)
    return figure


def _decades(axes: Axes, name: str, values: Sequence[float]) -> None:
    """Set a logarithmic axis, x or y, from the decade below all `values` to that above, with a few ticks."""
    ends = [math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))]
    step = math.ceil((ends[1] - ends[0]) / _DECADES)
    axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}lim": [10.0**end for end in ends]})
    axis.set_major_locator(FixedLocator([10.0**power for power in range(ends[0], ends[1] + 1, step)]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"1e{math.log10(value):.0f}"))


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation."""
    predicted, measured = np.array(pairs).T
    return float(spearmanr(predicted, measured).statistic)


def _draw_measure(
    axes: Axes, name: str, series: Series, strokes: Mapping[str, Mapping[str, Any]], palette: Palette
) -> None:
    axes.set_title(name, loc="left", fontsize="medium", color=palette.ink)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.tick_params(labelbottom=True)
    for keep, points in series.items():
        steps, values = [step for step, _ in points], [value for _, value in points]
        marker = "." if len(points) == 1 else None
        axes.plot(steps, values, marker=marker, **strokes[keep])


def _tick(value: float) -> str:
    """Format a tick in full, without matplotlib's factor and offset above the axis."""
    return count(value) if value >= 10_000 else f"{value:g}"


def _style(palette: Palette, salt: str = "") -> AbstractContextManager[None]:
    """Set our style on top of matplotlib's defaults, ignoring the user's own settings."""
    inked = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    quiet = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
    colours = {**dict.fromkeys(inked, palette.ink), **dict.fromkeys(quiet, palette.rule)}
    faces = dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), palette.paper)
    # Without a salt of its own, ids in the file are drawn at random.
    return style.context(["default", {**_STYLE, **colours, **faces, "svg.hashsalt": salt}])


def _svg(draw: Callable[[], Figure], salt: str) -> str:
    """Return the bare `<svg>` element of a figure, in the page's colours and fonts."""
    with _style(_PAGE, salt):
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(
        r'<g id="[\w.]+">', "<g>", text
    )  # they would repeat in a page of several plots, and nothing uses them
    text = text.replace("'DejaVu Sans'", "var(--font)")
    for name in ("ink", "muted", "rule", "paper"):
        text = text.replace(getattr(_PAGE, name), f"var(--{name})")
    return text
