"""Score candidates and the original model with the weights of their targets rounded to fewer bits.

    make run && python -m benchmarks.bits anchored-0.5 anchored-0.33    # a Markdown table for the study in this folder

This is the fixed precision of DRONE's appendix E (Chen et al., NeurIPS 2021), which has 12 bits, simulated in float32:
each matrix, so each factor too, has one step, its largest magnitude ÷ (2^(bits − 1) − 1). No speed is measured, since
processors have no products of 12 bits. The int8 files of the stage `export` are another scheme: seven bits, a step for
each output, and rounded inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import redirect_stdout

import torch
from torch import nn

import eckart as eckart  # registers the format of candidates with transformers
from benchmarks.cells import ORIGINAL, metric_cell, metric_title, parser_of_candidates
from eckart.model.targets import Targets
from tasks.artifacts.paths import FINETUNED, TARGETS
from tasks.config.params_file import section
from tasks.config.schema import Threads
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import quiet
from tasks.scoring.splits import load_scorer

BITS = (16, 12, 8, 6, 4)


@torch.no_grad()
def round_weights(model: nn.Module, layers: Iterable[str], bits: int) -> None:
    """Round all matrices of the layers with these names in place, each to multiples of a step of its own."""
    for name in layers:
        for matrix in (values for values in model.get_submodule(name).parameters() if values.ndim > 1):
            step = matrix.abs().max() / (2 ** (bits - 1) - 1)
            if step > 0:
                matrix.copy_((matrix / step).round() * step)


def main() -> None:
    asked = parser_of_candidates(__doc__).parse_args()
    quiet()
    torch.set_num_threads(section("threads", Threads).candidate)
    scorer, targets = load_scorer("test"), Targets.model_validate_json(TARGETS.read_text()).targets
    layers = [layer.name for target in targets for layer in target.layers]
    print(f"| {metric_title()} | float32 | {' | '.join(f'{bits} bits' for bits in BITS)} |")
    print("|---" * (2 + len(BITS)) + "|")
    for name in (ORIGINAL, *asked.candidates):
        folder, cells = TEACHER if name == ORIGINAL else FINETUNED / name, []
        for bits in (None, *BITS):
            model, tokenizer = load(folder, kind_of(scorer.task).auto)
            if bits:
                round_weights(model, layers, bits)
            with redirect_stdout(sys.stderr):
                score = scorer.score_on("test", model.eval(), tokenizer, f"{name}, {bits or 32} bits").score
            cells.append(metric_cell(score.metric))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\nOnly the weights of the targets are rounded, one step for each matrix. All else is float32.")


if __name__ == "__main__":
    main()
