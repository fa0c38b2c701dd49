"""Draw the plots: metric against keep, predicted losses and training curves. Equal inputs give identical files.

A plot of several panels is a key and a sequence of `<svg>` elements, which the page arranges in columns.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any, Literal

from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from pydantic import TypeAdapter
from scipy.stats import spearmanr

from eckart.factorization.weightings import Weighting
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import count, score
from tasks.report.perplexity_scale import ScaleOfDense, spans_widely, tick_text
from tasks.report.plot_style import INK, MARKERS, MUTED, RULE, STYLE
from tasks.report.results import CONTROL, DENSE, CandidateResults, Curve, Results
from tasks.report.table import AFTER, BEFORE

# Each color is legible on white and on near black.
_COLORS = (
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
_PAPER = "#ffffff"
_WIDTH, _NARROW = 11, 4.6  # inches
_ENTRY = 0.22  # height of an entry of a legend, in inches
_LONG = 24  # letters of a name, of which two stand beside each other in the narrow plot
_PANEL = (3.9, 2.7)  # width and height of a panel, in inches
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
_STYLE = STYLE | {
    "font.size": 10,
    "axes.grid.axis": "y",
    "axes.titlesize": "medium",
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), _PAPER),
}

Panels = Mapping[str, Mapping[str, list[tuple[int, float]]]]
"""Panels of a plot: title → keep → points (step, value)."""


def tradeoff_svg(results: Results, narrow: bool = False) -> Markup:
    """Draw metric against keep, as SVG for the page in a wide or a narrow window."""
    return _svg(partial(_tradeoff, results, narrow), f"tradeoff {narrow}")


def tradeoff_png(results: Results) -> bytes:
    """Draw metric against keep, as a PNG file."""
    with style.context(["default", _STYLE]):
        file = io.BytesIO()
        _tradeoff(results).savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def curves_svg(results: Results) -> Markup:
    """Draw the task loss: a panel for the training of the original model, and one for the fine-tunings at each keep.

    Empty if nothing was trained.
    """
    looks = _looks(results.recipes)
    lines: dict[str, list[tuple[Curve, str]]] = {"original model": [(results.curve, INK)]}
    for keep in results.keeps:
        recovered = [(candidate.curve, looks[candidate.recipe]["color"]) for candidate in results.at(keep)]
        lines[f"fine-tuning at keep {keep}"] = [*recovered, (results.control_curve, MUTED)]
    losses = [point.compared_loss for panel in lines.values() for curve, _ in panel for point in curve]
    if not losses:
        return Markup("")
    limits = min(losses), max(losses)
    draw = (partial(_draw_curves, title, panel, limits) for title, panel in lines.items())
    key = _key(*(_entry(recipe, look["color"]) for recipe, look in looks.items()), _entry("control", MUTED))
    return key + _panels(draw, "curves")


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
            plots[recipe] = _measures(results, recipe, panels, f"{curve} {recipe}")
    return plots


def predictions_svg(results: Results) -> Markup | None:
    """Draw, for each target, how far predictions move if only it is factorized, against the predicted loss.

    Each recipe has a panel. Return None if nothing was measured.
    """
    shown = predicted_and_measured(results)
    if not shown:
        return None
    colors = dict(zip(results.keeps, cycle(_COLORS), strict=False))
    keeps = [keep for keep in results.keeps if any(keep in by_keep for by_keep in shown.values())]
    key = _key(*(_entry(f"keep {keep}", colors[keep], "dot") for keep in keeps), _entry("equal", MUTED))
    return key + _panels(
        (partial(_predictions, results, recipe, shown[recipe], colors) for recipe in shown), "predictions"
    )


def _looks(recipes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the color and marker of each recipe in all plots."""
    looks = zip(recipes, cycle(_COLORS), cycle(MARKERS), strict=False)
    return {recipe: {"color": color, "marker": marker} for recipe, color, marker in looks}


