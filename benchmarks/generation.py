"""How fast candidates of a language model write, beside the dense model: forwards in turn, keys and values cached.

make run && python -m benchmarks.generation anchored-0.6    # a Markdown table for the study in this folder
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median

import torch
from transformers import PreTrainedModel

import eckart as eckart  # teaches transformers to load the candidates
from tasks.benchmark import ratio
from tasks.candidate_files import FINETUNED
from tasks.dataset import load_task
from tasks.kinds import kind_of
from tasks.models import TEACHER, check_length, load, random_inputs
from tasks.params import Threads, section

BATCHES = (1, 8)
PROMPT, WRITTEN = 128, 32
"""Tokens."""
ROUNDS = 8


def write(model: PreTrainedModel, rows: int) -> tuple[float, float]:
    """Seconds until the first token, and of each token after it."""
    inputs = random_inputs(model, rows, PROMPT)
    start = time.perf_counter()
    found = model(**inputs, use_cache=True, logits_to_keep=1)
    first = time.perf_counter()
    for _ in range(WRITTEN):
        token = found.logits[:, -1:].argmax(-1)
        found = model(input_ids=token, past_key_values=found.past_key_values, use_cache=True)
    return first - start, (time.perf_counter() - first) / WRITTEN


def rows_of(name: str, dense: PreTrainedModel, small: PreTrainedModel) -> Iterator[str]:
    for rows in BATCHES:
        pairs = [(write(dense, rows), write(small, rows)) for _ in range(1 + ROUNDS)][1:]
        cells = [name, str(rows)]
        for place, unit in enumerate(("{:.0f} ms", "{:.1f}")):
            others, own = ([pair[model][place] for pair in pairs] for model in (0, 1))
            times = ratio(others, own)
            shown = [1e3 * median(each) if place == 0 else rows / median(each) for each in (others, own)]
            cells += [*map(unit.format, shown), f"{times.median:.2f} × ({times.low:.2f} to {times.high:.2f})"]
        yield f"| {' | '.join(cells)} |"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidates", nargs="+", help="of models/finetuned")
    asked = parser.parse_args()
    task, threads = load_task(), section("threads", Threads).candidate
    if task.kind != "language_modeling":
        parser.error(f"the study in this folder is {task.kind}: its models write nothing")
    torch.set_num_threads(threads)
    auto = kind_of(task).auto
    dense = load(TEACHER, auto)[0].eval()
    check_length(dense, PROMPT + WRITTEN, "what is read and written")
    print(
        "| candidate | rows | first token, dense | candidate | as fast | tokens a second, dense | candidate | as fast |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.candidates:
        for line in rows_of(name, dense, load(FINETUNED / name, auto)[0].eval()):
            print(line, flush=True)
    print(f"\n{PROMPT} tokens read, {WRITTEN} written; {threads} thread, torch {torch.__version__}")


if __name__ == "__main__":
    main()
