"""Which `multiple` of ranks suits the machine that will serve: how much faster each makes a model, and what it costs.

    make run && python -m benchmarks.multiples kfac    # a Markdown table for the study in this folder

`kfac` is a recipe of params.yaml whose ranks are of kind waterfill. What is timed is factorized at once and not
recovered, which changes no shape: in torch and as the int8 file that would be shipped, both in turn with the dense
model alike, on the threads of `threads.candidate`, at the first of `benchmark.shapes`.
"""

from __future__ import annotations

import argparse
import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eckart import onnx
from eckart.budget import Ranks, stored
from eckart.evidence import load_evidence
from eckart.factorization import factorize_at_once
from eckart.pivots import pivot
from eckart.ranks.search_problem import Spectra
from eckart.ranks.waterfill import Waterfill
from eckart.svd import spectrum
from eckart.targets import Storage, weight_of
from eckart.weighting import Weighting, weigh
from tasks.batches import batches, encoded
from tasks.benchmark import Forward, in_rounds, in_torch, ratio
from tasks.dataset import load_task
from tasks.importance_files import IMPORTANCE, load_targets
from tasks.kinds import kind_of
from tasks.models import TEACHER, load, random_inputs
from tasks.params import Benchmark, Threads, section

MULTIPLES = (1, 8, 16, 32)


def factorized(dense: PreTrainedModel, recipe: str, keep: float) -> list[tuple[PreTrainedModel, float]]:
    """The model at each of MULTIPLES, and the loss that its ranks predict."""
    part = f"recipes.{recipe}"
    weighting, search = section(f"{part}.weighting", Weighting), section(f"{part}.ranks", Waterfill)
    storage = section(f"{part}.storage", Storage)
    targets, evidence = stored(load_targets().targets, storage), load_evidence(IMPORTANCE)
    spectra = {
        target.name: spectrum(weight_of(dense.get_submodule(target.name)), weigh(weighting, target, evidence))
        for target in targets
    }
    found = []
    for multiple in MULTIPLES:
        ranks = search.model_copy(update={"multiple": multiple}).ranks(targets, spectra, keep)
        small = deepcopy(dense)
        factorize_at_once(small, targets, ranks, weighting, evidence)
        if storage == "pivoted":
            pivot(small)
        found.append((small, predicted(spectra, ranks)))
    return found


def predicted(spectra: Spectra, ranks: Ranks) -> float:
    """½ Σ S² of all that is cut."""
    cut = (spectra[name][rank:] for name, rank in ranks.items() if rank is not None)
    return sum(float(values.double().square().sum()) for values in cut) / 2


def in_int8(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, threads: int) -> Forward:
    """The file that would be shipped, smoothed by a batch of the calibration sample."""
    data = encoded("calibration", tokenizer).select(range(16))
    calibration = batches(data, kind_of(load_task()).collate(tokenizer, model), 16, "cpu")
    onnx.export(model, tokenizer, folder / "model.onnx", int8=True, calibration=calibration)
    return onnx.runner(folder / "model.onnx", threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="of params.yaml, with ranks of kind waterfill")
    parser.add_argument("--keep", type=float, default=0.33)
    asked = parser.parse_args()
    threads, settings = section("threads", Threads).candidate, section("benchmark", Benchmark)
    torch.set_num_threads(threads)
    dense, tokenizer = load(TEACHER, kind_of(load_task()).auto)
    found = factorized(dense.eval(), asked.recipe, asked.keep)
    models = [dense, *(model.eval() for model, _ in found)]
    rows, tokens = settings.shapes[0]
    inputs = random_inputs(dense, rows, tokens)
    columns = [in_rounds(dict(enumerate(partial(in_torch, one) for one in models)), inputs, settings.repetitions)]
    with tempfile.TemporaryDirectory() as folder:
        files = {place: in_int8(one, tokenizer, Path(folder) / str(place), threads) for place, one in enumerate(models)}
        columns.append(in_rounds(files, inputs, settings.repetitions))
    print(
        f"| {asked.recipe}, keep {asked.keep:g}: multiple | predicted loss | × dense in torch | × dense int8 in int8 |"
    )
    print("|---|---|---|---|")
    for place, (multiple, (_, lost)) in enumerate(zip(MULTIPLES, found, strict=True), start=1):
        times = [ratio(column[0], column[place]) for column in columns]
        cells = [f"{one.median:.2f} ({one.low:.2f} to {one.high:.2f})" for one in times]
        print(f"| {multiple} | {lost:.5f} | {' | '.join(cells)} |")
    print(f"\n{threads} thread, {rows} rows of {tokens} tokens, medians of {settings.repetitions} rounds")


if __name__ == "__main__":
    main()
