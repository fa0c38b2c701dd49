"""Time candidates and the original model in bfloat16 in torch, on a processor with bfloat16 instructions.

    make run && python -m benchmarks.bfloat16 anchored-0.5 anchored-0.33    # a Markdown table for the study here

No files are written: `from_pretrained(folder, dtype=torch.bfloat16)` loads any candidate. The models are scored on the
test examples. Runs of all models, in float32 and in bfloat16, are interleaved, with `threads.candidate` threads.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from itertools import product

import torch

import eckart as eckart  # registers the format of candidates with transformers
from benchmarks.cells import ORIGINAL, megabytes, metric_cell, metric_title, parser_of_candidates, times_cell
from tasks.artifacts.paths import FINETUNED
from tasks.config.params_file import section
from tasks.config.schema import Benchmark, Threads
from tasks.models.model_io import TEACHER, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import counted
from tasks.runtime.stage_runner import quiet
from tasks.scoring.splits import load_scorer
from tasks.scoring.timing import in_rounds, in_torch, ratio

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def multiplies_in_bfloat16() -> bool:
    can = torch.cpu.get_capabilities()
    return any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def main() -> None:
    asked = parser_of_candidates(__doc__).parse_args()
    if not multiplies_in_bfloat16():
        print("This processor has no products in bfloat16.")
        return
    quiet()
    threads, settings = section("threads", Threads).candidate, section("benchmark", Benchmark)
    torch.set_num_threads(threads)
    scorer = load_scorer("test")
    names, models, scores = ["dense", *asked.candidates], {}, {}
    for name, (kind, dtype) in product(names, TYPES.items()):
        model, tokenizer = load(TEACHER if name == "dense" else FINETUNED / name, kind_of(scorer.task).auto, dtype)
        models[name, kind] = model.eval()
    for name in names:
        with redirect_stdout(sys.stderr):
            scores[name] = scorer.score_on(
                "test", models[name, "bfloat16"], tokenizer, f"{name} in bfloat16"
            ).score.metric
    examples, tokens = settings.shapes[0]
    inputs = random_inputs(models["dense", "float32"], examples, tokens)
    taken = in_rounds({way: partial(in_torch, model) for way, model in models.items()}, inputs, settings.repetitions)
    heads = ["model in bfloat16", metric_title(), "MB in memory", "÷ original in bfloat16"]
    print(f"| {' | '.join([*heads, '÷ itself in float32', '÷ original in float32'])} |")
    print("|---|---|---|---|---|---|")
    for name in names:
        others = [("dense", "bfloat16"), (name, "float32"), ("dense", "float32")]
        times = [times_cell(ratio(taken[other], taken[name, "bfloat16"])) for other in others]
        title, times[0] = (ORIGINAL, "1") if name == "dense" else (name, times[0])
        size = megabytes(models[name, "bfloat16"].get_memory_footprint())
        print(f"| {title} | {metric_cell(scores[name])} | {size} | {' | '.join(times)} |")
    print(f"\n{counted(threads, 'thread')}, {examples} × {tokens}, medians of {settings.repetitions} rounds, in torch.")


if __name__ == "__main__":
    main()
