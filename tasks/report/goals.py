"""Goals in a user's own units: the candidate of each recipe that meets one, and the keep to look at next.

A candidate meets `largest_drop` if its metric on validation examples is at most so much worse than the original
model's; `speedup` if the benchmark measured it so many times as fast as the original model; `bytes` if its weights as
saved are no larger. Speed and bytes are those in torch, or in the goal's `runtime`, like the original model's: such a
goal applies to the recipes that are exported. A largest drop chooses the smallest candidate that meets it, other goals
the best on validation examples, where models are scored in torch. A candidate chosen by its drop on some validation
examples may lose more on others: beside it stands the recipe's smallest candidate for which the test examples show that
it loses no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.config.schema import Goal
from tasks.report.cells import Cell, Row, cell
from tasks.report.choose_candidate import ROUNDING
from tasks.report.non_inferiority import rows_wanted, statistics
from tasks.report.numbers import between, score, size, times
from tasks.report.results import DENSE, CandidateResults, Results
from tasks.report.runtimes import TITLES, Way, way

_SMALLEST = 0.02  # keep; below it little is left of any model


@dataclass(frozen=True)
class GoalResult:
    """A goal and its result for a recipe.

    met: whether `candidate` meets it; otherwise it is the nearest that does not.
    closer: a keep that may meet it more closely; None where those at hand are close enough, or none would.
    """

    goal: Goal
    recipe: str
    candidate: CandidateResults
    met: bool
    closer: str | None


def goal_results(results: Results) -> list[GoalResult]:
    """Return every goal of the study for every recipe; a goal of another runtime for those that are exported."""
    exported = {candidate.recipe for candidate in results.candidates if candidate.name in results.exports}
    return [
        _goal_result(results, goal, recipe)
        for goal in results.goals
        for recipe in results.recipes
        if goal.runtime == "torch" or recipe in exported
    ]


def _goal_result(results: Results, goal: Goal, recipe: str) -> GoalResult:
    amounts = {candidate.keep: _amount(results, goal, candidate) for candidate in results.of(recipe)}
    meeting = [candidate for candidate in results.of(recipe) if amounts[candidate.keep] <= _limit(goal) + ROUNDING]
    choose = results.best if goal.largest_drop is None else results.smallest
    candidate = choose(meeting) or min(results.of(recipe), key=lambda candidate: amounts[candidate.keep])
    known = {float(keep): amount for keep, amount in amounts.items()} | {1.0: _dense_amount(results, goal)}
    keep = closer(known, _limit(goal), linear=goal.largest_drop is None)
    return GoalResult(goal, recipe, candidate, bool(meeting), None if keep is None else f"{keep:g}")


def _limit(goal: Goal) -> float:
    """Return the largest amount that meets the goal."""
    if goal.largest_drop is not None:
        return goal.largest_drop
    return 1 / goal.speedup if goal.speedup is not None else float(goal.bytes or 0)


def _amount(results: Results, goal: Goal, candidate: CandidateResults) -> float:
    """Return the amount that the goal limits: the drop of the metric, time ÷ the original model's, or bytes."""
    if goal.largest_drop is not None:
        return results.metric.worse_by(candidate.evaluation.validation.metric, results.dense.validation.metric)
    run = way(results, candidate.name, goal.runtime)
    return 1 / _speedup(run) if goal.speedup is not None else run.bytes


def _dense_amount(results: Results, goal: Goal) -> float:
    if goal.largest_drop is not None:
        return 0.0
    return 1.0 if goal.speedup is not None else way(results, "dense", goal.runtime).bytes


def _speedup(run: Way) -> float:
    """Return the speedup over the original model in the same runtime, at the first shape of the benchmark."""
    return next(iter(run.latencies.values())).of_same.median


def closer(amounts: Mapping[float, float], limit: float, linear: bool) -> float | None:
    """Return the keep to look at next, with two digits; None where it would add nothing.

    Args:
        amounts: keep → the limited amount, with the original model's at 1.
        linear: True for an amount that grows evenly with the keep, as bytes do, and as time does where products take
            the share p of it: 1 - p + p · keep. False for one that falls with the keep, as the drop of a metric does.
    """
    keep = _between(amounts, limit) if linear else _halfway(amounts, limit)
    if keep is None:
        return None
    step = 0.01 if keep >= 0.1 else 0.001
    rounded = round((math.floor if linear else round)(round(keep / step, 6)) * step, 3)
    return None if rounded in amounts else rounded


