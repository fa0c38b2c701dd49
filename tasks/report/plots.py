"""Draw the plots: metric against keep and costs, and training curves. Equal inputs give identical files."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, Literal

from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from scipy.stats import spearmanr

from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.report.numbers import count, score, size
from tasks.report.results import CONTROL, DENSE, CandidateResults, Curve, Results
from tasks.report.scale import ScaleOfDense, tick_text

# Each colour is legible on white and on near black.
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
# On the page these are replaced by variables of its style sheet.
_INK, _MUTED, _RULE, _PAPER = "#1d2530", "#5d6876", "#dfe3e8", "#ffffff"
_WIDTH = 11  # inches
_COLUMNS = 3  # largest number of panels in a row
_MEASURES = 4  # number of panels in a row, for plots of measures
_DECADES = 6  # approximate number of ticks on a logarithmic axis
# Line styles of keeps. The first is pale and wide, so that other lines on top of it are visible.
_STROKES: tuple[dict[str, Any], ...] = (
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
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor"), _INK
    ),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _RULE),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), _PAPER),
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
}

Panels = Mapping[str, Mapping[str, list[tuple[int, float]]]]
"""Panels of a plot: title → keep → points (step, value)."""


def tradeoff_svg(results: Results) -> Markup:
    """Draw metric against keep, as SVG for the page."""
    return _svg(partial(_tradeoff, results), "tradeoff")


def tradeoff_png(results: Results) -> bytes:
    """Draw metric against keep, as a PNG file."""
    with style.context(["default", _STYLE]):
        file = io.BytesIO()
        _tradeoff(results).savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def costs_svg(results: Results) -> Markup:
    """Draw metric against each cost. The marker of a candidate shows its name and links to its details."""
    svg = str(_svg(partial(_costs, results), "costs"))
    return Markup(re.sub(r'<a xlink:href="#([^"]+)" target="_blank">', r'<a xlink:href="#\1"><title>\1</title>', svg))


def curves_svg(results: Results) -> Markup:
    """Draw the task loss: a panel for the training of the original model, and one for the recoveries at each keep."""
    return _svg(partial(_curves, results), "curves")


def measures_svgs(results: Results, curve: Literal["search_curve", "curve"]) -> dict[str, Markup]:
    """Return recipe → plot of the measures in its training curves, for the recipes that have any.

    In plots of shaping and rank search (`search_curve`), a further panel shows the task loss.
    """
    plots = {}
    for recipe in results.recipes:
        panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for candidate in results.of(recipe):
            for point in getattr(candidate, curve):
                loss = {"task loss": point.compared_loss} if curve == "search_curve" else {}
                for name, value in (loss | point.measures).items():
                    panels.setdefault(name, {}).setdefault(candidate.keep, []).append((point.step, value))
        if panels:
            plots[recipe] = _svg(partial(_measures, results, recipe, panels), f"{curve} {recipe}")
    return plots


def predictions_svg(results: Results) -> Markup | None:
    """Draw the measured against the predicted increase of the loss if only one target is factorized, for each target.

    Each recipe has a panel. Return None if no increase was measured.
    """
    shown = {recipe: pairs for recipe in results.recipes if (pairs := _predicted_and_measured(results, recipe))}
    return _svg(partial(_predictions, results, shown), "predictions") if shown else None


def _looks(recipes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and marker of each recipe in all plots."""
    looks = zip(recipes, cycle(_COLOURS), cycle(_MARKERS), strict=False)
    return {recipe: {"color": colour, "marker": marker} for recipe, colour, marker in looks}


def _tradeoff(results: Results) -> Figure:
    figure = Figure(figsize=(_WIDTH, 5.2), layout="constrained")
    axes = figure.add_subplot()
    keeps = sorted(results.keeps, key=float)
    _mark_dense(axes, results)
    step = min(0.1, 0.7 / len(results.recipes))  # recipes are side by side, so that no point hides another
    for position, (recipe, look) in enumerate(_looks(results.recipes).items()):
        shift = step * (position - (len(results.recipes) - 1) / 2)
        x = [place + shift for place in range(len(keeps))]
        candidates = sorted(results.of(recipe), key=lambda candidate: float(candidate.keep))
        _draw_intervals(axes, x, candidates, results, look["color"])
        _draw_recipe(axes, x, candidates, look)
    axes.set_xticks(range(len(keeps)), [_size_label(results, keep) for keep in keeps])
    axes.set_xlim(-0.5, len(keeps) - 0.5)
    axes.set_xlabel("size: keep over targets, parameters of the whole model")
    factorized = [candidate.factorized for candidate in results.candidates if candidate.factorized is not None]
    axes.set_ylabel(_scale(axes, results, factorized))
    figure.legend(handles=_legend(results), loc="outside right upper")
    return figure


