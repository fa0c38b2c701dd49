"""Whether the test rows show that a candidate loses no more than a margin: non-inferiority.

That an interval holds 0 is no evidence of no loss: the fewer the rows, the wider it is. A candidate is non-inferior to
a reference where the worse end of the interval of their difference is within the margin. Where it is not, and the loss
that was observed is, more rows may show it: the interval is narrower by the square root of their number.

Resamples of rows of which none differs differ in none, so that a bootstrap of a few such rows would be certain. What no
row in n shows may still be true of 1 - 0.025^(1/n) of all rows, 3.7 ÷ n: no interval reaches less far below.

Source: Piaggio et al., JAMA 2012, on the reporting of non-inferiority trials; Hanley and Lippman-Hand, JAMA 1983, on
what nothing in n shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tasks.bootstrap import LEVEL
from tasks.limits import ROUNDING
from tasks.report.numbers import between, counted, score
from tasks.report.results import CONTROL, DENSE, CandidateResults, Results, ScoredModel

_COUNTLESS = 10_000_000
_TAIL = (1 - LEVEL) / 2
_NAMES = {DENSE: "the dense model", CONTROL: "the control"}


@dataclass(frozen=True)
class Evidence:
    """What some rows say of a difference: gains are above 0, whichever way the metric goes.

    gain: as it was observed.
    low: the worse end of its interval, by the bootstrap.
    counts: whether a row is right or wrong, or in part so, but not without end.
    """

    gain: float
    low: float
    margin: float
    rows: int
    counts: bool

    @property
    def holds(self) -> bool:
        """Whether the loss is within the margin."""
        unseen = 1 - _TAIL ** (1 / self.rows) if self.counts else 0.0
        return min(self.low, self.gain - unseen) >= -self.margin - ROUNDING

    @property
    def wanted(self) -> int | None:
        """How many rows would show it, if the difference stayed; None where it is itself beyond the margin."""
        if self.holds:
            return self.rows
        room = self.gain + self.margin
        if room <= ROUNDING:
            return None
        unseen = math.log(_TAIL) / math.log1p(-room) if self.counts and room < 1 else 0.0
        return math.ceil(max(self.rows * ((self.gain - self.low) / room) ** 2, unseen))


def evidence(results: Results, one: CandidateResults, reference: ScoredModel, margin: float) -> Evidence:
    """Of the recovered model against the dense model or the control, on the test rows."""
    found, metric = results.difference(one.after, reference), results.metric
    gain = -metric.worse_by(one.recovered, results.metric_of(reference))
    low = min(metric.goodness(found.low), metric.goodness(found.high))
    return Evidence(gain, low, margin, results.dense.score.rows, metric.bounded)


def against_both(results: Results, one: CandidateResults) -> dict[ScoredModel, Evidence]:
    """Against the dense model and the control, with the margin of a promotion: `promotion.largest_drop`."""
    return {reference: evidence(results, one, reference, results.limits.largest_drop) for reference in _NAMES}


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


def _missing(results: Results, found: Mapping[ScoredModel, Evidence]) -> str:
    """What would show it: more rows, or, where the loss itself is beyond the margin, nothing."""
    if all(each.holds for each in found.values()):
        return ""
    beyond = [f"{score(-each.gain)} against {_NAMES[name]}" for name, each in found.items() if each.wanted is None]
    if beyond:
        return f": the loss itself is {' and '.join(beyond)}, and more rows would not change that"
    return f": {rows_wanted(found.values())} would"


def rows_wanted(found: Iterable[Evidence]) -> str:
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
