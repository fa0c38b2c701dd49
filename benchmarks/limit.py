"""Compare a candidate's speedup in torch with the largest one that its fewer multiply-accumulates allow.

    make run && python -m benchmarks.limit anchored-0.5 anchored-0.33    # a Markdown table for the study in this folder

Assume that the time of products with weights is proportional to their multiply-accumulates, and that all other time
stays the same. Then a candidate is 1 ÷ (1 − p + p q) times as fast as the original model. p: share of the original
model's time that these products take, measured with torch's profiler. q: multiply-accumulates of these products in the
candidate ÷ those in the original model.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

import eckart as eckart  # registers the format of candidates with transformers
from benchmarks.cells import parser_of_candidates
from eckart.model.batches import Batch
from tasks.artifacts.paths import FINETUNED
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Threads
from tasks.models.model_io import TEACHER, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import counted
from tasks.scoring.timing import in_rounds, in_torch, ratio

SHAPES = [(8, 64), (32, 128)]
"""Numbers of examples and tokens of the inputs."""
ROUNDS = 15
_PRODUCTS = ("addmm", "mm")  # products with weights; the products in attention are other operators: bmm, or fused


def share_of_products(model: PreTrainedModel, inputs: Batch) -> list[float]:
    """Measure in several rounds the share of the time that products with weights take; return the sorted shares."""
    shares = []
    for _ in range(ROUNDS):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(**inputs)
        spent = {event.key: event.self_cpu_time_total for event in profiled.key_averages()}
        shares.append(sum(spent.get(f"aten::{name}", 0) for name in _PRODUCTS) / sum(spent.values()))
    return sorted(shares)


def operations_of_products(model: PreTrainedModel, inputs: Batch) -> int:
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    counts = counter.get_flop_counts()["Global"]
    return sum(count for name, count in counts.items() if str(name).rpartition(".")[2] in _PRODUCTS)


@torch.inference_mode()
def main() -> None:
    asked = parser_of_candidates(__doc__).parse_args()
    threads, auto = section("threads", Threads).candidate, kind_of(load_task()).auto
    torch.set_num_threads(threads)
    dense = load(TEACHER, auto)[0].eval()
    print(
        "| candidate | shape | original, ms | time in products | multiply-accumulates left | limit | measured "
        "| of the limit |"
    )
    print("|---|---|---|---|---|---|---|---|")
    cases = {shape: random_inputs(dense, *shape) for shape in SHAPES}
    shares = {shape: share_of_products(dense, inputs) for shape, inputs in cases.items()}
    for name in asked.candidates:
        small = load(FINETUNED / name, auto)[0].eval()
        for (examples, tokens), inputs in cases.items():
            share = median(shares[examples, tokens])
            left = operations_of_products(small, inputs) / operations_of_products(dense, inputs)
            forwards = {kind: partial(in_torch, model) for kind, model in {"dense": dense, "small": small}.items()}
            seconds = in_rounds(forwards, inputs, ROUNDS)
            limit = 1 / (1 - share + share * left)
            times = ratio(seconds["dense"], seconds["small"]).median
            milliseconds = 1e3 * median(seconds["dense"])
            print(
                f"| {name} | {examples} × {tokens} | {milliseconds:.0f} | {100 * share:.0f} % "
                f"| {100 * left:.0f} % | {limit:.2f} × | {times:.2f} × | {100 * times / limit:.0f} % |",
                flush=True,
            )
    spreads = [
        f"{100 * measured[0]:.0f} to {100 * measured[-1]:.0f} % at {examples} × {tokens}"
        for (examples, tokens), measured in shares.items()
    ]
    print("\nThe limit is the speed that a model would have if only its products with weights took less time.")
    print(f"Time in products, {ROUNDS} forward passes: {', '.join(spreads)}. {counted(threads, 'thread')}, in torch.")


if __name__ == "__main__":
    main()
