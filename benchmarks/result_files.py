"""Read the CSV files in docs/results/, and name models and format numbers as all tables and charts do.

One rounding rule (tasks/report/rounding.py): shares in percent, correlations × 100, points and megabytes have one
decimal, ratios have two. A difference is a candidate's metric minus that of its reference, so a loss is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from tasks.report.rounding import rounded

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "docs/results"

ORIGINAL, CONTROL = "dense model", "dense + recovery"
"""The original model and the control, as the CSV files call them."""
NAMES = {
    "dense": "original",
    CONTROL: "control",
    "svd": "SVD",
    "fwsvd": "FWSVD",
    "iwsvd": "IWSVD",
    "ars": "ARS",
    "asvd": "ASVD",
    "drone": "DRONE",
    "svd_llm_sequential": "SVD-LLM, in order",
    "aa_svd": "AA-SVD, not refined",
    "aa_svd_refined": "AA-SVD",
    "zs_svd": "ZS-SVD",
    "kfac_svd": "KFAC-SVD",
    "lems": "LEMS",
    "lpaf": "LPAF",
    "lpaf_sensitivity": "LPAF (sensitivity)",
    "softlm": "SoftLM",
    "losparse": "LoSparse",
    "itp": "ITP",
    "movement_pruning": "movement pruning",
    "kfac": "kfac (ours)",
    "anchored": "anchored (ours)",
    "narrowed": "narrowed (ours)",
    "refined": "narrowed, refined (ours)",
}


class Difference(NamedTuple):
    """The mean difference of two models over seeds, its 95 % interval over test examples, and its spread over seeds."""

    mean: float
    low: float
    high: float
    spread: float

    @property
    def points(self) -> str:
        """Format the mean in points with its interval: -0.1 (-0.9 to +0.6)."""
        mean, low, high = (rounded(100 * value, sign=True) for value in self[:3])
        return f"{mean} ({low} to {high})"


@cache
def read(name: str) -> pd.DataFrame:
    """Return docs/results/NAME.csv. A study without tasks gets the task `reviews`, on which all of them are run."""
    table = pd.read_csv(RESULTS / f"{name}.csv")
    return table if "task" in table else table.assign(task="reviews")


def rows(study: str, recipe: str, keep: float | None = None, task: str | None = None) -> pd.DataFrame:
    """Return the rows of a recipe, one for each seed. The original model has the rows of the control."""
    table = read(study)
    found = table[table.recipe == (CONTROL if recipe == ORIGINAL else recipe)]
    found = found if keep is None or recipe in (ORIGINAL, CONTROL) else found[found.keep == keep]
    found = found if task is None else found[found.task == task]
    if found.empty:
        raise KeyError(f"{study}.csv has no row of {recipe} at keep {keep}, task {task}")
    return found


def pair(
    study: str, model: str, reference: str, step: str = "recovered", keep: float = 0.33, task: str | None = None
) -> Difference:
    """Return the difference model minus reference, before (`factorized`) or after recovery fine-tuning."""
    table = read(f"{study}.pairs")
    table = table[(table.keep == keep) & (table.model == step)]
    table = table if task is None else table[table.task == task]
    for first, second, sign in ((model, reference, 1), (reference, model, -1)):
        found = table[(table["first"] == first) & (table["second"] == second)]
        if len(found) == 1:
            line = found.iloc[0]
            low, high = sorted((sign * line.low, sign * line.high))
            return Difference(sign * line.difference, low, high, line.get("spread", float("nan")))
    raise KeyError(f"{study}.pairs.csv has not one row of {model} and {reference} at keep {keep}, {step}")


def mean_and_spread(values: Sequence[float] | pd.Series[float], factor: float = 100, *, sign: bool = False) -> str:
    """Format mean ± sample standard deviation over seeds; the value alone for one seed, a dash if there is none."""
    series = pd.Series(values, dtype=float) * factor
    if series.isna().any():
        return "–"
    mean = rounded(series.mean(), sign=sign)
    return f"{mean} ± {rounded(series.std())}" if len(series) > 1 else mean


def ratio(value: float) -> str:
    return f"{rounded(value, 2)} ×"


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are aligned to the left, and all others to the right.

    A mean and its spread stay on one line.
    """
    rule = ["---" if place < left else "--:" for place in range(len(heads))]
    text = "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *lines))
    return text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")
