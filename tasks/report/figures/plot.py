"""Plots as plain numbers, apart from how they are drawn, so that seeds can be averaged and plots drawn again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev

import numpy as np
from pydantic import BaseModel, ConfigDict

ORIGINAL, CONTROL = "original", "control"
"""Labels of the lines of the original model and of the control, which look the same in all plots."""


class Line(BaseModel):
    """Line of a plot: its points in order and, where they are known, the ends of an interval of each y."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    @classmethod
    def through(cls, x: Iterable[float], y: Iterable[float], ends: Iterable[tuple[float, float]] = ()) -> Line:
        """Make the line through points; `ends` are those of the interval of each y."""
        low, high = [*zip(*ends, strict=True)] or (None, None)
        return cls(x=tuple(map(float, x)), y=tuple(map(float, y)), low=low, high=high)


class Plot(BaseModel):
    """Plot of one or several panels that share their x axis.

    Attributes:
        name: name of its files, without suffix.
        x, y: titles of the axes, with units.
        panels: title of a panel → label of a line → line. The title of a single panel is empty.
        levels: title of a panel → label → height of a horizontal line.
        order: labels in the order of their colors, which plots of one study share.
        same_y: whether the panels share the y axis, too.
        logarithmic: whether the y axis is logarithmic.
        marks: whether points have marks: few points that were measured, not a curve.
        steps: whether each y holds from its x to the next, as in a histogram.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    name: str
    title: str
    x: str
    y: str
    panels: dict[str, dict[str, Line]]
    levels: dict[str, dict[str, float]] = {}
    order: tuple[str, ...] = ()
    same_y: bool = True
    logarithmic: bool = False
    marks: bool = True
    steps: bool = False


@dataclass(frozen=True)
class Pattern:
    """Picture of which entries of matrices are not zero.

    Attributes:
        panels: title → mask `(out, in)`.
    """

    name: str
    title: str
    panels: dict[str, np.ndarray]


Figure = Plot | Pattern


def mean_over_seeds(plots: Sequence[Plot]) -> Plot:
    """Return the plot of the mean of each point over seeds; the intervals are one standard deviation to each side.

    Seeds are compared point by point, as far as all of them have a line: a search may end earlier with one seed. A line
    or a level that a seed lacks is left out. A single plot is returned as it is.
    """
    first, count = plots[0], len(plots)
    if count == 1:
        return first
    panels = {
        title: {label: _mean([plot.panels[title][label] for plot in plots]) for label in lines}
        for title, lines in _common([plot.panels for plot in plots]).items()
    }
    levels = {
        title: {label: fmean(plot.levels[title][label] for plot in plots) for label in values}
        for title, values in _common([plot.levels for plot in plots]).items()
    }
    logarithmic = any(plot.logarithmic for plot in plots)
    title = f"{first.title}, mean of {count} seeds"
    return first.model_copy(update={"panels": panels, "levels": levels, "title": title, "logarithmic": logarithmic})


def _common(
    plots: Sequence[dict[str, dict[str, Line]]] | Sequence[dict[str, dict[str, float]]],
) -> dict[str, list[str]]:
    """Return title of a panel → labels, for the panels and labels that all plots have."""
    first, *others = plots
    return {
        title: [label for label in labels if all(label in other[title] for other in others)]
        for title, labels in first.items()
        if all(title in other for other in others)
    }


def _mean(lines: Sequence[Line]) -> Line:
    xs, ys = ([*zip(*points, strict=False)] for points in zip(*((line.x, line.y) for line in lines), strict=True))
    means = [(fmean(values), stdev(values)) for values in ys]
    return Line.through(map(fmean, xs), (y for y, _ in means), ((y - half, y + half) for y, half in means))


def labels_of(plot: Plot) -> list[str]:
    """Return the labels of all lines: that of the original model first, then those of `plot.order` in that order."""
    own = dict.fromkeys(chain.from_iterable(plot.panels.values()))
    first = [label for label in (ORIGINAL, *plot.order) if label in own]
    return [*first, *(label for label in own if label not in first)]
