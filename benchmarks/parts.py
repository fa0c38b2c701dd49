"""Time the parts of a recipe (statistics, rank search, factorization). Recipes that train before them are refused.

    make run && python -m benchmarks.parts drone kfac anchored    # a Markdown table for the study in this folder

Each recipe gathers the statistics that its weighting reads, although a study gathers them once for all recipes. The
times are medians of three runs in one process, in which the recipes alternate, with `threads.candidate` threads.
Loading and saving are not included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy

import torch
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics, collect
from eckart.factorization.factorize import InOrder, factorize_model
from eckart.factorization.weighted_svd import spectrum
from eckart.factorization.weightings import Weighting, weigh
from eckart.model.batches import Batch
from eckart.model.targets import Storage, Target, Targets, weight_of
from eckart.ranks import RankSearch
from eckart.ranks.budget import stored
from eckart.ranks.search_problem import ByFormula, Spectra
from eckart.residual import Residual
from eckart.shaping import Shaping
from tasks.artifacts.paths import TARGETS
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Importance, Threads
from tasks.data.loading import batches, encoded
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import counted

RUNS = 3


def spectra(targets: Iterable[Target], model: PreTrainedModel, weighting: Weighting, statistics: Statistics) -> Spectra:
    return {
        target.name: spectrum(weight_of(model.get_submodule(target.name)), weigh(weighting, target, statistics))
        for target in targets
    }


def seconds(recipe: str, keep: float, dense: PreTrainedModel, data: list[Batch]) -> Iterator[float]:
    """Yield the seconds of gathering statistics, of the rank search, and of the factorization."""
    part, importance = f"recipes.{recipe}", section("importance", Importance)
    weighting = section(f"{part}.weighting", Weighting)
    ranks = section(f"{part}.ranks", RankSearch)
    order = section(f"{part}.sequential", InOrder | None)
    trained = [section(f"{part}.shaping", Shaping | None), section(f"{part}.residual", Residual | None)]
    if any(trained) or not isinstance(ranks, ByFormula):
        raise SystemExit(f"{recipe} trains before it factorizes: its seconds are in the table of its study")
    model, storage = deepcopy(dense), section(f"{part}.storage", Storage)
    targets = stored(Targets.model_validate_json(TARGETS.read_text()).targets, storage)
    began = time.perf_counter()
    statistics: Statistics = {}
    if weighting.statistics:
        loss = kind_of(load_task()).objective(importance.labels).calibration_loss
        statistics = collect(model, data, targets, weighting.statistics, loss)
    yield (gathered := time.perf_counter()) - began
    chosen = ranks.ranks(targets, spectra([] if ranks.by_size else targets, model, weighting, statistics), keep)
    yield (decided := time.perf_counter()) - gathered
    factorize_model(model, targets, chosen, weighting, statistics, in_order=order, batches=data)
    yield time.perf_counter() - decided


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="of params.yaml")
    parser.add_argument("--keep", type=float, default=0.33)
    asked = parser.parse_args()
    threads = section("threads", Threads).candidate
    torch.set_num_threads(threads)
    kind = kind_of(load_task())
    model, tokenizer = load(TEACHER, kind.auto)
    size = section("importance", Importance).batch_size
    data = list(batches(encoded("calibration", tokenizer), kind.collate(tokenizer, model), size, "cpu"))
    taken: dict[str, list[list[float]]] = {recipe: [] for recipe in asked.recipes}
    for _ in range(RUNS):
        for recipe in asked.recipes:
            taken[recipe].append(list(seconds(recipe, asked.keep, model, data)))
    print(f"| recipe, keep {asked.keep:g} | statistics, s | search | factorization | total | fastest to slowest |")
    print("|---|---|---|---|---|---|")
    for recipe, runs in taken.items():
        parts = [statistics.median(part) for part in zip(*runs, strict=True)]
        whole = sorted(map(sum, runs))
        cells = [
            *(f"{part:.1f}" for part in parts),
            f"{statistics.median(whole):.1f}",
            f"{whole[0]:.1f} to {whole[-1]:.1f}",
        ]
        print(f"| {recipe} | {' | '.join(cells)} |")
    print(f"\n{counted(threads, 'thread')}, medians of {RUNS} runs.")


if __name__ == "__main__":
    main()
