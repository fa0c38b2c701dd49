"""Find the `multiple` of ranks that suits this machine: print a model's speed and predicted loss for several multiples.

    make run && python -m benchmarks.multiples kfac --keep 0.33    # a Markdown table for the study in this folder

`kfac` is a recipe of params.yaml with ranks of kind waterfill. Only its weighting, ranks and storage are used: the
model is factorized without the recipe's other steps, which do not change shapes. The models run in torch and as
exported int8 files. Runs of all models in a runtime are interleaved, with `threads.candidate` threads and inputs of the
first of `benchmark.shapes`. The column "of the limit" compares with the limit of benchmarks/limit.py.
"""

from __future__ import annotations

import argparse
import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.cells import times_cell
from benchmarks.limit import operations_of_products, share_of_products
from benchmarks.parts import spectra
from eckart import onnx
from eckart.calibration.statistics_files import load_statistics
from eckart.factorization.factorize import factorize_at_once
from eckart.factorization.pivoted_storage import pivot
from eckart.factorization.weightings import Weighting
from eckart.model.targets import Storage, Targets
from eckart.ranks import RankSearch
from eckart.ranks.budget import Ranks, stored
from eckart.ranks.search_problem import Spectra
from eckart.ranks.waterfill import Waterfill
from tasks.artifacts.paths import IMPORTANCE, TARGETS
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Benchmark, Threads
from tasks.data.loading import batches, encoded
from tasks.models.model_io import TEACHER, load, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import counted
from tasks.runtime.stage_runner import quiet
from tasks.scoring.timing import Forward, in_rounds, in_torch, ratio

MULTIPLES = (1, 8, 16, 32)
_CALIBRATED = 16  # number of examples for the smoothing of activations


def factorized(dense: PreTrainedModel, recipe: str, keep: float) -> list[tuple[PreTrainedModel, float]]:
    """Return a list with the factorized model and its predicted loss for each of MULTIPLES."""
    part = f"recipes.{recipe}"
    weighting, search = section(f"{part}.weighting", Weighting), section(f"{part}.ranks", RankSearch)
    storage = section(f"{part}.storage", Storage)
    if not isinstance(search, Waterfill):
        raise SystemExit(
            f"{recipe} has ranks of kind {search.kind}, which has no multiple: name a recipe with waterfill"
        )
    targets = stored(Targets.model_validate_json(TARGETS.read_text()).targets, storage)
    statistics = load_statistics(IMPORTANCE)
    all_spectra, models = spectra(targets, dense, weighting, statistics), []
    for multiple in MULTIPLES:
        ranks = search.model_copy(update={"multiple": multiple}).ranks(targets, all_spectra, keep)
        small = deepcopy(dense)
        factorize_at_once(small, targets, ranks, weighting, statistics)
        if storage == "pivoted":
            pivot(small)
        models.append((small, predicted(all_spectra, ranks)))
    return models


def predicted(all_spectra: Spectra, ranks: Ranks) -> float:
    """Return the loss that is predicted for these ranks: ½ Σ S² over all discarded singular values."""
    cut = (all_spectra[name][rank:] for name, rank in ranks.items() if rank is not None)
    return sum(float(values.double().square().sum()) for values in cut) / 2


def in_int8(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, threads: int) -> Forward:
    """Export the model to an int8 file, smoothed with calibration examples; return a function that runs the file."""
    data = encoded("calibration", tokenizer)
    examples = data.select(range(min(_CALIBRATED, len(data))))
    calibration = batches(examples, kind_of(load_task()).collate(tokenizer, model), _CALIBRATED, "cpu")
    onnx.export(model, tokenizer, folder / "model.onnx", int8=True, calibration=calibration)
    return onnx.runner(folder / "model.onnx", threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="of params.yaml, with ranks of kind waterfill")
    parser.add_argument("--keep", type=float, default=0.33)
    asked = parser.parse_args()
    quiet()
    threads, settings = section("threads", Threads).candidate, section("benchmark", Benchmark)
    torch.set_num_threads(threads)
    dense, tokenizer = load(TEACHER, kind_of(load_task()).auto)
    candidates = factorized(dense.eval(), asked.recipe, asked.keep)
    models = [dense, *(model.eval() for model, _ in candidates)]
    examples, tokens = settings.shapes[0]
    inputs = random_inputs(dense, examples, tokens)
    by_torch = in_rounds(dict(enumerate(partial(in_torch, model) for model in models)), inputs, settings.repetitions)
    with tempfile.TemporaryDirectory() as folder:
        files = {
            place: in_int8(model, tokenizer, Path(folder) / str(place), threads) for place, model in enumerate(models)
        }
        by_int8 = in_rounds(files, inputs, settings.repetitions)
    with torch.inference_mode():
        share = median(share_of_products(dense, inputs))
        products = [operations_of_products(model, inputs) for model in models]
    title = f"{asked.recipe}, keep {asked.keep:g}: multiple"
    print(f"| {title} | predicted loss | ÷ original, torch | of the limit | ÷ original's int8, int8 |")
    print("|---|---|---|---|---|")
    for place, (multiple, (_, lost)) in enumerate(zip(MULTIPLES, candidates, strict=True), start=1):
        torchs, int8 = (ratio(times[0], times[place]) for times in (by_torch, by_int8))
        of_limit = torchs.median * (1 - share + share * products[place] / products[0])
        cells = [times_cell(times) for times in (torchs, int8)]
        print(f"| {multiple} | {lost:.5f} | {cells[0]} | {100 * of_limit:.0f} % | {cells[1]} |")
    print(f"\n{counted(threads, 'thread')}, {examples} × {tokens}, medians of {settings.repetitions} rounds.")


if __name__ == "__main__":
    main()
