"""All that is timed of the study in this folder, and on what machine: `make bench` writes it to docs/benchmarks.md."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from tasks.candidate_names import candidate_name
from tasks.params import Export, section

_CPUINFO = Path("/proc/cpuinfo")
_HEAD = """# Benchmarks

`make bench` writes this page: what it times of the default study, on {machine}, {cores} virtual cores.
torch {torch}, onnxruntime {onnxruntime}. Medians; ratios are of runs in turn in one process.
"""


def machine() -> str:
    """The processor's name, as far as the system tells it, and what decides how fast int8 is."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    vnni = ", with VNNI" if any("vnni" in flag for flag in flags) else ", without VNNI" if flags else ""
    return fields.get("model name", platform.processor() or platform.machine()) + vnni


def files_to_ship() -> str:
    """What the stages export and latency found."""
    table = pd.read_csv("reports/runtimes.csv")
    shapes = [name.removesuffix(".times") for name in table if name.endswith(".times")]
    lines = ["| model | runtime | metric | MB |" + "".join(f" {shape}, ms | × dense in torch |" for shape in shapes)]
    lines.append("|---" * (4 + 2 * len(shapes)) + "|")
    for _, row in table.iterrows():
        cells = [row["model"], row["runtime"], f"{row['metric']:.3f}", f"{row['bytes'] / 1e6:.1f}"]
        for shape in shapes:
            low, high = row[f"{shape}.times_low"], row[f"{shape}.times_high"]
            cells += [f"{1e3 * row[f'{shape}.seconds']:.1f}", f"{row[f'{shape}.times']:.2f} ({low:.2f} to {high:.2f})"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def output_of(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    print(" ".join(command[1:]), file=sys.stderr)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main() -> None:
    keeps = section("study.keeps", tuple[int | float, ...])
    exported = [candidate_name(recipe, str(keep)) for recipe in section("export", Export).recipes for keep in keeps]
    torch, onnxruntime = version("torch"), version("onnxruntime")
    print(_HEAD.format(machine=machine(), cores=os.cpu_count(), torch=torch, onnxruntime=onnxruntime))
    print(f"## Files to ship\n\n{files_to_ship()}\n", flush=True)
    print("## How near to the limit of the products\n", flush=True)
    print(f"{output_of('limit', *exported)}\n", flush=True)
    print(f"## Seconds of each part\n\n{output_of('parts', 'drone', 'kfac', 'anchored')}")


if __name__ == "__main__":
    main()
