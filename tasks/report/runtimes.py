"""The table of exported files: each model in each runtime, with its score, size and speed."""

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
    """A model in a runtime."""

    model: str
    runtime: Runtime
    scored: ScoredModel
    metric: float
    bytes: int
    latencies: Mapping[str, Latency]
    """At each shape; the original model's as timed beside the first exported candidate."""


@dataclass(frozen=True)
class Speed:
    """Speed over the original model, as people read it."""

    of_torch: str
    interval: str
    of_same: str
    """Over the original model in the same runtime, with the interval; empty for the original model."""
    order: float
    """The number by which the page sorts."""


@dataclass(frozen=True)
class RuntimeRow:
    """A model in a runtime, as people read it."""

    name: str
    runtime: str
    metric: str
    difference: str
    """The interval of its metric minus that of the original model in torch."""
    bytes: str
    speeds: tuple[Speed, ...]
    """At each shape."""
    metric_order: float
    bytes_order: int


def ways(results: Results) -> list[Way]:
    """Return the original model and each exported candidate in each runtime; none where none was exported."""
    return [way(results, name, runtime) for name in results.exports for runtime in TITLES]


def way(results: Results, name: str, runtime: Runtime) -> Way:
    """Return a candidate, or `dense`, in torch or a runtime that it is exported for."""
    own = None if name == "dense" else results.named(name)
    latencies = _latencies(results, own, runtime)
    if runtime != "torch":
        file: ExportedFile = getattr(results.exports[name], runtime)
        return Way(name, runtime, (exported_name(name), runtime), file.score.metric, file.bytes, latencies)
    if own:
        return Way(name, runtime, own.after, own.recovered, own.evaluation.size.bytes, latencies)
    return Way(name, runtime, DENSE, results.dense.score.metric, results.dense.size.bytes, latencies)


def _latencies(results: Results, own: CandidateResults | None, runtime: Runtime) -> Mapping[str, Latency]:
    if own:
        return own.benchmark.latency["candidate"][runtime]
    exported = [candidate for candidate in results.candidates if candidate.name in results.exports]
    return (exported or results.candidates)[0].benchmark.latency["dense"][runtime]


def shapes(results: Results) -> list[str]:
    """Return the shapes at which the models were timed, as ROWSxTOKENS."""
    return list(ways(results)[0].latencies) if results.exports else []


def runtime_rows(results: Results) -> list[RuntimeRow]:
    """Return the rows that the page and the terminal show."""
    return [
        RuntimeRow(
            name=way.model,
            runtime=TITLES[way.runtime],
            metric=score(way.metric),
            difference=_difference(results, way),
            bytes=size(way.bytes),
            speeds=tuple(_speed(latency, way.model == "dense") for latency in way.latencies.values()),
            metric_order=way.metric,
            bytes_order=way.bytes,
        )
        for way in ways(results)
    ]


def _speed(latency: Latency, is_dense: bool) -> Speed:
    torch, same = latency.of_torch, latency.of_same
    of_same = "" if is_dense else f"{times(same.median)} ({times_between(same.low, same.high)})"
    return Speed(times(torch.median), times_between(torch.low, torch.high), of_same, torch.median)


def _difference(results: Results, way: Way) -> str:
    if way.scored == DENSE:
        return ""
    found = results.difference(way.scored, DENSE)
    return between(found.low, found.high, way.metric)


def runtimes_csv(results: Results) -> str:
    """Return a line for each model and runtime, every number in full; the head alone where nothing was exported."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measured = ("seconds", *(f"{name}{end}" for name in ("of_torch", "of_same") for end in ("", "_low", "_high")))
    timed = [f"{shape}.{name}" for shape in shapes(results) for name in measured]
    writer.writerow(["model", "runtime", "metric", "bytes", "from_dense_low", "from_dense_high", *timed])
    for way in ways(results):
        found = results.difference(way.scored, DENSE)
        numbers = (number for latency in way.latencies.values() for number in _numbers(latency))
        writer.writerow([way.model, way.runtime, way.metric, way.bytes, found.low, found.high, *numbers])
    return text.getvalue()


def _numbers(latency: Latency) -> Iterator[float]:
    yield latency.seconds
    for ratio in (latency.of_torch, latency.of_same):
        yield from (ratio.median, ratio.low, ratio.high)


def runtimes_table(results: Results, table: Table) -> Table:
    """Fill `table` for a terminal."""
    table.add_column("model", no_wrap=True)
    table.add_column("runtime", no_wrap=True)
    for head in (results.metric.title, "difference", "size", *(shape.replace("x", " × ") for shape in shapes(results))):
        table.add_column(head, justify="right", no_wrap=True)
    for row in runtime_rows(results):
        speeds = (f"{speed.of_torch} ({speed.interval})" for speed in row.speeds)
        table.add_row(row.name, row.runtime, row.metric, row.difference, row.bytes, *speeds)
    return table
