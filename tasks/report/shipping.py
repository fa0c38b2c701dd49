"""Choose the file to ship: of the candidate that a promotion takes, the smallest file whose own metric is good enough.

A file in int8 or for onnxruntime is good enough if its own metric is non-inferior to the original model and to the
control, by the same rule as the candidate itself (tasks/report/non_inferiority.py). If no exported file is, or if none
was exported, the Hugging Face folder is the file to ship.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tasks.artifacts.paths import CONTROL_EXPORT, FINETUNED, ONNX, ONNX_FILES
from tasks.artifacts.results_schema import Times
from tasks.report.non_inferiority import non_inferior
from tasks.report.numbers import between, percent, score, size, times, times_between
from tasks.report.results import CandidateResults, Results
from tasks.report.runtimes import TITLES, RuntimeResult, runtime_result


@dataclass(frozen=True)
class Shipped:
    """The file to ship.

    run: its metric, size and speed.
    original: those of the original model in the same runtime.
    path: the file or folder, in the workspace.
    command: a command that writes it elsewhere or uploads it.
    """

    candidate: CandidateResults
    run: RuntimeResult
    original: RuntimeResult
    path: str
    command: str

    @property
    def format(self) -> str:
        return {"torch": "Hugging Face folder", "onnx": "ONNX file", "int8": "int8 ONNX file"}[self.run.runtime]


def to_ship(results: Results) -> Shipped:
    """Return the file to ship of the candidate that is chosen, or of the nearest one if none is within the limits."""
    candidate = results.named(results.choice.nearest)
    name, of = candidate.name, partial(runtime_result, results)
    able = [of(name, runtime) for runtime in ("int8", "onnx") if name in results.exports]
    run = next((run for run in able if non_inferior(results, run.scored)), of(name, "torch"))
    original = of("dense", run.runtime)
    if run.runtime == "torch":
        return Shipped(candidate, run, original, str(FINETUNED / name), f"eckart publish {name} USER/NAME")
    command = f"eckart export {name} {name}.onnx" + (" --int8" if run.runtime == "int8" else "")
    return Shipped(candidate, run, original, str(ONNX / name / ONNX_FILES[run.runtime]), command)


@dataclass(frozen=True)
class Tile:
    """A number of the file to ship, and comparisons of it with the original model's."""

    title: str
    value: str
    lines: tuple[str, ...]


def tiles(results: Results, shipped: Shipped) -> list[Tile]:
    """Return metric, size and speed of the file to ship, each compared with the original model's."""
    run, original, exported = shipped.run, shipped.original, shipped.run.runtime != "torch"
    dense, control = (runtime_result(results, name, "torch") for name in ("dense", CONTROL_EXPORT))
    differences = [
        f"{name} {score(other.metric)}: {between(ends.low, ends.high, run.metric)}"
        for name, other in (("original", dense), ("control", control))
        for ends in [results.difference(run.scored, other.scored)]
    ]
    shape, latency = next(iter(run.latencies.items()))
    speeds = [("torch", latency.of_torch)]
    if exported:
        speeds.insert(0, (TITLES[run.runtime], latency.of_same))
    words = [f"the original in {name}: {times_between(speed.low, speed.high)}" for name, speed in speeds]
    if exported:
        words[1] = f"the original in torch: {times(latency.of_torch.median)}, {times_between(*_ends(latency.of_torch))}"
    sizes = [f"{percent(run.bytes / dense.bytes)} of the original’s {size(dense.bytes)}"]
    if original.bytes != dense.bytes:
        sizes.append(f"{percent(run.bytes / original.bytes)} of its {TITLES[run.runtime]} file, {size(original.bytes)}")
    rows, tokens = shape.split("x")
    return [
        Tile(results.metric.with_direction, score(run.metric), tuple(differences)),
        Tile("size", size(run.bytes), tuple(sizes)),
        Tile(f"speed at {rows} × {tokens} tokens", times(speeds[0][1].median), tuple(f"vs. {word}" for word in words)),
    ]


def _ends(ratio: Times) -> tuple[float, float]:
    return ratio.low, ratio.high
