"""Latency: time the dense model and all exported candidates in turn, as each runtime runs them → reports/latency.json.

The stage must have the machine to itself: dvc.yaml marks it `alone`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from scipy.stats import quantile_test
from transformers import PreTrainedModel

import eckart as eckart  # teaches transformers to load the candidates
from eckart.losses import Batch
from eckart.onnx import runner
from tasks.candidate_files import FINETUNED, ONNX
from tasks.candidate_names import candidate_name
from tasks.dataset import load_task
from tasks.kinds import kind_of
from tasks.models import TEACHER, check_length, load, random_inputs
from tasks.onnx_files import FILES
from tasks.params import Export, section
from tasks.params import Latency as Settings
from tasks.records import LATENCIES, Latencies, Latency, Runtime
from tasks.stage import run, say

Forward = Callable[[Batch], Any]
Way = tuple[str, Runtime]
"""Which model, and what runs it."""
_DENSE: Way = ("dense", "torch")
_WARMUP = 2  # rounds that are not counted


def latency() -> None:
    """Time rounds in which each model runs once, so that drift of the machine hits all alike."""
    settings = section("latency", Settings)
    found: list[Latency] = []
    if names := _exported():
        dense = _load(TEACHER)
        forwards = {way: forward for name in names for way, forward in _ways(name, dense)}
        for rows, tokens in settings.shapes:
            check_length(dense, tokens, "latency.shapes")
            inputs = random_inputs(dense, rows, tokens)
            rounds = [
                {way: _seconds(forward, inputs) for way, forward in forwards.items()}
                for _ in range(_WARMUP + settings.repetitions)
            ]
            found += _summed_up(rounds[_WARMUP:], rows, tokens)
            say(f"{len(forwards)} ways to run a model timed at {rows} rows of {tokens} tokens")
    LATENCIES.write_text(Latencies(measured=tuple(found)).model_dump_json(indent=2))


def _exported() -> list[str]:
    """The dense model and all candidates that are exported; none, if no candidate is."""
    recipes, keeps = section("export", Export).recipes, section("study.keeps", tuple[int | float, ...])
    names = [candidate_name(recipe, str(keep)) for recipe in recipes for keep in keeps]
    return ["dense", *names] if names else []


def _load(folder: Path) -> PreTrainedModel:
    model, _ = load(folder, kind_of(load_task()).auto)
    return model.eval()


def _ways(name: str, dense: PreTrainedModel) -> Iterator[tuple[Way, Forward]]:
    yield (name, "torch"), partial(_in_torch, dense if name == "dense" else _load(FINETUNED / name))
    for runtime, file in FILES.items():
        yield (name, runtime), runner(ONNX / name / file, torch.get_num_threads())


@torch.inference_mode()
def _in_torch(model: PreTrainedModel, inputs: Batch) -> None:
    model(**inputs)


def _summed_up(rounds: Sequence[Mapping[Way, float]], rows: int, tokens: int) -> Iterator[Latency]:
    for model, runtime in rounds[0]:
        times = [one[_DENSE] / one[model, runtime] for one in rounds]
        interval = quantile_test(times, q=1, p=0.5).confidence_interval()
        yield Latency(
            model=model,
            runtime=runtime,
            rows=rows,
            tokens=tokens,
            seconds=median(one[model, runtime] for one in rounds),
            times=median(times),
            low=interval.low,
            high=interval.high,
        )


def _seconds(forward: Forward, inputs: Batch) -> float:
    start = time.perf_counter()
    forward(inputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    run("latency", latency, threads="candidate")
