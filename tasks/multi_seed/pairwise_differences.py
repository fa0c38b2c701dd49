"""Compare each pair of models at a keep (candidates, original model and control): differences with intervals."""

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
"""Names of models that are no recipes. They contain a space, so no recipe has such a name."""


def differences(seeds: Mapping[int, Results]) -> pd.DataFrame:
    """Return a row for each pair of models, separately for each keep and for factorized and recovered models.

    The original model and the control are compared with both the factorized and the recovered models, as `first`.

    Args:
        seeds: seed → results of the study. All seeds have the same test examples.

    Returns:
        A frame with the columns `COLUMNS`. `difference` is the metric of `first` minus that of `second`, averaged over
        seeds; `low` and `high` are its interval over test examples; `spread` is the sample standard deviation over
        seeds (nan with a single seed).
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
    """Yield for each keep a phrase that names the best recipe and those that are not significantly different."""
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
