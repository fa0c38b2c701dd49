"""Benchmark: time the candidates against the dense model, as each runtime runs them → reports/benchmark.json.

Candidates whose weights have the same shapes do the same operations, so one of them is timed for all: else tables would
rank them by noise. The stage must have the machine to itself: dvc.yaml marks it `alone`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from scipy.stats import quantile_test
from transformers import PreTrainedModel

import eckart as eckart  # teaches transformers to load the candidates
from eckart.calibration.losses import Batch
from eckart.onnx import runner
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import FINETUNED, ONNX, ONNX_FILES
from tasks.artifacts.results_schema import BENCHMARKS, Benchmark, Benchmarks, Latencies, Latency, Runtime, Times
from tasks.artifacts.task_spec import load_task
from tasks.config import schema
from tasks.models.model_io import TEACHER, check_length, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import run, say

Forward = Callable[[Batch], Any]
Way = tuple[str, Runtime]
"""A candidate's name or _DENSE, and what runs it."""
Key = TypeVar("Key", bound=Hashable)

_DENSE = "dense"
_WARMUP = 2  # rounds that are not counted
_ROOM = 2e9  # bytes of candidates in memory at once, if they are more than one


def benchmark() -> None:
    """Time dense and candidates in rounds in which each runs once, so that drift of the machine hits all alike."""
    study, exported = schema.section("study", schema.Study), schema.exported()
    names = [candidate_name(recipe, keep) for recipe in study.recipes for keep in schema.keeps()]
    dense, found = _load(TEACHER), dict[str, Benchmark]()
    for _, tokens in schema.section("benchmark", schema.Benchmark).shapes:
        check_length(dense, tokens, "benchmark.shapes")
    groups = {next((name for name in like if name in exported), like[0]): like for like in _alike(names)}
    for timed, latency in _all_latencies(dense, list(groups), exported):
        for name in groups[timed]:
            own = latency if name in exported else _in_torch_alone(latency)
            found[name] = Benchmark(timed=timed, speedup=_first(own["candidate"]["torch"]).of_torch, latency=own)
        say(f"{', '.join(groups[timed])}: {found[timed].speedup.median:.2f} times as fast as dense")
    BENCHMARKS.write_text(Benchmarks({name: found[name] for name in names}).model_dump_json(indent=2))


def _alike(names: Sequence[str]) -> list[list[str]]:
    """The candidates, those together whose weights have the same names and shapes."""
    groups: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for name in names:
        groups.setdefault(_shapes(FINETUNED / name), []).append(name)
    return list(groups.values())


def _shapes(folder: Path) -> frozenset[tuple[str, ...]]:
    shapes = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            names: list[str] = weights.keys()
            shapes |= {(name, *map(str, weights.get_slice(name).get_shape())) for name in names}
    return frozenset(shapes)


def _load(folder: Path) -> PreTrainedModel:
    model, _ = load(folder, kind_of(load_task()).auto)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # type: ignore[arg-type]


def _all_latencies(
    dense: PreTrainedModel, names: Sequence[str], exported: Sequence[str]
) -> Iterator[tuple[str, Latencies]]:
    """Those of every candidate; as many as fit into memory share rounds, and in them the dense model's times."""
    lot: list[str] = []
    for name in names:
        if lot and sum(map(_bytes, [*lot, name])) > _ROOM:
            yield from _latencies(dense, lot, exported).items()
            lot = []
        lot.append(name)
    yield from _latencies(dense, lot, exported).items()


def _bytes(name: str) -> int:
    """Of a candidate's weights, and of its ONNX files, if there are any."""
    files = [*(FINETUNED / name).glob("*.safetensors"), *(ONNX / name).glob("*.onnx*")]
    return sum(file.stat().st_size for file in files)


def _latencies(dense: PreTrainedModel, names: Sequence[str], exported: Sequence[str]) -> dict[str, Latencies]:
    """Of candidates and the dense model at each shape."""
    settings = schema.section("benchmark", schema.Benchmark)
    forwards: dict[Way, Forward] = {(_DENSE, "torch"): partial(in_torch, dense)}
    forwards |= {(name, "torch"): partial(in_torch, _load(FINETUNED / name)) for name in names}
    if shipped := [name for name in names if name in exported]:
        for runtime, file in ONNX_FILES.items():
            for name in (_DENSE, *shipped):
                forwards[name, runtime] = runner(ONNX / name / file, torch.get_num_threads())
    found: dict[str, Latencies] = {name: {"dense": {}, "candidate": {}} for name in names}
    for rows, tokens in settings.shapes:
        inputs = random_inputs(dense, rows, tokens)
        seconds = in_rounds(forwards, inputs, settings.repetitions)
        for (timed, runtime), own in seconds.items():
            latency = Latency(
                seconds=median(own),
                of_torch=ratio(seconds[_DENSE, "torch"], own),
                of_same=ratio(seconds[_DENSE, runtime], own),
            )
            for name in names if timed == _DENSE else [timed]:
                which = found[name]["dense" if timed == _DENSE else "candidate"]
                which.setdefault(runtime, {})[f"{rows}x{tokens}"] = latency
    return found


def in_rounds(forwards: Mapping[Key, Forward], inputs: Batch, rounds: int) -> dict[Key, list[float]]:
    """Seconds of each forward, in rounds in which each runs once; the first rounds warm up."""
    seconds: dict[Key, list[float]] = {way: [] for way in forwards}
    for _ in range(_WARMUP + rounds):
        for way, forward in forwards.items():
            seconds[way].append(_seconds(forward, inputs))
    return {way: own[_WARMUP:] for way, own in seconds.items()}


def ratio(others: Sequence[float], seconds: Sequence[float]) -> Times:
    """How many times as fast, by round: seconds of another model ÷ these; of at least 6 rounds."""
    ratios = [other / one for other, one in zip(others, seconds, strict=True)]
    interval = quantile_test(ratios, q=1, p=0.5).confidence_interval()
    return Times(median=median(ratios), low=interval.low, high=interval.high)


def _seconds(forward: Forward, inputs: Batch) -> float:
    start = time.perf_counter()
    forward(inputs)
    return time.perf_counter() - start


@torch.inference_mode()
def in_torch(model: PreTrainedModel, inputs: Batch) -> None:
    model(**inputs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _first(shapes: dict[str, Latency]) -> Latency:
    return next(iter(shapes.values()))


def _in_torch_alone(latency: Latencies) -> Latencies:
    return {which: {"torch": runtimes["torch"]} for which, runtimes in latency.items()}


if __name__ == "__main__":
    run("benchmark", benchmark, threads="candidate")
