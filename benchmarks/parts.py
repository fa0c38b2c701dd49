"""Seconds of each part of a recipe that trains nothing before recovery: evidence, search and factorization.

    make run && python -m benchmarks.parts drone kfac anchored    # a Markdown table for the study in this folder

Evidence is what the weighting of the recipe reads, gathered for it alone: a study gathers it once for all. Medians of
three runs in one process, recipes in turn, on the threads of `threads.candidate`; loading and saving are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy

import torch
from transformers import PreTrainedModel

from eckart.budget import stored
from eckart.evidence import Evidence, collect
from eckart.factorization import InOrder, factorize_at_once, factorize_in_order
from eckart.losses import Batch
from eckart.ranks import RankSearch
from eckart.ranks.search_problem import ByFormula, Spectra
from eckart.residual import Residual
from eckart.shaping import Shaping
from eckart.svd import spectrum
from eckart.targets import Storage, Target, weight_of
from eckart.weighting import Weighting, weigh
from tasks.batches import batches, encoded
from tasks.dataset import load_task
from tasks.importance_files import load_targets
from tasks.kinds import evidence_loss, kind_of
from tasks.models import TEACHER, load
from tasks.params import Importance, Threads, section

RUNS = 3


def spectra(targets: Iterable[Target], model: PreTrainedModel, weighting: Weighting, evidence: Evidence) -> Spectra:
    return {
        target.name: spectrum(weight_of(model.get_submodule(target.name)), weigh(weighting, target, evidence))
        for target in targets
    }


def seconds(recipe: str, keep: float, dense: PreTrainedModel, data: list[Batch]) -> Iterator[float]:
    """Of evidence, search and factorization."""
    part, importance = f"recipes.{recipe}", section("importance", Importance)
    weighting = section(f"{part}.weighting", Weighting)
    ranks = section(f"{part}.ranks", RankSearch)
    order = section(f"{part}.sequential", InOrder | None)
    trained = [section(f"{part}.shaping", Shaping | None), section(f"{part}.residual", Residual | None)]
    if any(trained) or not isinstance(ranks, ByFormula):
        raise SystemExit(f"{recipe} trains before it factorizes: its seconds are in the table of its study")
    model, targets = deepcopy(dense), stored(load_targets().targets, section(f"{part}.storage", Storage))
    began = time.perf_counter()
    evidence: Evidence = {}
    if weighting.evidence:
        evidence = collect(model, data, targets, weighting.evidence, evidence_loss(load_task(), importance.labels))
    yield (gathered := time.perf_counter()) - began
    found = ranks.ranks(targets, spectra([] if ranks.by_size else targets, model, weighting, evidence), keep)
    yield (decided := time.perf_counter()) - gathered
    if order:
        factorize_in_order(model, targets, found, weighting, evidence, data, order)
    else:
        factorize_at_once(model, targets, found, weighting, evidence)
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
    print(f"| recipe, keep {asked.keep:g} | evidence, s | search | factorization | all | fastest to slowest |")
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
    print(f"\n{threads} thread, torch {torch.__version__}")


if __name__ == "__main__":
    main()
