"""Stage benchmark: time the candidates and the original model in each runtime → reports/benchmark.json.

Candidates whose weights have the same names and shapes do the same operations. Only one of them is timed, and all get
its times: if each were timed, tables would rank them by noise. No other stage may run at the same time, so dvc.yaml
marks this one `alone`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

import eckart as eckart  # teaches transformers to load the candidates
from eckart.onnx import runner
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import FINETUNED, ONNX, ONNX_FILES
from tasks.artifacts.results_schema import BENCHMARKS, Benchmark, Benchmarks, Latencies, Latency, Runtime
from tasks.artifacts.task_spec import load_task
from tasks.config import params_file, schema
from tasks.config.params_file import section
from tasks.models.device import to_device
from tasks.models.model_io import TEACHER, check_length, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.runtime.hardware import processor
from tasks.runtime.stage_runner import run, say
from tasks.scoring.timing import Forward, in_rounds, in_torch, ratio

Timed = tuple[str, Runtime]
"""A model and the runtime that runs it: the name of a candidate, or _DENSE for the original model, and the runtime."""

_DENSE = "dense"
_ROOM = 2e9  # maximum size, in bytes, of the candidates in memory together; a larger candidate is loaded alone


def benchmark() -> None:
    """Time the original model and all candidates, and write reports/benchmark.json.

    In each round every loaded model runs once, so that a change of the machine's speed affects all models equally.
    """
    recipes, settings = section("study.recipes", tuple[str, ...]), section("benchmark", schema.Benchmark)
    names = [candidate_name(recipe, keep) for recipe in recipes for keep in params_file.keeps()]
    dense, exported = _load(TEACHER), params_file.exported()
    for _, tokens in settings.shapes:
        check_length(dense, tokens, "benchmark.shapes")
    groups = {next((name for name in group if name in exported), group[0]): group for group in _same_shapes(names)}
    results: dict[str, Benchmark] = {}
    graphics = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    machine = ", ".join(filter(None, (processor(), graphics)))
    for chunk in _chunks(groups):
        for timed, latencies in _latencies(dense, chunk, exported, settings).items():
            for name in groups[timed]:
                own = latencies
                if name not in exported:
                    own = {side: {"torch": runtimes["torch"]} for side, runtimes in latencies.items()}
                first = next(iter(own["candidate"]["torch"].values()))
                results[name] = Benchmark(timed=timed, speedup=first.of_torch, latency=own, machine=machine)
            say(f"{', '.join(groups[timed])}: {results[timed].speedup.median:.2f} times as fast as dense")
    BENCHMARKS.write_text(Benchmarks({name: results[name] for name in names}).model_dump_json(indent=2))


def _same_shapes(names: Sequence[str]) -> list[list[str]]:
    """Return the candidates in groups: within a group, the weights of all have the same names and shapes."""
    groups: dict[frozenset[tuple[str, ...]], list[str]] = {}
    for name in names:
        shapes = set()
        for file in (FINETUNED / name).glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                shapes |= {(key, *map(str, weights.get_slice(key).get_shape())) for key in weights.keys()}  # noqa: SIM118
        groups.setdefault(frozenset(shapes), []).append(name)
    return list(groups.values())


def _load(folder: Path) -> PreTrainedModel:
    model, _ = load(folder, kind_of(load_task()).auto)
    to_device(model)
    return model.eval()


def _chunks(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the candidates in chunks that fit into memory. The original model is timed again with each chunk."""
    chunk: list[str] = []
    total = 0  # bytes of the chunk's weights and ONNX files
    for name in names:
        files = [*(FINETUNED / name).glob("*.safetensors"), *(ONNX / name).glob("*.onnx*")]
        size = sum(file.stat().st_size for file in files)
        if chunk and total + size > _ROOM:
            yield chunk
            chunk, total = [], 0
        chunk.append(name)
        total += size
    yield chunk


def _latencies(
    dense: PreTrainedModel, names: Sequence[str], exported: Sequence[str], settings: schema.Benchmark
) -> dict[str, Latencies]:
    """Time a chunk of candidates and the original model at each input shape.

    Returns:
        Candidate → its latencies and those of the original model.
    """
    forwards = _forwards(dense, names, exported)
    latencies: dict[str, Latencies] = {name: {"dense": {}, "candidate": {}} for name in names}
    for rows, tokens in settings.shapes:
        seconds = in_rounds(forwards, random_inputs(dense, rows, tokens), settings.repetitions)
        for (timed, runtime), own in seconds.items():
            latency = Latency(
                seconds=median(own),
                of_torch=ratio(seconds[_DENSE, "torch"], own),
                of_same=ratio(seconds[_DENSE, runtime], own),
            )
            for name in names if timed == _DENSE else [timed]:
                side = latencies[name]["dense" if timed == _DENSE else "candidate"]
                side.setdefault(runtime, {})[f"{rows}x{tokens}"] = latency
    return latencies


def _forwards(dense: PreTrainedModel, names: Sequence[str], exported: Sequence[str]) -> dict[Timed, Forward]:
    """Load the candidates. Return (model, runtime) → its forward pass, for the candidates and the original model."""
    forwards: dict[Timed, Forward] = {(_DENSE, "torch"): partial(in_torch, dense)}
    forwards |= {(name, "torch"): partial(in_torch, _load(FINETUNED / name)) for name in names}
    if shipped := [name for name in names if name in exported]:
        for runtime, file in ONNX_FILES.items():
            for name in (_DENSE, *shipped):
                forwards[name, runtime] = runner(ONNX / name / file, torch.get_num_threads())
    return forwards


if __name__ == "__main__":
    run("benchmark", benchmark, threads="candidate")