def _scale(axes: Axes, results: Results, more: Sequence[float] = ()) -> str:
    """Set limits and scale of the y axis, so that it shows all recovered metrics and `more`; return its label.

    The scale is linear, or a `ScaleOfDense` if the values span more than a factor of ten.
    """
    notes = ["lower is better"] if results.metric.lower_is_better else []
    dense = results.metric_of(DENSE)
    values = [dense, results.metric_of(CONTROL), *(candidate.recovered for candidate in results.candidates), *more]
    if not results.metric.bounded and max(values) > 10 * min(values) > 0:
        scale = ScaleOfDense(dense)
        limits = scale.limits(values)
        axes.set_ylim(*limits)  # set first, because ScaleOfDense cannot show values ≤ 0, which a linear axis may have
        axes.set_yscale("function", functions=(scale.stretched, scale.back))
        axes.yaxis.set_major_locator(FixedLocator(scale.ticks(*limits)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
        notes.append("scale finest at dense")
    note = f"\n({', '.join(notes)})" if notes else ""
    return f"{results.metric.title} on the test split{note}"


def _mark_dense(axes: Axes, results: Results) -> None:
    axes.axhline(results.metric_of(DENSE), color=_MUTED, linewidth=1.2)
    axes.axhline(results.metric_of(CONTROL), color=_MUTED, linewidth=1.2, linestyle=":")


def _draw_recipe(axes: Axes, x: list[float], candidates: list[CandidateResults], look: Mapping[str, Any]) -> None:
    """Draw the metrics of a recipe: factorized as a dashed line with hollow markers, recovered solid with filled ones.

    A thin vertical line joins the two metrics of each candidate.
    """
    before = []
    for place, candidate in zip(x, candidates, strict=True):
        if candidate.factorized is not None:
            before.append((place, candidate.factorized))
            axes.vlines(place, candidate.factorized, candidate.recovered, color=look["color"], linewidth=0.8, alpha=0.5)
    common: dict[str, Any] = {**look, "markersize": 6.5}
    axes.plot(*_columns(before), linestyle="--", linewidth=0.9, alpha=0.75, markerfacecolor=_PAPER, **common)
    axes.plot(x, [candidate.recovered for candidate in candidates], linewidth=1.8, **common)


def _draw_intervals(
    axes: Axes, x: Sequence[float], candidates: list[CandidateResults], results: Results, colour: str
) -> None:
    """Draw the interval of each candidate's difference from the original model, shifted by the original's metric."""
    for place, candidate in zip(x, candidates, strict=True):
        ends, dense = results.difference(candidate.after, DENSE), results.metric_of(DENSE)
        axes.vlines(place, dense + ends.low, dense + ends.high, color=colour, linewidth=3, alpha=0.35)


def _size_label(results: Results, keep: str) -> str:
    """Return the axis label of a keep: the keep, and the parameters of the whole model as a range over the recipes."""
    sizes = sorted(candidate.evaluation.size.model_parameters for candidate in results.at(keep))
    dense = results.dense.size.model_parameters
    parts = [(count(value), f"{100 * value / dense:.0f} %") for value in (sizes[0], sizes[-1])]
    parameters, share = (" to ".join(dict.fromkeys(pair)) for pair in zip(*parts, strict=True))
    return f"keep {keep}\n{parameters}\n{share}"


def _legend(results: Results) -> list[Line2D]:
    entry = partial(Line2D, [], [])
    ink: dict[str, Any] = {"color": _INK, "marker": "o"}
    return [
        *(entry(label=name, **look) for name, look in _looks(results.recipes).items()),
        entry(**ink, label="recovered"),
        entry(**ink, label="factorized", linestyle="--", markerfacecolor=_PAPER),
        entry(color=_MUTED, linewidth=1.2, label=f"dense {score(results.metric_of(DENSE))}"),
        entry(color=_MUTED, linewidth=1.2, linestyle=":", label=f"{CONTROL_NAME} {score(results.metric_of(CONTROL))}"),
    ]


def _costs(results: Results) -> Figure:
    costs = list(_costs_of(results))
    figure, panels = _grid(len(costs), 3.2, margin=0.4, sharey=True)
    looks = _looks(results.recipes)
    for axes, (title, cost, text) in zip(panels, costs, strict=False):
        _mark_dense(axes, results)
        for recipe, look in looks.items():
            candidates = results.of(recipe)
            x = [cost(candidate) for candidate in candidates]
            _draw_intervals(axes, x, candidates, results, look["color"])
            axes.plot(
                x, [candidate.recovered for candidate in candidates], color=look["color"], linewidth=1.2, alpha=0.5
            )
            for place, candidate in zip(x, candidates, strict=True):
                axes.plot(
                    place, candidate.recovered, **look, linestyle="", markersize=7, zorder=3, url=f"#{candidate.name}"
                )
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _, text=text: text(value)))
        axes.tick_params(labelleft=True)
    panels[0].set_ylabel(_scale(panels[0], results))
    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def _costs_of(results: Results) -> Iterator[tuple[str, Callable[[CandidateResults], float], Callable[[float], str]]]:
    """Yield for each cost its title, a function that returns a candidate's cost, and a function that formats ticks."""
    yield "size of the weights", lambda candidate: candidate.evaluation.size.bytes, lambda value: size(round(value))
    yield "multiply-accumulates per token", lambda candidate: candidate.evaluation.size.macs_per_token, count
    for shape in results.candidates[0].benchmark.latency["candidate"]["torch"]:
        title = f"time at {shape.replace('x', ' × ')} ÷ the original’s"
        yield title, partial(_relative_time, shape), tick_text


