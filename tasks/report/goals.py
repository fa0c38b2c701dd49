"""Goals that a user sets in params.yaml: find the candidate of each recipe that meets a goal, and a keep to try next.

A goal is one of:
- `largest_drop`: on validation examples, the metric is at most this much worse than the original model's.
- `speedup`: the benchmark measured at least this speedup over the original model in the same runtime.
- `bytes`: the saved weights are at most this large.

Speed and bytes are measured in the goal's `runtime`, by default torch. A goal with another runtime applies only to
recipes that are exported. If several candidates meet a largest drop, the smallest is chosen; for other goals, the best
on validation examples (scored in torch). A drop that was met on validation examples may be exceeded on other examples.
The table therefore also has the smallest candidate for which the test examples show that the drop is met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.artifacts.limits import within
from tasks.config.schema import Goal
from tasks.report.cells import Cell, Row, cell
from tasks.report.non_inferiority import difference, examples_wanted
from tasks.report.numbers import between, score, size, times
from tasks.report.results import DENSE, CandidateResults, Results
from tasks.report.runtimes import TITLES, runtime_result

_SMALLEST = 0.02  # the smallest keep to suggest; less leaves little of any model


@dataclass(frozen=True)
class GoalResult:
    """Result of a goal for a recipe.

    candidate: the chosen candidate of those that meet the goal, or the nearest one if none does.
    met: whether `candidate` meets the goal.
    closer: a keep to try next, which may come closer to the goal; None if no other keep is worth a try.
    """

    goal: Goal
    recipe: str
    candidate: CandidateResults
    met: bool
    closer: str | None


def goal_results(results: Results, too_small: float = 0.0) -> list[GoalResult]:
    """Return the results of all goals for all recipes. Goals for other runtimes than torch need exported recipes.

    Args:
        too_small: a keep that some recipe cannot be compressed to; only larger ones are suggested.
    """
    exported = {candidate.recipe for candidate in results.candidates if candidate.name in results.exports}
    return [
        _goal_result(results, goal, recipe, too_small)
        for goal in results.goals
        for recipe in results.recipes
        if goal.runtime == "torch" or recipe in exported
    ]


def _goal_result(results: Results, goal: Goal, recipe: str, too_small: float) -> GoalResult:
    amounts = {candidate.keep: _amount(results, goal, candidate.name) for candidate in results.of(recipe)}
    meeting = [candidate for candidate in results.of(recipe) if within(amounts[candidate.keep], _limit(goal))]
    choose = results.best if goal.largest_drop is None else results.smallest
    candidate = choose(meeting) or min(results.of(recipe), key=lambda candidate: amounts[candidate.keep])
    with_dense = {float(keep): amount for keep, amount in amounts.items()} | {1.0: _amount(results, goal, "dense")}
    keep = closer(with_dense, _limit(goal), linear=goal.largest_drop is None, too_small=too_small)
    return GoalResult(goal, recipe, candidate, bool(meeting), None if keep is None else f"{keep:g}")


def _limit(goal: Goal) -> float:
    """Return the largest value of `_amount` that meets the goal."""
    if goal.largest_drop is not None:
        return goal.largest_drop
    return 1 / goal.speedup if goal.speedup is not None else float(goal.bytes or 0)


def _amount(results: Results, goal: Goal, name: str) -> float:
    """Return the quantity that the goal limits, for a candidate or the original model (`dense`).

    It is the drop of the metric, the time ÷ the original model's time, or the bytes.
    """
    if goal.largest_drop is not None:
        scores = results.dense if name == "dense" else results.named(name).evaluation
        return results.metric.worse_by(scores.validation.metric, results.dense.validation.metric)
    run = runtime_result(results, name, goal.runtime)
    return 1 / run.latency.of_same.median if goal.speedup is not None else run.bytes


def closer(amounts: Mapping[float, float], limit: float, linear: bool, too_small: float = 0.0) -> float | None:
    """Return the keep to try next, rounded to two digits, or None if no keep is worth a try.

    Args:
        amounts: keep → value of `_amount`, including the original model's at keep 1.
        limit: the largest value that meets the goal.
        linear: whether the value grows linearly with the keep. Bytes do. Time does, too: if the target layers take the
            share p of the original model's time, a candidate takes the share 1 - p + p · keep. A value that is not
            linear, such as the drop of a metric, must fall as the keep grows.
        too_small: only keeps above this are worth a try.
    """
    keep = _between(amounts, limit) if linear else _halfway(amounts, limit, too_small)
    if keep is None:
        return None
    step = 0.01 if keep >= 0.1 else 0.001
    rounded = round((math.floor if linear else round)(round(keep / step, 6)) * step, 3)
    return None if rounded in amounts or rounded <= too_small else rounded


def _halfway(amounts: Mapping[float, float], limit: float, too_small: float) -> float | None:
    """Return the midpoint between the smallest keep that meets the limit and the next smaller keep, which does not."""
    best = min(keep for keep, amount in amounts.items() if within(amount, limit) or keep == 1)
    low = max([too_small, *(keep for keep in amounts if keep < best)])
    return None if _close(low, best) else max((low + best) / 2, _SMALLEST)


def _between(amounts: Mapping[float, float], limit: float) -> float | None:
    """Return the keep at which a line through two known keeps reaches the limit.

    The two are the largest keep that meets the limit and the next larger one. If none meets it, they are the two
    smallest or, if these differ by chance alone, the smallest and 1. Return None if the line does not rise with the
    keep, the two keeps are close already, or the result is too small.

    Ranks are whole numbers, so sizes are steps, and the line would creep along one. On a step, return the midpoint.
    """
    keeps = sorted(amounts)
    if len(keeps) == 1:
        return keeps[0] / 2
    low = max((keep for keep in keeps[:-1] if within(amounts[keep], limit)), default=keeps[0])
    high = keeps[keeps.index(low) + 1]
    if not within(amounts[low], limit) and amounts[high] <= amounts[low]:
        high = keeps[-1]
    slope = (amounts[high] - amounts[low]) / (high - low)
    if slope <= 0 or (within(amounts[low], limit) and _close(low, high)):
        return None
    keep = min(low + (limit - amounts[low]) / slope, high)
    if _close(low, keep) and amounts[low] in [amounts[smaller] for smaller in keeps if smaller < low]:
        keep = (low + high) / 2
    return keep if keep >= _SMALLEST else None


def _close(low: float, high: float) -> bool:
    """Whether two keeps are so close that results at a keep between them would differ less than by chance."""
    return within(high - low, max(0.01, 0.1 * high))


def goal_rows(results: Results) -> list[Row]:
    """Return the rows of the table of goals, for the page and the terminal."""
    return [Row(goal_text(result.goal), _cells(results, result)) for result in goal_results(results)]


def _cells(results: Results, result: GoalResult) -> dict[str, Cell]:
    name = result.candidate.name
    run = runtime_result(results, name, result.goal.runtime)
    ends = results.difference(run.scored, DENSE)
    drops = any(goal.largest_drop is not None for goal in results.goals)
    return {
        "candidate": Cell(name if result.met else f"none of {result.recipe}; nearest {name}"),
        "result": Cell(_result(results, result)),
        **({"shown by test examples": Cell(_shown(results, result))} if drops else {}),
        f"{results.metric.title}, test examples": cell(run.metric, score, between(ends.low, ends.high, run.metric)),
        "size": cell(run.bytes, size),
        "speed": cell(run.latency.of_same.median, times),
    }


def goal_text(goal: Goal) -> str:
    """Format a goal, such as `speedup 2.00 ×`."""
    if goal.largest_drop is not None:
        return f"drop at most {score(goal.largest_drop)}"
    limit = f"speedup {times(goal.speedup)}" if goal.speedup is not None else f"at most {size(goal.bytes or 0)}"
    return limit if goal.runtime == "torch" else f"{limit} in {TITLES[goal.runtime]}"


def _result(results: Results, result: GoalResult) -> str:
    goal, candidate = result.goal, result.candidate
    amount = _amount(results, goal, candidate.name)
    if goal.largest_drop is not None:
        ends, metric = results.validation_difference(candidate), candidate.evaluation.validation.metric
        low, high = (ends.low, ends.high) if results.metric.lower_is_better else (-ends.high, -ends.low)
        return f"drop {score(amount)} ({between(low, high, metric)}) on validation examples"
    return times(1 / amount) if goal.speedup is not None else size(int(amount))


def _shown(results: Results, result: GoalResult) -> str:
    margin = result.goal.largest_drop
    if margin is None:
        return ""
    able = [
        candidate
        for candidate in results.of(result.recipe)
        if difference(results, candidate.after, DENSE, margin).holds
    ]
    if safe := results.smallest(able):
        interval = results.difference(safe.after, DENSE)
        return f"{safe.name} ({between(interval.low, interval.high, safe.recovered)})"
    chosen = difference(results, result.candidate.after, DENSE, margin)
    needed = (
        "" if chosen.wanted is None else f"; for {result.candidate.name} {examples_wanted([chosen])} would be needed"
    )
    return f"none{needed}"
