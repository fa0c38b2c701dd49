"""Draw the metric against keep, before and after fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from tasks.report.numbers import count, score
from tasks.report.page_svg import PAGE_STYLE, PAPER, looks_of_recipes, svg
from tasks.report.perplexity_scale import ScaleOfDense, spans_widely, tick_text
from tasks.report.plot_style import INK, MUTED, file_of, set_ticks
from tasks.report.results import CONTROL, DENSE, Results
from tasks.report.table import AFTER, BEFORE

_WIDTH, _NARROW = 11, 4.6  # inches
_ENTRY = 0.22  # height of an entry of the legend, in inches
_LONG = 24  # letters of a name, of which two stand beside each other in the narrow plot
_LEVELS: Mapping[str, dict[str, Any]] = {
    "original": {"color": MUTED, "linewidth": 1.2},
    "control": {"color": MUTED, "linewidth": 1.2, "linestyle": ":"},
}


def tradeoff_svg(results: Results, narrow: bool = False) -> Markup:
    """Draw metric against keep, as SVG for the page in a wide or a narrow window."""
    return svg(partial(_tradeoff, results, narrow), f"tradeoff {narrow}")


def tradeoff_png(results: Results) -> bytes:
    """Draw metric against keep, as a PNG file."""
    return file_of(partial(_tradeoff, results), "png", PAGE_STYLE, ["Software"], dpi=150)


def _tradeoff(results: Results, narrow: bool = False) -> Figure:
    entries = _legend(results)
    columns = 2 if narrow and max(len(recipe) for recipe in results.recipes) <= _LONG else 1
    height = 5.0 + _ENTRY * math.ceil(len(entries) / columns) if narrow else max(5.2, _ENTRY * (len(entries) + 1))
    figure = Figure(figsize=(_NARROW if narrow else _WIDTH, height), layout="constrained")
    _draw(figure.add_subplot(), results)
    figure.legend(handles=entries, loc="outside lower left" if narrow else "outside right upper", ncols=columns)
    return figure


def _draw(axes: Axes, results: Results) -> None:
    keeps = sorted(results.keeps, key=float)
    for name, level in _levels(results).items():
        axes.axhline(level, **_LEVELS[name])
    step = min(0.1, 0.7 / len(results.recipes))  # recipes are side by side, so that no point hides another
    for position, (recipe, look) in enumerate(looks_of_recipes(results).items()):
        shift = step * (position - (len(results.recipes) - 1) / 2)
        _draw_recipe(axes, [place + shift for place in range(len(keeps))], results, recipe, look)
    axes.set_xticks(range(len(keeps)), [_size_label(results, keep) for keep in keeps])
    axes.set_xlim(-0.5, len(keeps) - 0.5)
    axes.set_xlabel("keep, and parameters of the whole model")
    axes.set_ylabel(_scale(axes, results))


def _levels(results: Results) -> dict[str, float]:
    return {"original": results.metric_of(DENSE), "control": results.metric_of(CONTROL)}


def _scale(axes: Axes, results: Results) -> str:
    """Set limits and scale of the y axis, so that it shows all metrics; return its label.

    The scale is linear, or a `ScaleOfDense` if the values span more than a factor of ten.
    """
    notes = ["lower is better"] if results.metric.lower_is_better else []
    metrics = (metric for each in results.candidates for metric in (each.factorized, each.recovered))
    values = [*_levels(results).values(), *(metric for metric in metrics if metric is not None)]
    if spans_widely(results.metric, values):
        scale = ScaleOfDense(results.metric_of(DENSE))
        limits = scale.limits(values)
        axes.set_ylim(*limits)  # set first, because ScaleOfDense cannot show values ≤ 0, which a linear axis may have
        axes.set_yscale("function", functions=(scale.stretched, scale.back))
        set_ticks(axes.yaxis, FixedLocator(scale.ticks(*limits)), tick_text)
        notes.append("scale finest at the original")
    note = f"\n({', '.join(notes)})" if notes else ""
    return f"{results.metric.title} on test examples{note}"


def _draw_recipe(axes: Axes, x: Sequence[float], results: Results, recipe: str, look: Mapping[str, Any]) -> None:
    """Draw the metrics of a recipe: before fine-tuning dashed with hollow markers, after it solid with filled ones.

    A thin vertical line joins the two metrics of each candidate; a thick one is the interval of its difference from the
    original model, shifted by the original's metric.
    """
    candidates, before = sorted(results.of(recipe), key=lambda candidate: float(candidate.keep)), dict[float, float]()
    for place, candidate in zip(x, candidates, strict=True):
        axes.vlines(place, *results.bar(candidate.after), color=look["color"], linewidth=3, alpha=0.35)
        if candidate.factorized is not None:
            before[place] = candidate.factorized
            axes.vlines(place, before[place], candidate.recovered, color=look["color"], linewidth=0.8, alpha=0.5)
    common: dict[str, Any] = {**look, "markersize": 6.5}
    axes.plot([*before], [*before.values()], linestyle="--", linewidth=0.9, alpha=0.75, markerfacecolor=PAPER, **common)
    axes.plot(x, [candidate.recovered for candidate in candidates], linewidth=1.8, **common)


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
        *(entry(label=name, **look) for name, look in looks_of_recipes(results).items()),
        entry(**ink, label=AFTER),
        entry(**ink, label=BEFORE, linestyle="--", markerfacecolor=PAPER),
        *(entry(**_LEVELS[name], label=f"{name} {score(level)}") for name, level in _levels(results).items()),
    ]