def _halfway(amounts: Mapping[float, float], limit: float) -> float | None:
    """Return the middle between the smallest keep that passes and the largest below it that does not."""
    best = min(keep for keep, amount in amounts.items() if amount <= limit + ROUNDING or keep == 1)
    low = max((keep for keep in amounts if keep < best), default=0.0)
    return None if _close(low, best) else max((low + best) / 2, _SMALLEST)


def _between(amounts: Mapping[float, float], limit: float) -> float | None:
    """Interpolate between the largest keep that passes and the one above it, or from the two smallest if none does."""
    keeps = sorted(amounts)
    if len(keeps) == 1:
        return keeps[0] / 2
    low = max((keep for keep in keeps[:-1] if amounts[keep] <= limit + ROUNDING), default=keeps[0])
    high = keeps[keeps.index(low) + 1]
    slope = (amounts[high] - amounts[low]) / (high - low)
    if slope <= 0 or (amounts[low] <= limit and _close(low, high)):
        return None
    keep = low + (limit - amounts[low]) / slope
    return min(keep, high) if keep >= _SMALLEST else None


def _close(low: float, high: float) -> bool:
    """Whether two keeps are so close that the chance in validation examples hides what lies between."""
    return high - low <= max(0.01, 0.1 * high) + ROUNDING


def goal_rows(results: Results) -> list[Row]:
    """Return the rows that the page and the terminal show."""
    return [Row(goal_text(result.goal), _cells(results, result)) for result in goal_results(results)]


def _cells(results: Results, result: GoalResult) -> dict[str, Cell]:
    name = result.candidate.name
    run = way(results, name, result.goal.runtime)
    ends = results.difference(run.scored, DENSE)
    drops = any(goal.largest_drop is not None for goal in results.goals)
    return {
        "candidate": Cell(name if result.met else f"none of {result.recipe}; nearest {name}"),
        "result": Cell(_result(results, result)),
        **({"shown by test examples": Cell(_shown(results, result))} if drops else {}),
        f"{results.metric.title}, test examples": cell(run.metric, score, between(ends.low, ends.high, run.metric)),
        "size": cell(run.bytes, size),
        "speed": cell(_speedup(run), times),
    }


def goal_text(goal: Goal) -> str:
    """Return the goal as people read it."""
    if goal.largest_drop is not None:
        return f"drop at most {score(goal.largest_drop)}"
    limit = f"speedup {times(goal.speedup)}" if goal.speedup is not None else f"at most {size(goal.bytes or 0)}"
    return limit if goal.runtime == "torch" else f"{limit} in {TITLES[goal.runtime]}"


def _result(results: Results, result: GoalResult) -> str:
    goal, candidate = result.goal, result.candidate
    amount = _amount(results, goal, candidate)
    if goal.largest_drop is not None:
        ends, metric = results.validation_difference(candidate), candidate.evaluation.validation.metric
        low, high = (ends.low, ends.high) if results.metric.lower_is_better else (-ends.high, -ends.low)
        return f"drop {score(amount)} ({between(low, high, metric)}) on validation examples"
    return times(1 / amount) if goal.speedup is not None else size(int(amount))


def _shown(results: Results, result: GoalResult) -> str:
    margin = result.goal.largest_drop
    if margin is None:
        return ""
    able = [candidate for candidate in results.of(result.recipe) if statistics(results, candidate, DENSE, margin).holds]
    if safe := results.smallest(able):
        interval = results.difference(safe.after, DENSE)
        return f"{safe.name} ({between(interval.low, interval.high, safe.recovered)})"
    chosen = statistics(results, result.candidate, DENSE, margin)
    needed = "" if chosen.wanted is None else f"; for {result.candidate.name} {rows_wanted([chosen])} would be needed"
    return f"none{needed}"
