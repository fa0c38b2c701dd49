"""Print all benchmarks of the study in this folder as Markdown. `make bench` writes docs/results/benchmarks.md."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from eckart.ranks import RankSearch
from eckart.ranks.waterfill import Waterfill
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Export, exported, section
from tasks.nlp_tasks import kind_of
from tasks.runtime.hardware import processor

_CPUINFO = Path("/proc/cpuinfo")
_HEAD = """# Benchmarks

`make bench` writes this page: what it times of the default study, on {machine}, {cores} virtual cores.
torch {torch}, onnxruntime {onnxruntime}. Medians; ratios are of runs in turn in one process.
"""


def machine() -> str:
    """Return the processor's name, and whether it has VNNI, which decides how fast int8 is."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return processor() + (", with VNNI" if "vnni" in flags else ", without VNNI" if flags else "")


def files_to_ship() -> str:
    """Return the results of the stages `export` and `benchmark` as a Markdown table."""
    table = pd.read_csv("reports/runtimes.csv")
    shapes = [name.removesuffix(".of_torch") for name in table if name.endswith(".of_torch")]
    heads = "".join(f" {shape}, ms | × dense in torch | × dense alike |" for shape in shapes)
    lines = [f"| model | runtime | metric | MB |{heads}", "|---" * (4 + 3 * len(shapes)) + "|"]
    for _, row in table.iterrows():
        cells = [row["model"], row["runtime"], f"{row['metric']:.3f}", f"{row['bytes'] / 1e6:.1f}"]
        for shape in shapes:
            cells.append(f"{1e3 * row[f'{shape}.seconds']:.1f}")
            for times in (f"{shape}.of_torch", f"{shape}.of_same"):
                cells.append(f"{row[times]:.2f} ({row[f'{times}_low']:.2f} to {row[f'{times}_high']:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
        print(f"## Beside one line of onnxruntime's quantizer\n\n{output_of('one_line', *names)}\n", flush=True)
    print("## How near to the limit of the products\n", flush=True)
    print(f"{output_of('limit', *names)}\n", flush=True)
    for recipe in with_multiples():
        print(f"## Ranks that this processor likes\n\n{output_of('multiples', recipe)}\n", flush=True)
    print(f"## In bfloat16\n\n{output_of('bfloat16', *names)}\n", flush=True)
    if writes:
        print(f"## Writing\n\n{output_of('generation', *names)}\n", flush=True)
    print(f"## Seconds of each part\n\n{output_of('parts', 'drone', 'kfac', 'anchored')}\n", flush=True)
    print(f"## Statistics and decompositions on BERT-base's shapes\n\n{output_of('base_shapes')}")


if __name__ == "__main__":
    main()