def _tradeoff(results: Results, narrow: bool = False) -> Figure:
    entries = _legend(results)
    columns = 2 if max(len(recipe) for recipe in results.recipes) <= _LONG else 1
    height = 5.0 + _ENTRY * math.ceil(len(entries) / columns) if narrow else max(5.2, _ENTRY * (len(entries) + 1))
    figure = Figure(figsize=(_NARROW if narrow else _WIDTH, height), layout="constrained")
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
    axes.set_xlabel("keep, and parameters of the whole model")
    factorized = [candidate.factorized for candidate in results.candidates if candidate.factorized is not None]
    axes.set_ylabel(_scale(axes, results, factorized))
    place: dict[str, Any] = (
        {"loc": "outside lower left", "ncols": columns} if narrow else {"loc": "outside right upper"}
    )
    figure.legend(handles=entries, **place)
    return figure


def _scale(axes: Axes, results: Results, more: Sequence[float] = ()) -> str:
    """Set limits and scale of the y axis, so that it shows all recovered metrics and `more`; return its label.

    The scale is linear, or a `ScaleOfDense` if the values span more than a factor of ten.
    """
    notes = ["lower is better"] if results.metric.lower_is_better else []
    dense = results.metric_of(DENSE)
    values = [dense, results.metric_of(CONTROL), *(candidate.recovered for candidate in results.candidates), *more]
    if spans_widely(results.metric, values):
        scale = ScaleOfDense(dense)
        limits = scale.limits(values)
        axes.set_ylim(*limits)  # set first, because ScaleOfDense cannot show values ≤ 0, which a linear axis may have
        axes.set_yscale("function", functions=(scale.stretched, scale.back))
        axes.yaxis.set_major_locator(FixedLocator(scale.ticks(*limits)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
        notes.append("scale finest at the original")
    note = f"\n({', '.join(notes)})" if notes else ""
    return f"{results.metric.title} on test examples{note}"


def _mark_dense(axes: Axes, results: Results) -> None:
    axes.axhline(results.metric_of(DENSE), color=MUTED, linewidth=1.2)
    axes.axhline(results.metric_of(CONTROL), color=MUTED, linewidth=1.2, linestyle=":")


def _draw_recipe(axes: Axes, x: list[float], candidates: list[CandidateResults], look: Mapping[str, Any]) -> None:
    """Draw the metrics of a recipe: before fine-tuning dashed with hollow markers, after it solid with filled ones.

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
    axes: Axes, x: Sequence[float], candidates: list[CandidateResults], results: Results, color: str
) -> None:
    """Draw the interval of each candidate's difference from the original model, shifted by the original's metric."""
    for place, candidate in zip(x, candidates, strict=True):
        ends, dense = results.difference(candidate.after, DENSE), results.metric_of(DENSE)
        axes.vlines(place, dense + ends.low, dense + ends.high, color=color, linewidth=3, alpha=0.35)


def _size_label(results: Results, keep: str) -> str:
    """Return the axis label of a keep: the keep, and the parameters of the whole model as a range over the recipes."""
    sizes = sorted(candidate.evaluation.size.model_parameters for candidate in results.at(keep))
    dense = results.dense.size.model_parameters
    parts = [(count(value), f"{100 * value / dense:.0f} %") for value in (sizes[0], sizes[-1])]
    parameters, share = (" to ".join(dict.fromkeys(pair)) for pair in zip(*parts, strict=True))
    return f"keep {keep}\n{parameters}\n{share}"


def _legend(results: Results) -> list[Line2D]:
    entry = partial(Line2D, [], [])
    ink: dict[str, Any] = {"color": INK, "marker": "o"}
    return [
        *(entry(label=name, **look) for name, look in _looks(results.recipes).items()),
        entry(**ink, label=AFTER),
        entry(**ink, label=BEFORE, linestyle="--", markerfacecolor=_PAPER),
        entry(color=MUTED, linewidth=1.2, label=f"original {score(results.metric_of(DENSE))}"),
        entry(color=MUTED, linewidth=1.2, linestyle=":", label=f"control {score(results.metric_of(CONTROL))}"),
    ]


def _panels(draws: Iterable[Callable[[Axes], None]], salt: str) -> Markup:
    """Draw each panel as an SVG of its own."""

    def panel(draw: Callable[[Axes], None]) -> Figure:
        figure = Figure(figsize=_PANEL, layout="constrained")
        draw(figure.add_subplot())
        return figure

    return Markup("").join(_svg(partial(panel, draw), f"{salt} {number}") for number, draw in enumerate(draws))


def _entry(label: str, color: str, kind: Literal["line", "dot"] = "line", dashes: str = "", width: float = 2) -> Markup:
    """Return an entry of a key: a stroke or a dot, and what it stands for."""
    shape = (
        Markup('<circle cx="12" cy="5" r="4" fill="{}"/>').format(_css(color))
        if kind == "dot"
        else Markup('<line x2="24" y1="5" y2="5" stroke="{}" stroke-width="{}" stroke-dasharray="{}"/>').format(
            _css(color), width, dashes
        )
    )
    return Markup('<span><i class="swatch"><svg viewBox="0 0 24 10">{}</svg></i>{}</span>').format(shape, label)


def _key(*entries: Markup) -> Markup:
    return Markup('<div class="key">{}</div>').format(Markup("").join(entries))


def _draw_curves(title: str, lines: list[tuple[Curve, str]], limits: tuple[float, float], axes: Axes) -> None:
    axes.set(title=title, xlabel="step")
    margin = 0.05 * (limits[1] - limits[0]) or 0.1
    axes.set_ylim(limits[0] - margin, limits[1] + margin)  # the same in all panels
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for curve, color in lines:
        steps, losses = [point.step for point in curve], [point.compared_loss for point in curve]
        axes.plot(steps, losses, color=color, linewidth=1.4, marker="." if len(curve) == 1 else None)
    if not any(curve for curve, _ in lines):
        axes.text(0.5, 0.5, "no training", transform=axes.transAxes, ha="center", color=MUTED)


def _measures(results: Results, recipe: str, panels: Panels, salt: str) -> Markup:
    """Draw a panel for each measure, with a line for each keep. Panels share the x axis (steps), but not the y axis."""
    color = _looks(results.recipes)[recipe]["color"]
    strokes = {keep: {"color": color, **stroke} for keep, stroke in zip(results.keeps, cycle(_STROKES), strict=False)}
    last = max(step for series in panels.values() for points in series.values() for step, _ in points)
    keeps = dict.fromkeys(keep for series in panels.values() for keep in series)
    entries = []
    for keep in keeps:
        style, width = strokes[keep]["linestyle"], strokes[keep]["linewidth"]
        dashes = "" if isinstance(style, str) else " ".join(f"{width * part:g}" for part in style[1])
        entries.append(_entry(f"keep {keep}", color, "line", dashes, width))

    def draw(name: str, series: Mapping[str, list[tuple[int, float]]], axes: Axes) -> None:
        axes.set(title=name, xlabel="step", xlim=(0, last * 1.05))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        # Write numbers in full: matplotlib would put a common factor and offset above the axis.
        axes.yaxis.set_major_formatter(lambda value, _: count(value) if value >= 10_000 else f"{value:g}")
        for keep, points in series.items():
            axes.plot(*_columns(points), marker="." if len(points) == 1 else None, **strokes[keep])

    return _key(*entries) + _panels((partial(draw, name, series) for name, series in panels.items()), salt)


Pairs = Mapping[str, list[tuple[float, float]]]
"""Keep → (predicted, measured) loss of each target for which both are positive."""


def predicted_and_measured(results: Results) -> dict[str, Pairs]:
    """Return the predicted and measured losses of each recipe that has any."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for candidate in results.candidates:
        predicted = candidate.decision.predicted_loss or {}
        for name, target in candidate.evaluation.targets.items():
            expected, measured = predicted.get(name), target.loss_alone
            if expected and measured and min(expected, measured) > 0:
                found.setdefault(candidate.recipe, {}).setdefault(candidate.keep, []).append((expected, measured))
    return dict(found)


def predictions_read(results: Results) -> list[str]:
    """Say in sentences what the plot of predicted and measured losses shows."""
    objective = kind_of(results.task).objective()
    sentences, others = list[str](), dict[str, float]()
    for recipe, by_keep in predicted_and_measured(results).items():
        predicted, measured = _columns([pair for pairs in by_keep.values() for pair in pairs])
        rank = spearmanr(predicted, measured).statistic if len(predicted) > 1 else math.nan
        if not (objective.classes and _weighting(results, recipe).predicts_loss):
            others |= {} if math.isnan(rank) else {recipe: rank}
            continue
        ratios = [after / before for before, after in zip(predicted, measured, strict=True)]
        above, middle = sum(ratio > 1 for ratio in ratios), median(ratios)
        times = f"{middle:,.1f}" if middle >= 1 else f"{middle:.2g}"
        sentences.append(
            f"{recipe}: the measured loss is {times} times the predicted one at the median, and larger "
            f"at {above} of {len(ratios)} points."
            + ("" if math.isnan(rank) else f" The rank correlation is {rank:.2f}.")
        )
    if others:
        named = ", ".join(f"{recipe} {rank:.2f}" for recipe, rank in others.items())
        sentences.append(
            f"Other weightings predict in other units, so that only the order of the layers counts. Their rank "
            f"correlations: {named}."
        )
    return sentences


def _weighting(results: Results, recipe: str) -> Weighting:
    weighting: Weighting = TypeAdapter(Weighting).validate_python(results.settings.recipes[recipe]["weighting"])
    return weighting


def _predictions(results: Results, recipe: str, by_keep: Pairs, colors: Mapping[str, str], axes: Axes) -> None:
    """Draw measured against predicted losses on logarithmic axes, with the line of equality, and a color per keep."""
    weighting, classes = _weighting(results, recipe), kind_of(results.task).objective().classes
    predicted, measured = _columns([pair for pairs in by_keep.values() for pair in pairs])
    axes.set(title=recipe, xscale="log", yscale="log")
    axes.set_xlabel("\n".join(["predicted:", *textwrap.wrap(weighting.loss_unit, 36)]))
    axes.set_ylabel("measured: nats" if classes else "measured: squared error")
    _decades(axes, "x", predicted)
    _decades(axes, "y", measured)
    for keep, pairs in by_keep.items():
        axes.plot(*_columns(pairs), "o", color=colors[keep], markersize=4.5, alpha=0.75, markeredgewidth=0)
    if classes and weighting.predicts_loss:
        axes.axline((1, 1), (10, 10), color=MUTED, linewidth=1)  # the line of equality


def _decades(axes: Axes, name: Literal["x", "y"], values: Sequence[float]) -> None:
    """Set the limits of a logarithmic axis to powers of ten around all `values`, with ticks at a few powers of ten."""
    ends = [math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))]
    ends[1] += ends[0] == ends[1]
    step = math.ceil((ends[1] - ends[0]) / _DECADES)
    axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}lim": [10.0**end for end in ends]})
    axis.set_major_locator(FixedLocator([10.0**power for power in range(ends[0], ends[1] + 1, step)]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"1e{math.log10(value):.0f}"))


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _svg(draw: Callable[[], Figure], salt: str) -> Markup:
    """Return the `<svg>` element of a figure, with the page's colors and font. Matplotlib has escaped all text."""
    with style.context(["default", {**_STYLE, "svg.hashsalt": salt}]):  # otherwise ids in the file would be random
        file = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        draw().savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # Drop ids that nothing refers to: they would occur several times on a page with several plots.
    text = re.sub(r'<g id="[\w.]+">', "<g>", text).replace("'DejaVu Sans'", "var(--font)")
    return Markup(_css(text))


def _css(text: str) -> str:
    """Replace colors with variables of the page's style sheet."""
    for name, color in {"ink": INK, "muted": MUTED, "rule": RULE, "paper": _PAPER}.items():
        text = text.replace(color, f"var(--{name})")
    return text
