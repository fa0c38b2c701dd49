"""Whether the test rows show that a candidate loses no more than a margin: non-inferiority.

That an interval holds 0 is no statistics of no loss: the fewer the rows, the wider it is. A candidate is non-inferior
to a reference where the worse end of the interval of their difference is within the margin. Where it is not, and the
loss that was observed is, more rows may show it: the interval is narrower by the square root of their number.

Resamples of rows of which none differs differ in none, so that a bootstrap of a few such rows would be certain. What no
row in n shows may still be true of 1 - 0.025^(1/n) of all rows, 3.7 ÷ n: where the metric is a mean of what rows have,
each between 0 and 1, no interval reaches less far below. Of other metrics fewer than 30 rows show nothing (choice): of
so few the bootstrap's intervals are too narrow.

Source: Piaggio et al., JAMA 2012, on the reporting of non-inferiority trials; Hanley and Lippman-Hand, JAMA 1983, on
what nothing in n shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasks.artifacts.task_spec import Task
from tasks.config.promotion_limits import ROUNDING
from tasks.nlp_tasks import kind_of
from tasks.report.numbers import between, counted, percent, score
from tasks.report.results import CONTROL, DENSE, CandidateResults, Results, ScoredModel
from tasks.scoring.bootstrap import LEVEL

_COUNTLESS = 10_000_000
_FEWEST = 30
_TAIL = (1 - LEVEL) / 2
_NAMES = {DENSE: "the dense model", CONTROL: "the control"}


@dataclass(frozen=True)
class Statistics:
    """What some rows say of a difference: gains are above 0, whichever way the metric goes.

    gain: as it was observed.
    low: the worse end of its interval, by the bootstrap.
    is_mean: whether the metric is a mean over rows of what is between 0 and 1.
    """

    gain: float
    low: float
    margin: float
    rows: int
    is_mean: bool

    @property
    def unseen(self) -> float:
        """What no row shows may be true of so many of all."""
        return 1 - _TAIL ** (1 / self.rows) if self.is_mean else 0.0

    @property
    def interval_holds(self) -> bool:
        return self.low >= -self.margin - ROUNDING

    @property
    def holds(self) -> bool:
        """Whether the loss is within the margin."""
        enough = self.is_mean or self.rows >= _FEWEST
        return enough and self.interval_holds and self.gain - self.unseen >= -self.margin - ROUNDING

    @property
    def wanted(self) -> int | None:
        """How many rows would show it, if the difference stayed; None where it uses up the margin itself."""
        if self.holds:
            return self.rows
        room = self.gain + self.margin
        if room <= ROUNDING:
            return None
        unseen = math.log(_TAIL) / math.log1p(-room) if self.is_mean and room < 1 else 0.0
        narrow = self.rows * ((self.gain - self.low) / room) ** 2
        return math.ceil(max(narrow, unseen, 0 if self.is_mean else _FEWEST))


def statistics(results: Results, one: CandidateResults, reference: ScoredModel, margin: float) -> Statistics:
    """Of the recovered model against the dense model or the control, on the test rows."""
    found, metric = results.difference(one.after, reference), results.metric
    gain = -metric.worse_by(one.recovered, results.metric_of(reference))
    low = min(metric.goodness(found.low), metric.goodness(found.high))
    return Statistics(gain, low, margin, results.dense.score.rows, is_mean(results.task))


def is_mean(task: Task) -> bool:
    """Whether the task's metric is a mean over rows; F1 of classes, correlations and a perplexity are none."""
    return task.metric in kind_of(task).mean_metrics


def against_both(results: Results, one: CandidateResults) -> dict[ScoredModel, Statistics]:
    """Against the dense model and the control, with the margin of a promotion: `promotion.largest_drop`."""
    return {reference: statistics(results, one, reference, results.limits.largest_drop) for reference in _NAMES}


def non_inferior(results: Results, one: CandidateResults) -> bool:
    return all(each.holds for each in against_both(results, one).values())


def smallest(results: Results, some: Sequence[CandidateResults]) -> CandidateResults | None:
    """Of equally small ones the best on validation rows; None of none."""
    goodness = results.metric.goodness
    return min(
        some,
        key=lambda one: (one.evaluation.target_parameters, -goodness(one.evaluation.validation.metric)),
        default=None,
    )


def verdict(results: Results, one: CandidateResults) -> str:
    """What the test rows show of a candidate against both references, in a sentence."""
    found = against_both(results, one)
    shown = "show" if all(each.holds for each in found.values()) else "do not show"
    losses = " and ".join(f"{_NAMES[each]} ({_interval(results, one, each)})" for each in found)
    return (
        f"{counted(results.dense.score.rows, 'test row')} {shown} that it loses at most "
        f"{score(results.limits.largest_drop)} against {losses}{_missing(results, found)}{_worse(results, one)}."
    )


def _missing(results: Results, found: Mapping[ScoredModel, Statistics]) -> str:
    """What would show it: more rows, or, where the loss itself uses up the margin, nothing."""
    open_ = {name: each for name, each in found.items() if not each.holds}
    if not open_:
        return ""
    spent = [f"{score(-each.gain)} against {_NAMES[name]}" for name, each in open_.items() if each.wanted is None]
    if spent:
        return f": the loss itself is {' and '.join(spent)}, which leaves nothing of that, whatever the number of rows"
    if all(each.interval_holds for each in open_.values()):
        each = next(iter(open_.values()))
        few = f"what none of {counted(each.rows, 'row')} shows may be true of {percent(each.unseen)} of all"
        return f": {few if each.is_mean else 'of so few rows no interval is sure'}; {rows_wanted(open_.values())} would"
    return f": {rows_wanted(open_.values())} would"


def rows_wanted(found: Iterable[Statistics]) -> str:
    """How many rows would show all of it, if the differences stayed: to two digits, in words."""
    most = max(each.wanted or 0 for each in found)
    step = 10 ** max(0, len(str(most)) - 2)
    return f"about {-(-most // step) * step:,} rows" if most < _COUNTLESS else f"more than {_COUNTLESS:,} rows"


def _worse(results: Results, one: CandidateResults) -> str:
    worse = [name for reference, name in _NAMES.items() if results.gain(one.after, reference) < 0]
    return f"; it is worse than {' and '.join(worse)} beyond chance" if worse else ""


def _interval(results: Results, one: CandidateResults, reference: ScoredModel) -> str:
    found = results.difference(one.after, reference)
    return between(found.low, found.high, one.recovered)
