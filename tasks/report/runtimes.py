"""Make the table of exported models: score, size and speed of each model in each runtime."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from tasks.artifacts.paths import CONTROL_EXPORT, exported_name
from tasks.artifacts.results_schema import CONTROL_NAME, ExportedFile, Latency, Runtime, Score
from tasks.report.cells import Cell, Row, cell
from tasks.report.numbers import between, score, size, times, times_between
from tasks.report.results import CONTROL, DENSE, CandidateResults, Results, ScoredModel

TEXTS = "texts."
"""Prefix of the CSV columns of evaluate.texts: texts.NAME, and for candidates before recovery factorized.texts.NAME."""
TITLES: Mapping[Runtime, str] = {"torch": "torch", "onnx": "onnxruntime", "int8": "onnxruntime, int8"}


@dataclass(frozen=True)
class RuntimeResult:
    """Result of running a model in a runtime."""

    model: str
    runtime: Runtime
    scored: ScoredModel
    metric: float
    bytes: int
    latencies: Mapping[str, Latency]
    """Input shape → latency. The original model's latencies are those of the first exported candidate's benchmark."""
    texts: Mapping[str, Score]
    """Name of a text in evaluate.texts → score on it."""

    @property
    def latency(self) -> Latency:
        """The latency for the first input shape of the benchmark, which limits and goals are about."""
        return next(iter(self.latencies.values()))


def runtime_results(results: Results) -> list[RuntimeResult]:
    """Return the results of original, control and candidates in each runtime, if exported; [] if none was."""
    return [runtime_result(results, name, runtime) for name in results.exports for runtime in TITLES]


def runtime_result(results: Results, name: str, runtime: Runtime) -> RuntimeResult:
    """Return the result of a candidate, `dense` or the control, in torch or in a runtime that it was exported for.

    The control has the original model's shapes, so it also has its latencies.
    """
    original = {"dense": (DENSE, results.dense), CONTROL_EXPORT: (CONTROL, results.dense.control)}
    own = None if name in original else results.named(name)
    latencies = _latencies(results, own, runtime)
    if runtime != "torch":
        file: ExportedFile = getattr(results.exports[name], runtime)
        model = (exported_name(name), runtime)
        return RuntimeResult(name, runtime, model, file.score.metric, file.bytes, latencies, file.texts)
    if own:
        found = own.evaluation
        return RuntimeResult(name, runtime, own.after, own.recovered, found.size.bytes, latencies, found.texts)
    scored, scores = original[name]
    return RuntimeResult(name, runtime, scored, scores.score.metric, results.dense.size.bytes, latencies, scores.texts)


def _latencies(results: Results, own: CandidateResults | None, runtime: Runtime) -> Mapping[str, Latency]:
    if own:
        return own.benchmark.latency["candidate"][runtime]
    exported = [candidate for candidate in results.candidates if candidate.name in results.exports]
    return (exported or results.candidates)[0].benchmark.latency["dense"][runtime]


def runtime_rows(results: Results) -> list[Row]:
    """Return the rows of the table of exported models, for the page and the terminal."""
    rows = []
    for result in runtime_results(results):
        ends = results.difference(result.scored, DENSE)
        difference = "" if result.scored == DENSE else between(ends.low, ends.high, result.metric)
        cells = {
            "runtime": Cell(TITLES[result.runtime]),
            results.metric.title: cell(result.metric, score, difference),
            "size": cell(result.bytes, size),
        }
        for shape, latency in result.latencies.items():
            torch, same = latency.of_torch, latency.of_same
            below = times_between(torch.low, torch.high) if torch.low < torch.high else ""
            if result.model != "dense" and result.runtime != "torch":
                below += f"\nsame runtime {times(same.median)} ({times_between(same.low, same.high)})"
            head = f"speed, {shape.replace('x', ' × ')}"
            cells[head] = cell(torch.median, times, "as dense" if result.model == CONTROL_EXPORT else below)
        for name, text in results.dense.texts.items():
            value = result.texts[name].metric
            cells[f"{results.metric.title} on {name}"] = cell(value, score, times(value / text.metric))
        rows.append(Row(CONTROL_NAME if result.model == CONTROL_EXPORT else result.model, cells))
    return rows


def runtimes_csv(results: Results) -> str:
    """Return the table of exported models as CSV, with all digits; only the header if nothing was exported."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measured = ("seconds", *(f"{name}{end}" for name in ("of_torch", "of_same") for end in ("", "_low", "_high")))
    found = runtime_results(results)
    timed = [f"{shape}.{name}" for shape in (found[0].latencies if found else ()) for name in measured]
    texts = [*results.dense.texts]
    heads = ["model", "runtime", "metric", "bytes", "from_dense_low", "from_dense_high"]
    writer.writerow([*heads, *timed, *(f"{TEXTS}{name}" for name in texts)])
    for result in found:
        ends = results.difference(result.scored, DENSE)
        line = [result.model, result.runtime, result.metric, result.bytes, ends.low, ends.high]
        for latency in result.latencies.values():
            ratios = ((ratio.median, ratio.low, ratio.high) for ratio in (latency.of_torch, latency.of_same))
            line += [latency.seconds, *chain.from_iterable(ratios)]
        line += [result.texts[name].metric for name in texts]
        writer.writerow(line)
    return text.getvalue()
