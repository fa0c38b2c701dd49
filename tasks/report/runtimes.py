"""The table that a user picks by: each model as each runtime runs it, scored, weighed and timed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.table import Table

from tasks.artifacts.paths import exported_name
from tasks.artifacts.results_schema import ExportedFile, Latency, Runtime
from tasks.report.numbers import between, score, size, times, times_between
from tasks.report.results import DENSE, CandidateResults, Results, ScoredModel

TITLES: Mapping[Runtime, str] = {"torch": "torch", "onnx": "onnxruntime", "int8": "onnxruntime, int8"}


@dataclass(frozen=True)
class Way:
    """A model as a runtime runs it."""

    model: str
    runtime: Runtime
    scored: ScoredModel
    metric: float
    bytes: int
    latencies: Mapping[str, Latency]
    """At each shape; of the dense model as it was timed beside the first exported candidate."""


@dataclass(frozen=True)
class Speed:
    """How many times as fast as the dense model, as people read it."""

    of_torch: str
    interval: str
    of_same: str
    """As that in the same runtime, with the interval; empty for the dense model itself."""
    order: float
    """By what the page sorts."""


@dataclass(frozen=True)
class RuntimeRow:
    """A way to run a model as people read it."""

    name: str
    runtime: str
    metric: str
    difference: str
    """The interval of its metric less that of the dense model in torch."""
    bytes: str
    speeds: tuple[Speed, ...]
    """At each shape."""
    metric_order: float
    bytes_order: int


def ways(results: Results) -> list[Way]:
    """The dense model and each exported candidate, by each runtime; none, where none was exported."""
    return [way(results, name, runtime) for name in results.exports for runtime in TITLES]


def way(results: Results, name: str, runtime: Runtime) -> Way:
    """A candidate, or `dense`, by torch or a runtime that it is exported for."""
    own = next((one for one in results.candidates if one.name == name), None)
    found: tuple[ScoredModel, float, int]
    if runtime != "torch":
        file: ExportedFile = getattr(results.exports[name], runtime)
        found = (exported_name(name), runtime), file.score.metric, file.bytes
    elif own:
        found = own.after, own.recovered, own.evaluation.size.bytes
    else:
        found = DENSE, results.dense.score.metric, results.dense.size.bytes
    return Way(name, runtime, *found, _latencies(results, own, runtime))


def _latencies(results: Results, own: CandidateResults | None, runtime: Runtime) -> Mapping[str, Latency]:
    if own:
        return own.benchmark.latency["candidate"][runtime]
    beside = [one for one in results.candidates if one.name in results.exports] or results.candidates
    return beside[0].benchmark.latency["dense"][runtime]


def shapes(results: Results) -> list[str]:
    """At which the models were timed: ROWSxTOKENS."""
    return list(ways(results)[0].latencies) if results.exports else []


def runtime_rows(results: Results) -> list[RuntimeRow]:
    """What the page and the terminal show."""
    return [
        RuntimeRow(
            name=way.model,
            runtime=TITLES[way.runtime],
            metric=score(way.metric),
            difference=_difference(results, way),
            bytes=size(way.bytes),
            speeds=tuple(_speed(one, dense=way.model == "dense") for one in way.latencies.values()),
            metric_order=way.metric,
            bytes_order=way.bytes,
        )
        for way in ways(results)
    ]


def _speed(one: Latency, dense: bool) -> Speed:
    same = "" if dense else f"{times(one.of_same.median)} ({times_between(one.of_same.low, one.of_same.high)})"
    interval = times_between(one.of_torch.low, one.of_torch.high)
    return Speed(times(one.of_torch.median), interval, same, one.of_torch.median)


def _difference(results: Results, way: Way) -> str:
    if way.scored == DENSE:
        return ""
    found = results.difference(way.scored, DENSE)
    return between(found.low, found.high, way.metric)


def runtimes_csv(results: Results) -> str:
    """A line for each way, every number in full; its head alone, where nothing was exported."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measured = ("seconds", *(f"{one}{end}" for one in ("of_torch", "of_same") for end in ("", "_low", "_high")))
    timed = [f"{shape}.{name}" for shape in shapes(results) for name in measured]
    writer.writerow(["model", "runtime", "metric", "bytes", "from_dense_low", "from_dense_high", *timed])
    for way in ways(results):
        found = results.difference(way.scored, DENSE)
        numbers = (number for one in way.latencies.values() for number in _numbers(one))
        writer.writerow([way.model, way.runtime, way.metric, way.bytes, found.low, found.high, *numbers])
    return text.getvalue()


def _numbers(one: Latency) -> Iterator[float]:
    yield one.seconds
    for found in (one.of_torch, one.of_same):
        yield from (found.median, found.low, found.high)


def runtimes_table(results: Results, table: Table) -> Table:
    """`table` filled for a terminal."""
    table.add_column("model", no_wrap=True)
    table.add_column("runtime", no_wrap=True)
    for head in (results.metric.title, "difference", "size", *(shape.replace("x", " × ") for shape in shapes(results))):
        table.add_column(head, justify="right", no_wrap=True)
    for row in runtime_rows(results):
        speeds = (f"{speed.of_torch} ({speed.interval})" for speed in row.speeds)
        table.add_row(row.name, row.runtime, row.metric, row.difference, row.bytes, *speeds)
    return table
