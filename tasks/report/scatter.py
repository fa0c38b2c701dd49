"""Positions in the plot of metric against cost, which the template draws and the page's script moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.report.numbers import count, size
from tasks.report.plots import looks
from tasks.report.results import CONTROL, DENSE, CandidateResults, Results, ScoredModel
from tasks.report.scale import EvenScale, ScaleOfDense, even, of_dense, tick_text, tick_texts

WIDTH, HEIGHT = 1096.0, 400.0  # of the drawing, in pixels
LEFT, RIGHT, TOP, BOTTOM = 72.0, 1080.0, 28.0, 340.0  # of the field in it
_SHAPES = {  # matplotlib's markers as SVG paths around 0
    "o": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z",
    "s": "M-4.5-4.5h9v9h-9z",
    "^": "M0-5.5l5.5 10h-11z",
    "D": "M0-6l6 6l-6 6l-6-6z",
    "v": "M0 5.5l5.5-10h-11z",
    "P": "M-2-5.5h4v3.5h3.5v4h-3.5v3.5h-4v-3.5h-3.5v-4h3.5z",
    "X": "M-5.5-3l2.5-2.5l3 3l3-3l2.5 2.5l-3 3l3 3l-2.5 2.5l-3-3l-3 3l-2.5-2.5l3-3z",
    "<": "M-5.5 0l10-5.5v11z",
    ">": "M5.5 0l-10-5.5v11z",
}


@dataclass(frozen=True)
class Tick:
    at: float
    """In pixels."""
    text: str


@dataclass(frozen=True)
class Axis:
    """A cost for the horizontal axis, with its name in the choice."""

    key: str
    choice: str
    title: str
    ticks: tuple[Tick, ...]
    places: Mapping[str, float]
    """Model → pixels from the left."""


@dataclass(frozen=True)
class Mark:
    """A candidate, or a model without a recipe: the original one and its control."""

    name: str
    recipe: str
    y: float
    low: float
    high: float
    """Ends of its bar; equal where it has none."""
    colour: str
    shape: str


@dataclass(frozen=True)
class Entry:
    """A recipe in the legend."""

    recipe: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Scatter:
    """The plot; its first axis is drawn, and every mark has a place on each."""

    title: str
    axes: tuple[Axis, ...]
    ticks: tuple[Tick, ...]
    """Ticks of the metric."""
    marks: tuple[Mark, ...]
    legend: tuple[Entry, ...]


def scatter(results: Results) -> Scatter:
    """Place every candidate's recovered metric, with the interval of its difference from the original, by each cost."""
    scale, ticks = _scale(results)
    notes = ["lower is better"] if results.metric.lower_is_better else []
    notes += ["scale finest at dense"] if isinstance(scale, ScaleOfDense) else []
    return Scatter(
        title=", ".join([f"{results.metric.title} on the test split", *notes]),
        axes=tuple(_axes(results)),
        ticks=tuple(Tick(_up(scale, tick), text) for tick, text in ticks.items()),
        marks=tuple(_marks(results, scale)),
        legend=tuple(
            Entry(recipe, look.colour, _SHAPES[look.marker]) for recipe, look in looks(results.recipes).items()
        ),
    )


def _axes(results: Results) -> Iterator[Axis]:
    sizes = {"dense": results.dense.size, CONTROL_NAME: results.dense.size}
    sizes |= {candidate.name: candidate.evaluation.size for candidate in results.candidates}
    stored = {name: float(one.bytes) for name, one in sizes.items()}
    yield _axis("bytes", "size", "size of the weights as stored", stored, _each(lambda tick: size(round(tick))))
    macs = {name: float(one.macs_per_token) for name, one in sizes.items()}
    yield _axis("macs", "MACs per token", "multiply-accumulates per token", macs, _each(count))
    for shape in results.candidates[0].benchmark.latency["candidate"]["torch"]:
        examples, tokens = shape.split("x")
        title = f"measured time of a forward of {examples} examples × {tokens} tokens in torch, ÷ the original model’s"
        times = {"dense": 1.0, CONTROL_NAME: 1.0}
        for candidate in results.candidates:
            times[candidate.name] = 1 / candidate.benchmark.latency["candidate"]["torch"][shape].of_torch.median
        yield _axis(f"latency-{shape}", f"latency at {examples} × {tokens}", title, times, tick_texts)


def _each(text: Callable[[float], str]) -> Callable[[list[float]], list[str]]:
    return lambda ticks: list(map(text, ticks))


def _axis(
    key: str, choice: str, title: str, costs: Mapping[str, float], texts: Callable[[list[float]], list[str]]
) -> Axis:
    scale = even(list(costs.values()))
    ticks = scale.ticks(8)
    marked = tuple(Tick(_across(scale, tick), text) for tick, text in zip(ticks, texts(ticks), strict=True))
    return Axis(key, choice, title, marked, {name: _across(scale, cost) for name, cost in costs.items()})


def _scale(results: Results) -> tuple[EvenScale | ScaleOfDense, dict[float, str]]:
    """Return the scale of the metric, with its ticks; an even one has room for the bars."""
    metrics = [
        results.metric_of(DENSE),
        results.metric_of(CONTROL),
        *(candidate.recovered for candidate in results.candidates),
    ]
    if results.spans_decades(metrics):
        wide = of_dense(results.metric_of(DENSE), metrics)
        return wide, {tick: tick_text(tick) for tick in wide.ticks()}
    bars = [end for candidate in results.candidates for end in _bar(results, candidate)]
    scale = even([*metrics, *bars])
    return scale, dict(zip(scale.ticks(), tick_texts(scale.ticks()), strict=True))


def _bar(results: Results, candidate: CandidateResults) -> tuple[float, float]:
    """Return the interval of its difference from the original model, at the metric of that."""
    found, dense = results.difference(candidate.after, DENSE), results.metric_of(DENSE)
    return dense + found.low, dense + found.high


def _marks(results: Results, scale: EvenScale | ScaleOfDense) -> Iterator[Mark]:
    references: tuple[tuple[str, ScoredModel], ...] = (("dense", DENSE), (CONTROL_NAME, CONTROL))
    for name, model in references:
        y = _up(scale, results.metric_of(model))
        yield Mark(name, "", y, y, y, "", _SHAPES["o"])
    shown = looks(results.recipes)
    for candidate in results.candidates:
        low, high = (_up(scale, end) for end in _bar(results, candidate))
        look = shown[candidate.recipe]
        yield Mark(
            candidate.name,
            candidate.recipe,
            _up(scale, candidate.recovered),
            low,
            high,
            look.colour,
            _SHAPES[look.marker],
        )


def _across(scale: EvenScale, value: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * scale.place(value), 1)


def _up(scale: EvenScale | ScaleOfDense, value: float) -> float:
    """Clipped to the field: a bar beside a perplexity of 10⁵ may end far outside."""
    return round(BOTTOM - (BOTTOM - TOP) * min(max(scale.place(value), 0.0), 1.0), 1)
