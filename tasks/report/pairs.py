"""Every two candidates of a keep, over all seeds of a study: how far apart they are, and how sure the test rows are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.dataset import SPLITS, Task
from tasks.metrics import METRICS
from tasks.records import CONTROL_NAME
from tasks.report.bootstrap import Draws, interval, metric_of, resampled
from tasks.report.results import read_rows
from tasks.stage import candidate_name

COLUMNS = ("keep", "model", "first", "second", "difference", "low", "high")
_MODELS = ("factorized", "recovered")


def differences(rows: pd.DataFrame, folders: Mapping[int, Path]) -> pd.DataFrame:
    """A line for each two recipes, keep and model (factorized, recovered): the first's metric less the second's.

    It is averaged over the seeds, which have the same test rows; `low` and `high` are the ends of its interval.

    Args:
        rows: of `seeds_table.collect`.
        folders: seed → its workspace.
    """
    task = Task.model_validate_json((next(iter(folders.values())) / SPLITS / "task.json").read_text())
    rows = rows[rows.recipe != CONTROL_NAME]
    found = [line for keep, group in rows.groupby("keep", sort=False) for line in _at(str(keep), group, task, folders)]
    return pd.DataFrame(found, columns=list(COLUMNS))


def _at(keep: str, rows: pd.DataFrame, task: Task, folders: Mapping[int, Path]) -> Iterator[tuple[str | float, ...]]:
    recipes = list(dict.fromkeys(rows.recipe))
    scored = {
        (model, recipe, seed): part
        for recipe in recipes
        for seed, folder in folders.items()
        for model, part in read_rows(folder, candidate_name(recipe, keep), "evaluate").groupby("model")
        if model in _MODELS
    }
    drawn = resampled(task, scored)
    whole = Draws(np.arange(len(next(iter(scored.values()))))[None])
    for model in _MODELS:
        there = [recipe for recipe in recipes if (model, recipe, next(iter(folders))) in scored]
        mean = {one: np.mean([drawn[model, one, seed] for seed in folders], axis=0) for one in there}
        value = {one: np.mean([metric_of(task, scored[model, one, seed])(whole) for seed in folders]) for one in there}
        for first, second in combinations(there, 2):
            ends = interval(mean[first] - mean[second])
            yield keep, model, first, second, float(value[first] - value[second]), ends.low, ends.high


def leaders(pairs: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    """Of each keep the recipe that recovers best, in words, and those that the test rows cannot tell from it."""
    goodness = METRICS[rows.metric.iloc[0]].goodness
    for keep, group in rows[rows.recipe != CONTROL_NAME].groupby("keep", sort=False):
        best = str(group.groupby("recipe").recovered.mean().map(goodness).idxmax())
        there = pairs[(pairs.keep == keep) & (pairs.model == "recovered")]
        undecided = there[(there.low <= 0) & (there.high >= 0) & ((there["first"] == best) | (there.second == best))]
        rivals = [
            name for pair in undecided[["first", "second"]].itertuples(index=False) for name in pair if name != best
        ]
        yield f"at keep {keep} {best}" + (f", and these rows cannot tell {', '.join(rivals)} from it" if rivals else "")
