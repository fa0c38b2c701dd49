"""Compare the loss that was predicted if only one target is factorized with the measured one: a plot and sentences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator
from pydantic import TypeAdapter
from scipy.stats import spearmanr

from eckart.factorization.weightings import Weighting
from tasks.nlp_tasks import kind_of
from tasks.report.page_svg import COLORS, entry, key, panel_svgs
from tasks.report.plot_style import MUTED, looks, set_ticks
from tasks.report.results import Results

_DECADES = 6  # approximate number of ticks on a logarithmic axis

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
        predicted, measured = _all(by_keep)
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


def predictions_svg(results: Results) -> Markup | None:
    """Draw, for each target, how far predictions move if only it is factorized, against the predicted loss.

    Each recipe has a panel. Return None if nothing was measured.
    """
    shown = predicted_and_measured(results)
    if not shown:
        return None
    colors = {keep: look["color"] for keep, look in looks(results.keeps, color=COLORS).items()}
    entries = [
        entry(f"keep {keep}", color, kind="dot")
        for keep, color in colors.items()
        if any(keep in by for by in shown.values())
    ]
    draws = (partial(_draw, results, recipe, by_keep, colors) for recipe, by_keep in shown.items())
    return key(*entries, entry("equal", MUTED)) + panel_svgs(draws, "predictions")


def _all(by_keep: Pairs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return all predicted and all measured losses."""
    predicted, measured = zip(*(pair for pairs in by_keep.values() for pair in pairs), strict=True)
    return predicted, measured


def _weighting(results: Results, recipe: str) -> Weighting:
    weighting: Weighting = TypeAdapter(Weighting).validate_python(results.settings.recipes[recipe]["weighting"])
    return weighting


def _draw(results: Results, recipe: str, by_keep: Pairs, colors: Mapping[str, str], axes: Axes) -> None:
    """Draw measured against predicted losses on logarithmic axes, with the line of equality, and a color per keep."""
    weighting, classes = _weighting(results, recipe), kind_of(results.task).objective().classes
    predicted, measured = _all(by_keep)
    axes.set(title=recipe, xscale="log", yscale="log")
    axes.set_xlabel("\n".join(["predicted:", *textwrap.wrap(weighting.loss_unit, 36)]))
    axes.set_ylabel("measured: nats" if classes else "measured: squared error")
    axes.set(xlim=_decades(axes.xaxis, predicted), ylim=_decades(axes.yaxis, measured))
    for keep, pairs in by_keep.items():
        axes.plot(*zip(*pairs, strict=True), "o", color=colors[keep], markersize=4.5, alpha=0.75, markeredgewidth=0)
    if classes and weighting.predicts_loss:
        axes.axline((1, 1), (10, 10), color=MUTED, linewidth=1)  # the line of equality


def _decades(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    """Set ticks at a few powers of ten on a logarithmic axis; return its limits, the next ones around all `values`."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high += low == high
    powers = range(low, high + 1, math.ceil((high - low) / _DECADES))
    set_ticks(axis, FixedLocator([10.0**power for power in powers]), lambda value: f"1e{math.log10(value):.0f}")
    return 10.0**low, 10.0**high
