"""Latency: time an exported candidate and the dense model as each runtime runs them → reports/onnx/NAME.latency.json.

The stage must have the machine to itself: dvc.yaml marks it `alone`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from scipy.stats import quantile_test
from transformers import PreTrainedModel

import eckart as eckart  # teaches transformers to load the candidates
from eckart.losses import Batch
from eckart.onnx import runner
from tasks.candidate_files import EXPORTS, FINETUNED, ONNX, latency_file
from tasks.candidate_names import candidate_name
from tasks.dataset import load_task
from tasks.kinds import kind_of
from tasks.models import TEACHER, check_length, load, random_inputs
from tasks.onnx_files import FILES
from tasks.params import Latency as Settings
from tasks.params import section
from tasks.records import Latencies, Latency, Runtime, Times
from tasks.stage import run_candidate, say

Forward = Callable[[Batch], Any]
Which = Literal["dense", "candidate"]
_WARMUP = 2  # rounds that are not counted


def latency(recipe: str, keep: str) -> None:
    """Time rounds in which each model runs once, so that drift of the machine hits all alike."""
    settings, name = section("latency", Settings), candidate_name(recipe, keep)
    models: dict[Which, tuple[str, PreTrainedModel]] = {
        "dense": ("dense", _load(TEACHER)),
        "candidate": (name, _load(FINETUNED / name)),
    }
    forwards = {
        (which, runtime): forward for which, one in models.items() for runtime, forward in _forwards(*one).items()
    }
    found: dict[Which, dict[Runtime, dict[str, Latency]]] = {
        which: {"torch": {}, "onnx": {}, "int8": {}} for which in models
    }
    for rows, tokens in settings.shapes:
        check_length(models["dense"][1], tokens, "latency.shapes")
        inputs = random_inputs(models["dense"][1], rows, tokens)
        rounds = [
            {way: _seconds(forward, inputs) for way, forward in forwards.items()}
            for _ in range(_WARMUP + settings.repetitions)
        ][_WARMUP:]
        for which, runtime in forwards:
            seconds, torch_s, same = (
                [one[way] for one in rounds] for way in ((which, runtime), ("dense", "torch"), ("dense", runtime))
            )
            found[which][runtime][f"{rows}x{tokens}"] = Latency(
                seconds=median(seconds), of_torch=_times(torch_s, seconds), of_same=_times(same, seconds)
            )
        say(f"{len(forwards)} ways to run a model timed at {rows} rows of {tokens} tokens")
    EXPORTS.mkdir(parents=True, exist_ok=True)
    latency_file(name).write_text(Latencies(latency=found).model_dump_json(indent=2))


def _load(folder: Path) -> PreTrainedModel:
    model, _ = load(folder, kind_of(load_task()).auto)
    return model.eval()


def _forwards(name: str, model: PreTrainedModel) -> dict[Runtime, Forward]:
    sessions = {runtime: runner(ONNX / name / file, torch.get_num_threads()) for runtime, file in FILES.items()}
    return {"torch": partial(_in_torch, model), **sessions}


@torch.inference_mode()
def _in_torch(model: PreTrainedModel, inputs: Batch) -> None:
    model(**inputs)


def _times(others: Sequence[float], seconds: Sequence[float]) -> Times:
    ratios = [other / one for other, one in zip(others, seconds, strict=True)]
    interval = quantile_test(ratios, q=1, p=0.5).confidence_interval()
    return Times(median=median(ratios), low=interval.low, high=interval.high)


def _seconds(forward: Forward, inputs: Batch) -> float:
    start = time.perf_counter()
    forward(inputs)
    return time.perf_counter() - start


if __name__ == "__main__":
    run_candidate("latency", latency)
