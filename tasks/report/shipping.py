"""Choose the file to ship of the candidate that a promotion takes: the smallest file that is good enough.

A file in int8 or for onnxruntime is good enough if its own metric is non-inferior to the original model and to the
control, by the same rule as the candidate itself (tasks/report/non_inferiority.py). The Hugging Face folder is the
candidate itself. An ONNX file runs without Eckart, so it is also taken if it is up to 10 % larger than the folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tasks.artifacts.paths import CONTROL_EXPORT, FINETUNED, ONNX, ONNX_FILES
from tasks.report.non_inferiority import non_inferior
from tasks.report.numbers import between, percent, score, size, times, times_between
from tasks.report.results import CandidateResults, Results
from tasks.report.runtimes import RuntimeResult, runtime_result

_LARGER = 1.1  # (choice) size of an ONNX file ÷ that of the folder up to which the file is preferred


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
        return {"torch": "a Hugging Face folder", "onnx": "an ONNX file", "int8": "an int8 ONNX file"}[self.run.runtime]


def to_ship(results: Results) -> Shipped:
    """Return the file to ship of the candidate that is chosen, or of the nearest one if none is within the limits."""
    candidate = results.named(results.choice.nearest)
    name, of = candidate.name, partial(runtime_result, results)
    files = [of(name, runtime) for runtime in ("int8", "onnx") if name in results.exports]
    able = [run for run in files if non_inferior(results, run.scored)]
    folder = of(name, "torch")
    run = min([*able, folder], key=lambda run: run.bytes * (_LARGER if run is folder else 1))
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
        f"{between(ends.low, ends.high, run.metric)} vs. {name} {score(other.metric)}"
        for name, other in (("the original’s", dense), ("the control’s", control))
        for ends in [results.difference(run.scored, other.scored)]
    ]
    short = {"torch": "torch", "onnx": "onnxruntime", "int8": "int8"}[run.runtime]
    shape, latency = next(iter(run.latencies.items()))
    torch, same = latency.of_torch, latency.of_same
    speeds = [f"{times_between(same.low, same.high)} vs. the original in {short}"]
    sizes = [f"{percent(run.bytes / dense.bytes)} of the original’s {size(dense.bytes)}"]
    if exported:
        speeds.append(f"{times(torch.median)} ({times_between(torch.low, torch.high)}) vs. the original in torch")
        sizes.append(f"{percent(run.bytes / original.bytes)} of the original’s {size(original.bytes)} in {short}")
    examples = f"95 % intervals on {results.dense.score.examples:,} test examples"
    where = f"forward pass of {shape.replace('x', ' × ')} tokens" + (
        f", {results.machines}" if results.machines else ""
    )
    return [
        Tile(results.metric.with_direction, score(run.metric), (*differences, examples)),
        Tile("size", size(run.bytes), tuple(sizes)),
        Tile("speed", times(same.median), (*speeds, where)),
    ]
