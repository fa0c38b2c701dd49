"""Draw the metric of every file against its size or time, with the frontier, as SVG for the page.

The frontier joins the files that no other file beats in both. Marks never overlap: those at almost the same place are
set side by side. A name that finds no free place beside its mark is left out; pointing at the mark shows it. Every
picture is drawn twice, for wide and for narrow windows, so that its text has the size of the page's text in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Literal, TypeVar, get_args

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

from tasks.artifacts.paths import CONTROL_EXPORT
from tasks.artifacts.results_schema import Runtime
from tasks.report.numbers import between, score, size, times
from tasks.report.perplexity_scale import ScaleOfDense, spans_widely, tick_text
from tasks.report.results import DENSE, Results
from tasks.report.runtimes import TITLES, RuntimeResult, runtime_result
from tasks.report.shipping import to_ship

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 14.0, 50.0  # margins, in pixels
_RADIUS = 5.0
_LETTER, _LINE = 7.0, 15.0  # width of a letter (of the widest usual fonts) and height of a line of labels
_FAR = 4  # largest distance of an important mark's label from its mark, in lines
_MANTISSAS = (1.0, 2.0, 5.0, 1.5, 3.0, 7.0)  # of ticks, the roundest first
_SHORT: dict[Runtime, str] = {"torch": "", "onnx": " onnx", "int8": " int8"}

_NAMES = {"dense": "original", CONTROL_EXPORT: "control"}

Item = TypeVar("Item")
Cost = Literal["size", "time"]
Kind = Literal["shipped", "original", "best", "other"]
"""Kind of a mark; the most important first."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom."""


@dataclass
class _Mark:
    """A file in the picture."""

    run: RuntimeResult
    label: str
    cost: float
    kind: Kind
    x: float = 0.0
    y: float = 0.0


def frontier_svgs(results: Results, cost: Cost) -> Markup:
    """Draw the metric against `cost`, for wide and for narrow windows."""
    return Markup("").join(
        _Picture(results, cost, *shape).svg() for shape in (("wide-only", 1056, 380), ("narrow", 358, 420))
    )


def on_frontier(results: Results, cost: Cost) -> list[RuntimeResult]:
    """Return the files that no other file beats in both metric and cost, by cost."""
    return best_of(
        list(_runs(results, cost)), lambda run: _cost(run, cost), lambda run: results.metric.goodness(run.metric)
    )


def best_of(items: Sequence[Item], cost: Callable[[Item], float], goodness: Callable[[Item], float]) -> list[Item]:
    """Return the items that no other item beats, by cost: each is better than all that cost at most as much."""
    found: list[Item] = []
    for item in sorted(items, key=lambda item: (cost(item), -goodness(item))):
        if not found or goodness(item) > goodness(found[-1]):
            found.append(item)
    return found


def _runs(results: Results, cost: Cost) -> Iterator[RuntimeResult]:
    """Yield all files. An ONNX file in float32 has about the size of a folder in float32, so only its time counts."""
    names = [candidate.name for candidate in results.candidates]
    for name in ("dense", CONTROL_EXPORT, *names):
        yield runtime_result(results, name, "torch")
    for runtime in ("onnx", "int8") if cost == "time" else ("int8",):
        for name in results.exports:
            yield runtime_result(results, name, runtime)


def _cost(run: RuntimeResult, cost: Cost) -> float:
    return run.bytes if cost == "size" else 1 / run.latency.of_torch.median