def _relative_time(shape: str, candidate: CandidateResults) -> float:
    return 1 / candidate.benchmark.latency["candidate"]["torch"][shape].of_torch.median


def _grid(
    panels: int, height: float, columns: int | None = None, margin: float = 0.0, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes, in a grid. Axes beyond the number of panels come last and are hidden.

    The figure is as high as its rows and a margin, in inches. `shared` are arguments of `subplots`, such as sharex.
    """
    columns = columns or (2 if panels == 4 else min(_COLUMNS, panels))
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(_WIDTH, margin + height * rows), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in places[panels:]:
        axes.set_axis_off()
    return figure, places


def _curves(results: Results) -> Figure:
    figure, panels = _grid(1 + len(results.keeps), 2.7, margin=0.4, sharey=True)
    _draw_curves(panels[0], "original model", [(results.curve, _INK)])
    looks = _looks(results.recipes)
    for axes, keep in zip(panels[1:], results.keeps, strict=False):
        at_keep = [candidate for candidate in results.candidates if candidate.keep == keep]
        lines = [(candidate.curve, looks[candidate.recipe]["color"]) for candidate in at_keep]
        _draw_curves(axes, f"recovery at keep {keep}", [*lines, (results.control_curve, _MUTED)])
    panels[0].set_ylabel("task loss")
    handles = [Line2D([], [], color=look["color"], label=recipe) for recipe, look in looks.items()]
    handles.append(Line2D([], [], color=_MUTED, label=CONTROL_NAME))
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def _draw_curves(axes: Axes, title: str, lines: list[tuple[Curve, str]]) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelleft=True)
    for curve, colour in lines:
        steps, losses = [point.step for point in curve], [point.compared_loss for point in curve]
        axes.plot(steps, losses, color=colour, linewidth=1.4, marker="." if len(curve) == 1 else None)
    if not any(curve for curve, _ in lines):
        axes.text(0.5, 0.5, "no training", transform=axes.transAxes, ha="center", color=_MUTED)


def _measures(results: Results, recipe: str, panels: Panels) -> Figure:
    """Draw a panel for each measure, with a line for each keep. Panels share the x axis (steps), but not the y axis."""
    figure, places = _grid(len(panels), 2.2, columns=_MEASURES, sharex=True)
    colour = _looks(results.recipes)[recipe]["color"]
    strokes = {keep: {"color": colour, **stroke} for keep, stroke in zip(results.keeps, cycle(_STROKES), strict=False)}
    for axes, (name, series) in zip(places, panels.items(), strict=False):
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        # Write numbers in full: matplotlib would put a common factor and offset above the axis.
        axes.yaxis.set_major_formatter(lambda value, _: count(value) if value >= 10_000 else f"{value:g}")
        axes.tick_params(labelbottom=True)
        for keep, points in series.items():
            axes.plot(*_columns(points), marker="." if len(points) == 1 else None, **strokes[keep])
    keeps = dict.fromkeys(keep for series in panels.values() for keep in series)
    handles = [Line2D([], [], label=f"keep {keep}", **strokes[keep]) for keep in keeps]
    free = places[len(panels) :]
    beside: Any = free[0] if free else figure
    beside.legend(handles=handles, loc="upper left" if free else "outside right upper", handlelength=3)
    return figure


def _predicted_and_measured(results: Results, recipe: str) -> dict[str, list[tuple[float, float]]]:
    """Return keep → (predicted, measured) loss of each target for which both are positive."""
    by_keep: dict[str, list[tuple[float, float]]] = {}
    for candidate in results.of(recipe):
        predicted = candidate.decision.predicted_loss or {}
        for name, target in candidate.evaluation.targets.items():
            expected, measured = predicted.get(name), target.loss_alone
            if expected and measured and min(expected, measured) > 0:
                by_keep.setdefault(candidate.keep, []).append((expected, measured))
    return by_keep


def _predictions(results: Results, shown: Mapping[str, Mapping[str, list[tuple[float, float]]]]) -> Figure:
    """Draw measured against predicted losses on logarithmic axes, with the line of equality, and a marker per keep."""
    figure, places = _grid(len(shown), 3.2, margin=0.4)
    markers = dict(zip(results.keeps, cycle(_MARKERS), strict=False))
    for axes, (recipe, by_keep) in zip(places, shown.items(), strict=False):
        predicted, measured = _columns([pair for pairs in by_keep.values() for pair in pairs])
        axes.set_title(f"{recipe}: rank correlation {spearmanr(predicted, measured).statistic:.2f}")
        axes.set(xscale="log", yscale="log", xlabel="predicted", ylabel="measured")
        _decades(axes, "x", predicted)
        _decades(axes, "y", measured)
        colour = _looks(results.recipes)[recipe]["color"]
        for keep, pairs in by_keep.items():
            axes.plot(*_columns(pairs), markers[keep], color=colour, markersize=4, alpha=0.75, linestyle="")
        axes.axline((1, 1), (10, 10), color=_MUTED, linewidth=1)  # the line of equality
    keeps = [keep for keep in results.keeps if any(keep in by_keep for by_keep in shown.values())]
    handles = [Line2D([], [], color=_INK, marker=markers[keep], linestyle="", label=f"keep {keep}") for keep in keeps]
    handles.append(Line2D([], [], color=_MUTED, linewidth=1, label="equal"))
    figure.legend(handles=handles, loc="outside right upper")
    return figure


def _decades(axes: Axes, name: Literal["x", "y"], values: Sequence[float]) -> None:
    """Set the limits of a logarithmic axis to powers of ten around all `values`, with ticks at a few powers of ten."""
    ends = [math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))]
    step = math.ceil((ends[1] - ends[0]) / _DECADES)
    axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}lim": [10.0**end for end in ends]})
    axis.set_major_locator(FixedLocator([10.0**power for power in range(ends[0], ends[1] + 1, step)]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"1e{math.log10(value):.0f}"))


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _svg(draw: Callable[[], Figure], salt: str) -> Markup:
    """Return the `<svg>` element of a figure, with the page's colours and font. Matplotlib has escaped all text."""
    with style.context(["default", {**_STYLE, "svg.hashsalt": salt}]):  # otherwise ids in the file would be random
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # Drop ids that nothing refers to: they would occur several times on a page with several plots.
    text = re.sub(r'<g id="[\w.]+">', "<g>", text).replace("'DejaVu Sans'", "var(--font)")
    for name, colour in {"ink": _INK, "muted": _MUTED, "rule": _RULE, "paper": _PAPER}.items():
        text = text.replace(colour, f"var(--{name})")
    return Markup(text)
