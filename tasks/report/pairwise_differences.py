"""Every two of a keep's candidates, the dense model and its control: how far apart they are, and how sure rows are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.names import candidate_name
from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.artifacts.task_spec import SPLITS, Task
from tasks.report.results import CONTROL, DENSE, read_rows
from tasks.scoring.bootstrap import interval, metric_of_all, resampled

COLUMNS = ("keep", "model", "first", "second", "difference", "low", "high", "spread")
_MODELS = ("factorized", "recovered")
_OF_DENSE = {"dense model": DENSE, CONTROL_NAME: CONTROL}
"""What stands beside the recipes: no recipe has a space in its name."""


def differences(rows: pd.DataFrame, folders: Mapping[int, Path]) -> pd.DataFrame:
    """A line for each two recipes, keep and model (factorized, recovered): the first's metric less the second's.

    The dense model and its control stand first, beside both models of the recipes.

    It is averaged over the seeds, which have the same test rows. `low` and `high` are the ends of its interval, which
    is about other rows; `spread` is its sample standard deviation over the seeds, nan of a single one.

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
    for seed, folder in folders.items():
        of_dense = read_rows(folder, DENSE[0], "dense")
        for name, (_, model) in _OF_DENSE.items():
            scored["dense", name, seed] = of_dense[of_dense.model == model]
    drawn = resampled(task, scored)
    value = {one: metric_of_all(task, part) for one, part in scored.items()}
    for model in _MODELS:
        there = [("dense", name) for name in _OF_DENSE]
        there += [(model, recipe) for recipe in recipes if (model, recipe, next(iter(folders))) in scored]
        mean = {one: np.mean([drawn[*one, seed] for seed in folders], axis=0) for one in there}
        for first, second in combinations(there, 2):
            ends = interval(mean[first] - mean[second])
            each = pd.Series([value[*first, seed] - value[*second, seed] for seed in folders])
            yield keep, model, first[1], second[1], each.mean(), ends.low, ends.high, each.std()


def leaders(pairs: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    """Of each keep the recipe that recovers best, in words, and the recipes that the test rows cannot tell from it."""
    goodness = METRICS[rows.metric.iloc[0]].goodness
    for keep, group in rows[rows.recipe != CONTROL_NAME].groupby("keep", sort=False):
        best = str(group.groupby("recipe").recovered.mean().map(goodness).idxmax())
        of_recipes = pairs["first"].isin(group.recipe) & pairs.second.isin(group.recipe)
        there = pairs[(pairs.keep == keep) & (pairs.model == "recovered") & of_recipes]
        undecided = there[(there.low <= 0) & (there.high >= 0) & ((there["first"] == best) | (there.second == best))]
        rivals = [
            name for pair in undecided[["first", "second"]].itertuples(index=False) for name in pair if name != best
        ]
        yield f"at keep {keep} {best}" + (f", and these rows cannot tell {', '.join(rivals)} from it" if rivals else "")
