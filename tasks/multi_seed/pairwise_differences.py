"""Differences between every two of a keep's candidates, the original model and its control, with their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np
import pandas as pd

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.report.results import CONTROL, DENSE, Results, ScoredModel
from tasks.scoring.bootstrap import interval

COLUMNS = ("keep", "model", "first", "second", "difference", "low", "high", "spread")
_REFERENCES = {"dense model": DENSE, CONTROL_NAME: CONTROL}
"""Names beside those of the recipes, which have no space."""


def differences(seeds: Mapping[int, Results]) -> pd.DataFrame:
    """Return a line for each two recipes, keep and model (factorized, recovered): the first metric minus the second.

    The original model and its control stand first, beside both models of the recipes. Differences are averaged over
    the seeds, which have the same test examples. `low` and `high` are the ends of the interval over test examples,
    `spread` the sample standard deviation over the seeds, nan of a single one.

    Args:
        seeds: seed → the study's results.
    """
    first = next(iter(seeds.values()))
    lines = [line for keep in first.keeps for model in ("factorized", "recovered") for line in _at(keep, model, seeds)]
    return pd.DataFrame(lines, columns=list(COLUMNS))


def _at(keep: str, model: str, seeds: Mapping[int, Results]) -> Iterator[tuple[str | float, ...]]:
    first = next(iter(seeds.values()))
    scored = _REFERENCES | {
        candidate.recipe: (candidate.name, model) for candidate in first.candidates if candidate.keep == keep
    }
    scored = {name: run for name, run in scored.items() if run in first.resampled}
    draws = {
        name: np.mean([results.resampled[run] for results in seeds.values()], axis=0) for name, run in scored.items()
    }
    for left, right in combinations(scored, 2):
        ends = interval(draws[left] - draws[right])
        by_seed = pd.Series(
            [_metric(results, scored[left]) - _metric(results, scored[right]) for results in seeds.values()]
        )
        yield keep, model, left, right, by_seed.mean(), ends.low, ends.high, by_seed.std()


def _metric(results: Results, scored: ScoredModel) -> float:
    if scored in (DENSE, CONTROL):
        return results.metric_of(scored)
    name, model = scored
    metric: float = getattr(results.named(name), model)
    return metric


def leaders(pairs: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    """Yield for each keep the recipe with the best mean metric, and those not significantly different from it."""
    goodness = METRICS[rows.metric.iloc[0]].goodness
    for keep, group in rows[rows.recipe != CONTROL_NAME].groupby("keep", sort=False):
        best = str(group.groupby("recipe").recovered.mean().map(goodness).idxmax())
        of_recipes = pairs["first"].isin(group.recipe) & pairs.second.isin(group.recipe)
        there = pairs[(pairs.keep == keep) & (pairs.model == "recovered") & of_recipes]
        undecided = there[(there.low <= 0) & (there.high >= 0) & ((there["first"] == best) | (there.second == best))]
        rivals = [
            name for pair in undecided[["first", "second"]].itertuples(index=False) for name in pair if name != best
        ]
        yield f"at keep {keep} {best}" + (f" (not significantly different: {', '.join(rivals)})" if rivals else "")
