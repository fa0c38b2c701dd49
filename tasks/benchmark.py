"""Benchmark: time a candidate against the dense model, in turn in one process → reports/benchmark/RECIPE-KEEP.json.

The stage must have the machine to itself: dvc.yaml marks it `alone`.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from transformers import PreTrainedModel

import eckart as eckart  # teaches transformers to load the candidate
from eckart.losses import Batch
from tasks import params
from tasks.candidate_files import BENCHMARKS, FINETUNED
from tasks.candidate_names import candidate_name
from tasks.dataset import load_task
from tasks.kinds import kind_of
from tasks.models import TEACHER, check_length, load, random_inputs
from tasks.records import Benchmark
from tasks.stage import run_candidate, say

_WARMUP = 3  # pairs that are not counted


def benchmark(recipe: str, keep: str) -> None:
    """Time forwards of dense and candidate in turn, so that drift of the machine hits both alike."""
    settings, name = params.section("benchmark", params.Benchmark), candidate_name(recipe, keep)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folders, auto = (TEACHER, FINETUNED / name), kind_of(load_task()).auto
    dense, small = (load(folder, auto)[0].to(device).eval() for folder in folders)  # type: ignore[arg-type]
    check_length(dense, settings.tokens, "benchmark.tokens")
    inputs = random_inputs(dense, settings.batch_size, settings.tokens)
    rounds = range(_WARMUP + settings.repetitions)
    pairs = [(_seconds(dense, inputs), _seconds(small, inputs)) for _ in rounds][_WARMUP:]
    result = Benchmark(
        dense_seconds=median(pair[0] for pair in pairs),
        candidate_seconds=median(pair[1] for pair in pairs),
        speedup=median(pair[0] / pair[1] for pair in pairs),
    )
    BENCHMARKS.mkdir(parents=True, exist_ok=True)
    (BENCHMARKS / f"{name}.json").write_text(result.model_dump_json(indent=2))
    say(f"{result.speedup:.2f} times as fast as dense")


@torch.inference_mode()
def _seconds(model: PreTrainedModel, inputs: Batch) -> float:
    start = time.perf_counter()
    model(**inputs)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_candidate("benchmark", benchmark)
