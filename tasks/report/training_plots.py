"""Draw the training curves for the page: task losses, and the measures of each recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import starmap
from typing import Any, Literal

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from tasks.report.page_svg import entry, key, looks_of_recipes, panel_svgs
from tasks.report.plot_style import INK, MUTED, looks, set_ticks, tick_number
from tasks.report.results import Curve, Points, Results, by_measure

_DASHES = ((), (5, 1.5), (1, 1), (6, 1.5, 1, 1.5), (3, 3), (9, 2))  # of keeps
_WIDTH = 1.4  # of lines


def curves_svg(results: Results) -> Markup:
    """Draw the task loss: a panel for the training of the original model, and one for the fine-tunings at each keep.

    Empty if nothing was trained.
    """
    colors = {recipe: look["color"] for recipe, look in looks_of_recipes(results).items()}
    panels: dict[str, list[tuple[Curve, str]]] = {"original model": [(results.curve, INK)]}
    for keep in results.keeps:
        recovered = [(candidate.curve, colors[candidate.recipe]) for candidate in results.at(keep)]
        panels[f"fine-tuning at keep {keep}"] = [*recovered, (results.control_curve, MUTED)]
    losses = [point.compared_loss for lines in panels.values() for curve, _ in lines for point in curve]
    if not losses:
        return Markup("")
    margin = 0.05 * (max(losses) - min(losses)) or 0.1
    limits = min(losses) - margin, max(losses) + margin  # the same in all panels
    draws = (partial(_draw_losses, title, lines, limits) for title, lines in panels.items())
    return key(*starmap(entry, colors.items()), entry("control", MUTED)) + panel_svgs(draws, "curves")


def measures_svgs(results: Results, curve: Literal["search_curve", "curve"]) -> dict[str, Markup]:
    """Return recipe → plot of the measures in its training curves, for the recipes that have any.

    In plots of shaping and rank search (`search_curve`), a further panel shows the task loss.
    """
    plots = {}
    for recipe, look in looks_of_recipes(results).items():
        curves: dict[str, Curve] = {candidate.keep: getattr(candidate, curve) for candidate in results.of(recipe)}
        if panels := by_measure(curves, with_loss=curve == "search_curve"):
            plots[recipe] = _measures(results.keeps, look["color"], panels, f"{curve} {recipe}")
    return plots


def _measures(keeps: Iterable[str], color: str, panels: Mapping[str, Mapping[str, Points]], salt: str) -> Markup:
    """Draw a panel for each measure, with a line for each keep. Panels share the x axis (steps), but not the y axis."""
    dashes = {keep: look["dashes"] for keep, look in looks(keeps, dashes=_DASHES).items()}
    last = max(step for lines in panels.values() for points in lines.values() for step, _ in points)
    shown = dict.fromkeys(keep for lines in panels.values() for keep in lines)
    entries = (entry(f"keep {keep}", color, dashes[keep], _stroke(dashes[keep])["linewidth"]) for keep in shown)

    def draw(name: str, lines: Mapping[str, Points], axes: Axes) -> None:
        for keep, points in lines.items():
            _draw_line(axes, points, {"color": color, **_stroke(dashes[keep])})
        axes.set_xlim(0, last * 1.05)
        set_ticks(axes.yaxis, MaxNLocator(4), tick_number)
        _name_steps(axes, name, 4)

    return key(*entries) + panel_svgs((partial(draw, name, lines) for name, lines in panels.items()), salt)


def _stroke(dashes: tuple[float, ...]) -> dict[str, Any]:
    """Return the look of a line. That without dashes is pale and wide, so that others on top of it are visible."""
    if not dashes:
        return {"linewidth": 2.6, "alpha": 0.6}
    return {"linestyle": (0, dashes), "linewidth": _WIDTH}


def _draw_losses(title: str, lines: list[tuple[Curve, str]], limits: tuple[float, float], axes: Axes) -> None:
    axes.set_ylim(*limits)
    for curve, color in lines:
        _draw_line(axes, [(point.step, point.compared_loss) for point in curve], {"color": color, "linewidth": _WIDTH})
    if not any(curve for curve, _ in lines):
        axes.text(0.5, 0.5, "no training", transform=axes.transAxes, ha="center", color=MUTED)
    _name_steps(axes, title, 5)


def _draw_line(axes: Axes, points: Points, look: Mapping[str, Any]) -> None:
    """Draw values over the steps of a training; a single one has a mark."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    axes.plot(steps, values, marker="." if len(points) == 1 else None, **look)


def _name_steps(axes: Axes, title: str, ticks: int) -> None:
    axes.set(title=title, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