class _Picture:
    def __init__(self, results: Results, cost: Cost, name: str, width: int, height: int) -> None:
        self.results, self.cost, self.name, self.width, self.height = results, cost, name, width, height
        self.best, self.bottom = on_frontier(results, cost), height - _BOTTOM
        self.marks = sorted(self._marks(to_ship(results).run), key=self._urgency)
        costs = [math.log(mark.cost) for mark in self.marks]
        margin = 0.06 * (max(costs) - min(costs)) or 0.1
        self.costs = min(costs) - margin, max(costs) + margin
        self.scale = self._scale()
        self.taken: list[Box] = []
        for mark in self.marks:
            self._place(mark)

    def _marks(self, shipped: RuntimeResult) -> Iterator[_Mark]:
        for run in _runs(self.results, self.cost):
            kind: Kind = "original" if run.model in _NAMES else "best" if run in self.best else "other"
            label = _NAMES.get(run.model, run.model) + _SHORT[run.runtime]
            yield _Mark(run, label, _cost(run, self.cost), "shipped" if run == shipped else kind)

    def _urgency(self, mark: _Mark) -> tuple[int, float]:
        """Return a sort key: the marks that come first get the best places."""
        return get_args(Kind).index(mark.kind), -self.results.metric.goodness(mark.run.metric)

    def _scale(self) -> Callable[[float], float]:
        """Choose the ticks of the metric's axis, and return the function that maps a metric to its height."""
        values = [value for mark in self.marks for value in (mark.run.metric, *self._bar(mark))]
        stretch: Callable[[float], float] = float
        self.ticks: list[float]
        if spans_widely(self.results.metric, values):
            scale = ScaleOfDense(self.results.metric_of(DENSE))
            low, high = scale.limits(values)
            stretch, self.ticks, self.tick = scale.stretched, scale.ticks(low, high), tick_text
        else:
            margin = 0.06 * (max(values) - min(values)) or 0.01
            low, high = min(values) - margin, max(values) + margin
            self.ticks = [tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
            digits = max(len(f"{tick:.10f}".rstrip("0").partition(".")[2]) for tick in self.ticks)
            self.tick = f"{{:,.{digits}f}}".format
        top, bottom = stretch(high), stretch(low)
        return lambda value: _TOP + (top - stretch(value)) / (top - bottom) * (self.height - _TOP - _BOTTOM)

    def _x(self, cost: float) -> float:
        low, high = self.costs
        return _LEFT + (math.log(cost) - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def _bar(self, mark: _Mark) -> tuple[float, ...]:
        """Return the ends of the interval of the difference from the original model, for the important files."""
        return () if mark.kind in ("original", "other") else self.results.bar(mark.run.scored)

    def _place(self, mark: _Mark) -> None:
        """Give a mark its place: beside the others where it would overlap one, if there is room."""
        mark.y, there, step, reach = self.scale(mark.run.metric), self._x(mark.cost), 2 * _RADIUS + 2, _RADIUS + 1

        def box(x: float) -> Box:
            return x - reach, mark.y - reach, x + reach, mark.y + reach

        places = (there + step * ((number + 1) // 2) * (-1) ** number for number in range(len(self.marks) * 2))
        mark.x = next((x for x in places if self._free(box(x))), there)
        self.taken.append(box(mark.x))
        if bar := self._bar(mark):
            top, bottom = sorted(map(self.scale, bar))
            self.taken.append((mark.x - 2, top, mark.x + 2, bottom))

    def _free(self, box: Box) -> bool:
        """Return whether a box lies between the sides of the picture, and overlaps nothing."""
        return (box[0] > _LEFT and box[2] < self.width) and not any(
            box[0] < right and left < box[2] and box[1] < bottom and top < box[3]
            for left, top, right, bottom in self.taken
        )

    def _label(self, mark: _Mark) -> tuple[float, float, str] | None:
        """Return the place and the anchor of a mark's label, or None if there is no room for it."""
        long, gap = _LETTER * len(mark.label), _RADIUS + 5
        lines = range(_FAR + 1 if mark.kind != "other" else 2)
        sides = product(lines, (1, -1), ((gap, "start"), (-gap, "end")))
        beside = ((mark.x + away, mark.y - sign * line * _LINE, anchor) for line, sign, (away, anchor) in sides)
        over = ((mark.x, mark.y + away, "middle") for away in (-gap - _LINE / 2, gap + _LINE / 2))
        for x, y, anchor in chain(beside, over):
            left = x - {"start": 0.0, "middle": long / 2, "end": long}[anchor]
            box = left, y - _LINE / 2, left + long, y + _LINE / 2
            if box[1] > 0 and box[3] < self.bottom and self._free(box):
                self.taken.append(box)
                return x, y, anchor
        return None

    def svg(self) -> Markup:
        title = f"{self.results.metric.title} of every file against its {self.cost}"
        shape = f'viewBox="0 0 {self.width} {self.height}"'
        parts = [f'<svg class="{self.name}" {shape} role="img" aria-label="{escape(title)}">', *self._axes()]
        parts.append(self._frontier())
        self.taken += self._levels()
        labels = [self._label(mark) for mark in self.marks]
        parts += [self._drawn(mark, label) for mark, label in zip(self.marks, labels, strict=True)]
        return Markup("\n".join([*parts, "</svg>"]))

    def _axes(self) -> Iterator[str]:
        for tick in self.ticks:
            y = self.scale(tick)
            yield _line("grid", _LEFT, y, self.width, y)
            yield _text(_LEFT - 8, y, "end", self.tick(tick), "tick")
        for x, text in self._cost_ticks():
            yield _text(x, self.bottom + 16, "middle", text, "tick")
        axis = "size of the weights" if self.cost == "size" else "time ÷ the original’s in torch"
        yield _text(self.width, self.bottom + 38, "end", f"{axis}, logarithmic", "axis")
        dense = self.scale(self.results.metric_of(DENSE))
        yield _line("original", _LEFT, dense, self.width, dense)

    def _cost_ticks(self) -> list[tuple[float, str]]:
        """Return place and text of the ticks: round numbers of a logarithmic axis, or of an even one if it is short."""
        low, high = (math.exp(end) for end in self.costs)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        rounds = [round(mantissa * 10.0**decade, 10) for mantissa, decade in product(_MANTISSAS, decades)]
        ticks = [*self._placed(rounds, low, high)]
        return ticks if len(ticks) > 1 else [*self._placed(MaxNLocator(5).tick_values(low, high), low, high)]

    def _placed(self, values: Iterable[float], low: float, high: float) -> Iterator[tuple[float, str]]:
        """Yield place and text of those of `values` that lie on the axis and for which there is room."""
        text = (lambda value: re.sub(r"\.0+(?=\D)", "", size(round(value)))) if self.cost == "size" else tick_text
        placed: list[tuple[float, float]] = []
        for value in values:
            half = _LETTER * len(text(value)) / 2 + 8
            x = self._x(value)
            fits = low <= value <= high and x + half < self.width + 8
            if fits and all(abs(x - other) > half + wide for other, wide in placed):
                placed.append((x, half))
                yield x, text(value)

    def _steps(self) -> list[tuple[float, float]]:
        """Return where each level of the frontier starts, and its height."""
        return [(self._x(_cost(run, self.cost)), self.scale(run.metric)) for run in self.best]

    def _frontier(self) -> str:
        """Return the frontier: the best metric of all files that cost at most as much."""
        steps = self._steps()
        path = "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps)
        return f'<path class="frontier" d="M{steps[0][0]:.1f} {self.bottom:.1f}{path}H{self.width}"/>'

    def _levels(self) -> Iterator[Box]:
        """Yield the boxes of the frontier's levels and of the original model's, where no label may lie."""
        for (start, y), (end, _) in pairwise([*self._steps(), (float(self.width), 0.0)]):
            yield start, y - 1, end, y + 1
        y = self.scale(self.results.metric_of(DENSE))
        yield _LEFT, y - 1, self.width, y + 1

    def _drawn(self, mark: _Mark, label: tuple[float, float, str] | None) -> str:
        run, x, y = mark.run, mark.x, mark.y
        parts = [f"<title>{escape(self._told(run, mark.label))}</title>"]
        if label and abs(label[1] - y) >= _LINE and label[2] != "middle":  # a line leads from the mark to its label
            parts.append(_line("leader", x, y, *label[:2]))
        if bar := self._bar(mark):
            top, bottom = sorted(map(self.scale, bar))
            parts.append(_line("bar", x, top, x, bottom))
        if run.runtime == "torch":
            parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS - 1}"/>')
        else:
            parts.append(f'<path class="mark file" d="M{x:.1f} {y - _RADIUS:.1f}l5 5l-5 5l-5-5z"/>')
        if label:
            parts.append(_text(*label, mark.label, "label"))
        inside = "".join(parts)
        if run.model not in _NAMES:
            inside = f'<a href="#{escape(run.model)}">{inside}</a>'
        return f'<g class="{mark.kind}">{inside}</g>'

    def _told(self, run: RuntimeResult, label: str) -> str:
        """Say what pointing at a mark shows."""
        told = [f"{label} in {TITLES[run.runtime]}: {self.results.metric.title} {score(run.metric)}"]
        if run.scored != DENSE:
            ends = self.results.difference(run.scored, DENSE)
            told.append(f"{between(ends.low, ends.high, run.metric)} vs. original")
        return "; ".join([*told, size(run.bytes), f"{times(1 / _cost(run, 'time'))} as fast as the original in torch"])


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, anchor: str, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
