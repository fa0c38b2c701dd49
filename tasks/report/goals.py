"""Goals in a user's own units: which candidate of each recipe meets one, and at which keep to look next.

A candidate meets `largest_drop` if its metric on the validation rows is no further below the dense model's; `speedup`
if the benchmark found it so many times as fast as the dense model; `bytes` if its weights as saved are no larger. Speed
and bytes are those in torch, or by the goal's `runtime`, like the dense model's: such a goal is asked of the recipes
that are exported. Of those that meet a largest drop the smallest is chosen, of the others the best on the validation
rows, on which models are scored in torch. What was chosen by a drop on some validation rows may lose more on others:
beside it stands the smallest candidate of the recipe of which the test rows show that it loses no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tasks.config.schema import Goal
from tasks.report.non_inferiority import rows_wanted, statistics
from tasks.report.numbers import between, score, size, times
from tasks.report.results import DENSE, CandidateResults, Results
from tasks.report.runtimes import TITLES, Way, way

_ROUNDING = 1e-9  # 0.842 - 0.832 is no more than 0.01
_SMALLEST = 0.02  # keep; below it little is left of any model


@dataclass(frozen=True)
class Asked:
    """A goal and what came of it for a recipe.

    met: whether `candidate` meets it; otherwise it is the nearest that does not.
    closer: a keep that may meet it more closely; None where those at hand are close enough, or none would.
    """

    goal: Goal
    recipe: str
    candidate: CandidateResults
    met: bool
    closer: str | None


@dataclass(frozen=True)
class GoalRow:
    """The same as people read it."""

    goal: str
    candidate: str
    """Or the nearest, said to be that."""
    found: str
    """What the candidate has of what was asked; of a drop with the interval of the difference on validation rows."""
    shown: str
    """Of a drop: the smallest candidate of which test rows show it, or how many would show it of the chosen one."""
    metric: str
    """On the test rows; like the bytes and the speed by the goal's runtime."""
    difference: str
    """The interval of that less the dense model's in torch: validation rows, by which it was chosen, flatter it."""
    bytes: str
    speedup: str


def asked(results: Results) -> list[Asked]:
    """Every goal of the study for every recipe; of another runtime for those that are exported."""
    exported = {one.recipe for one in results.candidates if one.name in results.exports}
    return [
        _asked(results, goal, recipe)
        for goal in results.goals
        for recipe in results.recipes
        if goal.runtime == "torch" or recipe in exported
    ]


def _asked(results: Results, goal: Goal, recipe: str) -> Asked:
    some = [one for one in results.candidates if one.recipe == recipe]
    amounts = {float(one.keep): _amount(results, goal, one) for one in some}
    meeting = [one for one in some if _within(amounts[float(one.keep)], goal)]
    if not meeting:
        best = min(some, key=lambda one: amounts[float(one.keep)])
    elif goal.largest_drop is not None:
        best = min(meeting, key=lambda one: one.evaluation.size.bytes)
    else:
        best = max(meeting, key=lambda one: _goodness(results, one))
    keep = closer(amounts | {1.0: _dense_amount(results, goal)}, _limit(goal), linear=goal.largest_drop is None)
    return Asked(goal, recipe, best, bool(meeting), None if keep is None else f"{keep:g}")


def _goodness(results: Results, one: CandidateResults) -> tuple[float, int]:
    return results.metric.goodness(one.evaluation.validation.metric), -one.evaluation.size.bytes


def _limit(goal: Goal) -> float:
    """The largest amount that meets it."""
    if goal.largest_drop is not None:
        return goal.largest_drop
    return 1 / goal.speedup if goal.speedup is not None else float(goal.bytes or 0)


def _within(amount: float, goal: Goal) -> bool:
    return amount <= _limit(goal) + _ROUNDING


def _amount(results: Results, goal: Goal, one: CandidateResults) -> float:
    """What the goal limits: the metric that is lost, time ÷ the dense model's, or bytes."""
    if goal.largest_drop is not None:
        return results.metric.worse_by(one.evaluation.validation.metric, results.dense.validation.metric)
    run = way(results, one.name, goal.runtime)
    return 1 / _speedup(run) if goal.speedup is not None else run.bytes


def _dense_amount(results: Results, goal: Goal) -> float:
    if goal.largest_drop is not None:
        return 0.0
    return 1.0 if goal.speedup is not None else way(results, "dense", goal.runtime).bytes


