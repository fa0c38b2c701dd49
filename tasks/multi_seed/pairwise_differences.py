"""Compare each pair of models at a keep (candidates, original model and control): differences with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np
import pandas as pd

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.report.results import CONTROL, DENSE, Results, ScoredModel
from tasks.scoring.bootstrap import Interval, interval

COLUMNS = ("keep", "model", "first", "second", "difference", "low", "high", "spread")
_REFERENCES = {"dense model": DENSE, CONTROL_NAME: CONTROL}
"""Models other than candidates: name → key. The names contain a space, which no name of a recipe does."""


def mean_difference(seeds: Mapping[int, Results], model: ScoredModel, reference: ScoredModel) -> Interval:
    """Return a confidence interval of the mean over seeds of the test metric's difference, model minus reference.

    Examples are resampled in pairs, so all seeds must have the same test examples.
    """
    model_mean, reference_mean = (
        np.mean([results.resampled[key] for results in seeds.values()], axis=0) for key in (model, reference)
    )
    return interval(model_mean - reference_mean)


def differences(seeds: Mapping[int, Results]) -> pd.DataFrame:
    """Return a DataFrame with a row for each pair of models at a keep, once before and once after recovery.

    The column `model` says which: `factorized` or `recovered`. The original model and the control, which are the same
    before and after, are in the column `first`. `difference` is the metric of `first` minus that of `second`, averaged
    over seeds; `low` and `high` are its interval over test examples; `spread` is the sample standard deviation over
    seeds (nan with a single seed).
    """
    first = next(iter(seeds.values()))
    lines: list[tuple[str | float, ...]] = []
    for keep in first.keeps:
        for step in ("factorized", "recovered"):
            models = _REFERENCES | {candidate.recipe: (candidate.name, step) for candidate in first.at(keep)}
            scored = {name: model for name, model in models.items() if model in first.resampled}
            for (left, model), (right, other) in combinations(scored.items(), 2):
                ends = mean_difference(seeds, model, other)
                by_seed = pd.Series([results.metric_of(model) - results.metric_of(other) for results in seeds.values()])
                lines.append((keep, step, left, right, by_seed.mean(), ends.low, ends.high, by_seed.std()))
    return pd.DataFrame(lines, columns=list(COLUMNS))


def leaders(pairs: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    """Yield a phrase for each keep: the best recipe, and the recipes that are not significantly different from it."""
    goodness = METRICS[rows.metric.iloc[0]].goodness
    recovered = pairs[pairs.model == "recovered"]
    undecided = recovered.loc[[Interval(*ends).sign == 0 for ends in zip(recovered.low, recovered.high, strict=True)]]
    for keep, group in rows[rows.recipe != CONTROL_NAME].groupby("keep", sort=False):
        best = str(group.groupby("recipe").recovered.mean().map(goodness).idxmax())
        of_keep = undecided.loc[undecided.keep == keep, ["first", "second"]].itertuples(index=False, name=None)
        rivals = [name for pair in of_keep if best in pair for name in pair if name != best and name in {*group.recipe}]
        yield f"at keep {keep} {best}" + (f" (not significantly different: {', '.join(rivals)})" if rivals else "")
