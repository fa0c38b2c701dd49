"""Compare our int8 files with onnxruntime's default: one call of `quantize_dynamic` for the original model.

    make run && python -m benchmarks.quantize_dynamic anchored-0.33    # a Markdown table for the study in this folder

The default is `quantize_dynamic(model, quantized)` of the exported original model, without further arguments, in a
session with onnxruntime's default options. Our int8 files run with the options that the pipeline's stages use. Runs
of all files are interleaved, with `threads.candidate` threads and inputs of each of `benchmark.shapes`. The files are
scored on the test examples.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import onnxruntime
from onnxruntime.quantization import quantize_dynamic

from benchmarks.cells import megabytes, metric_cell, metric_title, times_cell
from eckart import onnx
from eckart.model.batches import Batch
from tasks.artifacts.paths import ONNX, ONNX_FILES
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Benchmark, Threads
from tasks.models.model_io import TEACHER, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import counted
from tasks.runtime.stage_runner import quiet
from tasks.scoring.splits import load_scorer
from tasks.scoring.timing import Forward, in_rounds, ratio

DEFAULT = "original, default `quantize_dynamic`"


def by_default(file: Path, threads: int) -> Forward:
    """Return a function that runs the file with onnxruntime's default options, except for the number of threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda inputs: session.run(None, {name: inputs[name].numpy() for name in names})


def metric(file: Path, threads: int) -> float:
    model, tokenizer = load(TEACHER, kind_of(load_task()).auto)
    onnx.answer_by(model, onnx.runner(file, threads))
    with redirect_stdout(sys.stderr):
        return load_scorer("test").score_on("test", model, tokenizer, str(file)).score.metric


def rows(files: dict[str, Path], forwards: dict[str, Forward], cases: dict[str, Batch], threads: int) -> Iterator[str]:
    rounds = section("benchmark", Benchmark).repetitions
    taken = {shape: in_rounds(forwards, inputs, rounds) for shape, inputs in cases.items()}
    for name, file in files.items():
        times = [ratio(seconds[DEFAULT], seconds[name]) for seconds in taken.values()]
        cells = ["1" if name == DEFAULT else times_cell(ratio) for ratio in times]
        score = metric_cell(metric(file, threads))
        yield f"| {name} | {megabytes(file.stat().st_size)} | {score} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidates", nargs="+", help="of models/onnx")
    asked = parser.parse_args()
    quiet()
    threads, shapes = section("threads", Threads).candidate, section("benchmark", Benchmark).shapes
    model, _ = load(TEACHER, kind_of(load_task()).auto)
    cases: dict[str, Batch] = {f"{count} × {tokens}": random_inputs(model, count, tokens) for count, tokens in shapes}
    with tempfile.TemporaryDirectory() as folder:
        default = Path(folder) / "default.onnx"
        quantize_dynamic(ONNX / "dense" / ONNX_FILES["onnx"], default)
        names = {"dense": "original, Eckart's int8"} | {name: name for name in asked.candidates}
        ours = {title: ONNX / name / ONNX_FILES["int8"] for name, title in names.items()}
        forwards = {DEFAULT: by_default(default, threads)} | {
            name: onnx.runner(file, threads) for name, file in ours.items()
        }
        print(f"| int8 file | MB | {metric_title()} | {' | '.join(f'{shape}: ÷ the default' for shape in cases)} |")
        print("|---" * (3 + len(cases)) + "|")
        for row in rows({DEFAULT: default, **ours}, forwards, cases, threads):
            print(row, flush=True)
    rounds = section("benchmark", Benchmark).repetitions
    print(f"\n{counted(threads, 'thread')}; medians of {rounds} rounds. The default runs in a default session.")


if __name__ == "__main__":
    main()
