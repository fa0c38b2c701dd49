"""Non-inferiority: test whether a candidate's loss of quality is within a margin.

An interval that contains 0 does not show that there is no loss: it may be wide only because examples are few. A
candidate is non-inferior to a reference if the worse end of the interval of their difference is within the margin. If
only the observed loss is within the margin, more examples may show non-inferiority, since the interval narrows with the
square root of their number.

If two models agree on all examples, the bootstrap interval has width 0, even with few examples. Yet a difference that
occurs in none of n examples may affect 1 - 0.025^(1/n) ≈ 3.7 ÷ n of all examples. For metrics between 0 and 1, the
interval therefore extends at least this far below the observed gain; for a Matthews correlation, which is
2 · accuracy - 1 for two classes of equal size, twice as far. (choice) That is exact for means, and a lower bound where
F1 or the Matthews correlation is of rare classes. For perplexities and for Pearson's and Spearman's correlations, in
which all answers change a little, non-inferiority requires at least 30 examples (choice), because bootstrap intervals
of fewer examples are too narrow.

Source: Piaggio et al., JAMA 2012, on the reporting of non-inferiority trials; Hanley and Lippman-Hand, JAMA 1983, on
zero events in n trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tasks.artifacts.limits import within
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.report.numbers import between, counted, percent, score
from tasks.report.results import CONTROL, DENSE, Results, ScoredModel
from tasks.scoring.bootstrap import LEVEL

_COUNTLESS = 10_000_000
_FEWEST = 30
_TAIL = (1 - LEVEL) / 2
_NAMES = {DENSE: "the original model", CONTROL: "the control"}


@dataclass(frozen=True)
class Difference:
    """Difference between a candidate and a reference on some examples, positive if the candidate is better.

    gain: the observed difference.
    low: the worse end of its bootstrap interval.
    margin: the largest loss allowed.
    examples: number of examples.
    weight: how much the metric changes if the answers to some examples change, ÷ their share of all examples; 0 for
        perplexities and correlations of numbers, in which all answers change a little.
    """

    gain: float
    low: float
    margin: float
    examples: int
    weight: float

    @property
    def unseen(self) -> float:
        """The largest share of all possible examples on which two models may differ although they agree on these."""
        return 1 - _TAIL ** (1 / self.examples)

    @property
    def interval_holds(self) -> bool:
        return within(-self.low, self.margin)

    @property
    def holds(self) -> bool:
        """Whether the examples show that the loss is within the margin."""
        enough = self.weight > 0 or self.examples >= _FEWEST
        return enough and self.interval_holds and within(self.weight * self.unseen - self.gain, self.margin)

    @property
    def wanted(self) -> int | None:
        """Number of examples that would show non-inferiority at the same gain; None if the loss itself is too large."""
        if self.holds:
            return self.examples
        room = self.gain + self.margin
        if within(room, 0):
            return None
        unseen = math.log(_TAIL) / math.log1p(-room / self.weight) if room < self.weight else 0.0
        narrow = self.examples * ((self.gain - self.low) / room) ** 2
        return math.ceil(max(narrow, unseen, 0 if self.weight else _FEWEST))


def difference(results: Results, model: ScoredModel, reference: ScoredModel, margin: float) -> Difference:
    """Compare a model with a reference (the original model or the control) on the test examples."""
    ends, metric = results.difference(model, reference), results.metric
    gain = -metric.worse_by(results.metric_of(model), results.metric_of(reference))
    low = min(metric.goodness(ends.low), metric.goodness(ends.high))
    return Difference(gain, low, margin, results.dense.score.examples, _weight(results.task.metric))


def _weight(metric: MetricName) -> float:
    return 2.0 if metric == "matthews" else float(METRICS[metric].share)


def against_both(results: Results, model: ScoredModel) -> dict[ScoredModel, Difference]:
    """Compare a model with the original model and with the control; the margin is `promotion.largest_drop`."""
    return {reference: difference(results, model, reference, results.limits.largest_drop) for reference in _NAMES}


def non_inferior(results: Results, model: ScoredModel) -> bool:
    return all(loss.holds for loss in against_both(results, model).values())


def verdict(results: Results, model: ScoredModel) -> str:
    """Return a sentence on whether the model is non-inferior to both the original model and the control."""
    compared = against_both(results, model)
    shown = "show" if all(loss.holds for loss in compared.values()) else "do not show"
    losses = []
    for reference in compared:
        ends = results.difference(model, reference)
        losses.append(f"{_NAMES[reference]} ({between(ends.low, ends.high, results.metric_of(model))})")
    return (
        f"{counted(results.dense.score.examples, 'test example')} {shown} that it loses at most "
        f"{score(results.limits.largest_drop)} against {' and '.join(losses)}{_missing(compared)}"
        f"{_worse(results, model)}."
    )


def _missing(compared: Mapping[ScoredModel, Difference]) -> str:
    """Return the end of a verdict: how many examples would show non-inferiority, or that the loss is too large."""
    open_ = {reference: loss for reference, loss in compared.items() if not loss.holds}
    if not open_:
        return ""
    spent = [
        f"{score(-loss.gain)} against {_NAMES[reference]}" for reference, loss in open_.items() if loss.wanted is None
    ]
    if spent:
        return f": the observed loss is {' and '.join(spent)}, so that more examples would not show it"
    if all(loss.interval_holds for loss in open_.values()):
        first = next(iter(open_.values()))
        count = counted(first.examples, "example")
        few = f"{count} can miss a change that affects {percent(first.unseen)} of all examples"
        reason = few if first.weight else "no interval from so few examples is reliable"
        return f": {reason}; {examples_wanted(open_.values())} would show it"
    return f": {examples_wanted(open_.values())} would show it"


def examples_wanted(losses: Iterable[Difference]) -> str:
    """Format the number of examples, to two digits, that would show non-inferiority in all comparisons."""
    most = max(loss.wanted or 0 for loss in losses)
    step = 10 ** max(0, len(str(most)) - 2)
    return f"about {-(-most // step) * step:,} examples" if most < _COUNTLESS else f"more than {_COUNTLESS:,} examples"


def _worse(results: Results, model: ScoredModel) -> str:
    worse = [name for reference, name in _NAMES.items() if results.gain(model, reference) < 0]
    return f"; it is significantly worse than {' and '.join(worse)}" if worse else ""
