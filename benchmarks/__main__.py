"""Print all benchmarks of the study in this folder as Markdown, for docs/results/benchmarks.md (`make bench`)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from benchmarks.cells import ORIGINAL, megabytes, metric_cell, metric_title, times_cell
from eckart.ranks import RankSearch
from eckart.ranks.waterfill import Waterfill
from tasks.artifacts.paths import CONTROL_EXPORT
from tasks.artifacts.results_schema import Times
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import exported, section
from tasks.config.schema import Export
from tasks.nlp_tasks import kind_of
from tasks.report.rounding import rounded
from tasks.report.runtimes import TITLES
from tasks.runtime.hardware import processor

_CPUINFO = Path("/proc/cpuinfo")
_HEAD = """# Benchmarks

`make bench` writes this page. It times the models of the default study on {machine}, {cores} virtual cores, with torch
{torch} and onnxruntime {onnxruntime}. Times and ratios are medians of interleaved runs in one process, with their 95 %
intervals in parentheses. A ratio is the speed of a model ÷ that of the original, so 2 means twice as fast. Input shapes
are examples × tokens.
"""
_OF_TORCH = """The last columns depend on torch: on AMD processors its float32 products, by MKL, use no AVX-512, while
onnxruntime's do."""


def machine() -> str:
    """Return the processor's name, and whether it has VNNI, which decides how fast int8 is."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return processor() + (", with VNNI" if "vnni" in flags else ", without VNNI" if flags else "")


def files_to_ship() -> str:
    """Return the results of the stages `export` and `benchmark` as a Markdown table."""
    table = pd.read_csv("reports/runtimes.csv")
    table = table[table.model != CONTROL_EXPORT]  # its times are the original's
    shapes = [name.removesuffix(".of_torch") for name in table if name.endswith(".of_torch")]
    named = {shape: shape.replace("x", " × ") for shape in shapes}
    heads = ["model", "runtime", metric_title(), "MB"]
    heads += [f"{named[shape]}: ÷ original in the same runtime" for shape in shapes]
    heads += [f"{named[shape]}, ms" for shape in shapes] + [f"{named[shape]}: ÷ original in torch" for shape in shapes]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for _, row in table.iterrows():
        name = ORIGINAL if row["model"] == "dense" else row["model"]
        cells = [name, TITLES[row["runtime"]], metric_cell(row["metric"]), megabytes(row["bytes"])]
        cells += [_times(row, f"{shape}.of_same") if name != ORIGINAL else "1" for shape in shapes]
        cells += [rounded(1e3 * row[f"{shape}.seconds"]) for shape in shapes]
        original = (row["model"], row["runtime"]) == ("dense", "torch")
        cells += ["1" if original else _times(row, f"{shape}.of_torch") for shape in shapes]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _OF_TORCH])


def _times(row: pd.Series, name: str) -> str:
    return times_cell(Times(median=row[name], low=row[f"{name}_low"], high=row[f"{name}_high"]))


def with_multiples() -> list[str]:
    """Return the exported recipes whose rank search is of kind waterfill, which can round ranks to multiples."""
    recipes = section("export", Export).recipes
    return [recipe for recipe in recipes if isinstance(section(f"recipes.{recipe}.ranks", RankSearch), Waterfill)]


def dvc(*arguments: str) -> None:
    """Run DVC. The command `python` in dvc.yaml is then the Python that runs this script."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=True, stdout=sys.stderr, env=environment)


def output_of(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    print(" ".join(command[1:]), file=sys.stderr)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    if not (names := exported()):
        sys.exit("export.recipes in params.yaml is []: name the recipes whose files are to be timed")
    torch, onnxruntime = version("torch"), version("onnxruntime")
    print(_HEAD.format(machine=machine(), cores=os.cpu_count(), torch=torch, onnxruntime=onnxruntime))
    dvc("repro", "--force", "--single-item", "benchmark")  # so that all times are of this machine
    dvc("repro", "--single-item", "compare")
    print(f"## Files to ship\n\n{files_to_ship()}\n", flush=True)
    writes = kind_of(load_task()).running_text
    if not writes:  # the exported graph of a language model also needs a cache as input
        text = output_of("quantize_dynamic", *names)
        print(f"## Against the default `quantize_dynamic`\n\n{text}\n", flush=True)
    print("## How near to the limit of matrix products\n", flush=True)
    print(f"{output_of('limit', *names)}\n", flush=True)
    print(f"## Time of each module\n\n{output_of('modules', *names)}\n", flush=True)
    for recipe in with_multiples():
        print(f"## Multiples of ranks on this processor\n\n{output_of('multiples', recipe)}\n", flush=True)
    print(f"## In bfloat16\n\n{output_of('bfloat16', *names)}\n", flush=True)
    print(f"## Weights of fewer bits\n\n{output_of('bits', *names)}\n", flush=True)
    if writes:
        print(f"## Text generation\n\n{output_of('generation', *names)}\n", flush=True)
    print(f"## Time of each step\n\n{output_of('parts', 'drone', 'kfac', 'anchored')}\n", flush=True)
    print(f"## Calibration statistics and decompositions on BERT-base's shapes\n\n{output_of('base_shapes')}")


if __name__ == "__main__":
    main()