def _speedup(run: Way) -> float:
    """At the first shape of the benchmark, over the dense model by the same runtime."""
    return next(iter(run.latencies.values())).of_same.median


def closer(amounts: Mapping[float, float], limit: float, linear: bool) -> float | None:
    """The keep at which to look next, with two digits; None where it would tell nothing new.

    Args:
        amounts: keep → what is limited, that of the dense model at 1 among them.
        linear: whether an amount grows with the keep, evenly, as bytes do, and as time does where products take the
            share p of it: 1 - p + p · keep. Otherwise it falls with it in some way, as what a metric loses does.
    """
    keep = _between(amounts, limit) if linear else _halfway(amounts, limit)
    if keep is None:
        return None
    step = 0.01 if keep >= 0.1 else 0.001
    rounded = round((math.floor if linear else round)(round(keep / step, 6)) * step, 3)
    return None if rounded in amounts else rounded


def _halfway(amounts: Mapping[float, float], limit: float) -> float | None:
    """Between the smallest keep that passes and the largest below it that does not."""
    best = min(keep for keep, amount in amounts.items() if amount <= limit + _ROUNDING or keep == 1)
    low = max((keep for keep in amounts if keep < best), default=0.0)
    return None if _close(low, best) else max((low + best) / 2, _SMALLEST)


def _between(amounts: Mapping[float, float], limit: float) -> float | None:
    """On the line through the largest keep that passes and the one above it; if none does, through the two smallest."""
    keeps = sorted(amounts)
    if len(keeps) == 1:
        return keeps[0] / 2
    low = max((keep for keep in keeps[:-1] if amounts[keep] <= limit + _ROUNDING), default=keeps[0])
    high = keeps[keeps.index(low) + 1]
    slope = (amounts[high] - amounts[low]) / (high - low)
    if slope <= 0 or (amounts[low] <= limit and _close(low, high)):
        return None
    keep = low + (limit - amounts[low]) / slope
    return min(keep, high) if keep >= _SMALLEST else None


def _close(low: float, high: float) -> bool:
    """Whether what lies between would tell little: validation rows have a chance of their own."""
    return high - low <= max(0.01, 0.1 * high) + _ROUNDING


def goal_rows(results: Results) -> Iterator[GoalRow]:
    """What the page and the terminal show."""
    for one in asked(results):
        name = one.candidate.name
        run = way(results, name, one.goal.runtime)
        interval = results.difference(run.scored, DENSE)
        yield GoalRow(
            goal=words(one.goal),
            candidate=name if one.met else f"none of {one.recipe}; nearest {name}",
            found=_found(results, one),
            shown=_shown(results, one),
            metric=score(run.metric),
            difference=between(interval.low, interval.high, run.metric),
            bytes=size(run.bytes),
            speedup=times(_speedup(run)),
        )


def words(goal: Goal) -> str:
    """The goal as people read it."""
    if goal.largest_drop is not None:
        return f"drop at most {score(goal.largest_drop)}"
    asked = f"speedup {times(goal.speedup)}" if goal.speedup is not None else f"at most {size(goal.bytes or 0)}"
    return asked if goal.runtime == "torch" else f"{asked} by {TITLES[goal.runtime]}"


def _found(results: Results, one: Asked) -> str:
    amount = _amount(results, one.goal, one.candidate)
    if one.goal.largest_drop is not None:
        found, metric = results.validation_difference(one.candidate), one.candidate.evaluation.validation.metric
        low, high = (found.low, found.high) if results.metric.lower_is_better else (-found.high, -found.low)
        return f"drop {score(amount)} ({between(low, high, metric)}) on validation rows"
    return times(1 / amount) if one.goal.speedup is not None else size(int(amount))


def _shown(results: Results, one: Asked) -> str:
    margin = one.goal.largest_drop
    if margin is None:
        return ""
    found = {each.name: statistics(results, each, DENSE, margin) for each in results.candidates}
    some = [each for each in results.candidates if each.recipe == one.recipe and found[each.name].holds]
    if safe := min(some, key=lambda each: each.evaluation.size.bytes, default=None):
        interval = results.difference(safe.after, DENSE)
        return f"{safe.name} ({between(interval.low, interval.high, safe.recovered)})"
    chosen = found[one.candidate.name]
    return "none" if chosen.wanted is None else f"none; of {one.candidate.name} {rows_wanted([chosen])} would"
