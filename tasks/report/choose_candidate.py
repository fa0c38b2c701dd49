"""The limits of `promotion` in params.yaml, and the choice of a candidate within them.

The report, MLflow and `eckart promote` all call `choose`, so that they name the same candidate. The choice uses scores
on validation examples; the gates of a promotion then check the chosen candidate on test examples, with the same limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.artifacts.limits import ROUNDING, within
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.config.schema import Goal, Limits

CHOICE = Path("reports/choice.json")


@dataclass(frozen=True)
class Gate:
    """A condition for a promotion: a measured value of the candidate, such as its speedup, and the value's limit."""

    name: str
    value: float
    limit: float
    at_most: bool
    """True if the limit is the largest value that passes; False if it is the smallest."""
    words: str
    """The value and the limit in a sentence."""
    lacking: str
    """Words for a value beyond the limit, such as `too large`."""
    standard_error: float | None = None
    """The standard error of a value measured on a sample of examples; None for an exact value."""
    chance: float = 0.0
    """Largest distance beyond the limit at which a value still passes, because chance may explain it."""

    @property
    def excess(self) -> float:
        """The distance of the value beyond the limit; negative if the value is within the limit."""
        return self.value - self.limit if self.at_most else self.limit - self.value

    @property
    def passed(self) -> bool:
        return within(self.excess, self.chance)

    @property
    def by_chance(self) -> str:
        """A note on a value that passes although it is beyond the limit; empty for other values."""
        if not self.passed or within(self.excess, 0):
            return ""
        return f"{self.lacking} by {short(self.excess)}, within {short(self.chance)} for chance"

    @property
    def refusal(self) -> str:
        return f"{self.words}: {self.lacking} by {short(self.excess - self.chance)}"

    @property
    def plain(self) -> dict[str, str | float | bool]:
        """The gate as JSON."""
        limit = {"at_most" if self.at_most else "at_least": self.limit}
        error = {} if self.standard_error is None else {"standard_error": self.standard_error}
        return {"name": self.name, "value": self.value, **limit, **error, "passed": self.passed}

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The gate as a row of a table: name, value, limit and verdict."""
        value = short(self.value) + ("" if self.standard_error is None else f" ± {short(self.standard_error)}")
        limit = f"{'at most' if self.at_most else 'at least'} {short(self.limit)}"
        beyond = f"{self.lacking} by {short(self.excess - self.chance)}" + " beyond chance" * bool(self.chance)
        verdict = ": ".join(filter(None, ["passed", self.by_chance])) if self.passed else beyond
        return self.name, value, limit, verdict


@dataclass(frozen=True)
class Measured:
    """The measurements of a candidate that have limits. Both metrics are from the same examples."""

    metric: float
    dense: float
    """The metric of the original model."""
    standard_error: float
    """The standard error of the difference between the two metrics."""
    parameters: int
    """Number of parameters of the candidate's target layers."""
    keep: float
    """`parameters` ÷ number of parameters of the original model's target layers."""
    speedup: float


def best_first(measured: Measured, metric: MetricName) -> tuple[float, int]:
    """Return a sort key: the best metric first; for equal metrics, the fewest parameters first."""
    return -METRICS[metric].goodness(measured.metric), measured.parameters


def gates(measured: Measured, metric: MetricName, limits: Limits) -> list[Gate]:
    """Return the gates that every candidate must pass; the drop from the original model comes first."""
    asked = [_drop(measured, metric, limits)]
    if limits.keep is not None:
        words = f"the parameter ratio is {short(measured.keep)}; at most {short(limits.keep)} is allowed"
        asked.append(Gate("keep", measured.keep, limits.keep, True, words, "too large"))
    if limits.least_speedup is not None:
        words = f"the speedup is {short(measured.speedup)}; at least {short(limits.least_speedup)} is required"
        asked.append(Gate("speedup", measured.speedup, limits.least_speedup, False, words, "too slow"))
    return asked


def _drop(measured: Measured, metric: MetricName, limits: Limits) -> Gate:
    drop, chance = METRICS[metric].worse_by(measured.metric, measured.dense), limits.chance(measured.standard_error)
    words = (
        f"{METRICS[metric].title} {short(measured.metric)} is {short(abs(drop))} {'better' if drop < 0 else 'worse'} "
        f"than the original model's {short(measured.dense)}; a drop of {short(limits.largest_drop)} is allowed, and "
        f"{short(chance)} more for chance"
    )
    return Gate(
        "drop from the original", drop, limits.largest_drop, True, words, "too much", measured.standard_error, chance
    )


@dataclass(frozen=True)
class Choice:
    """Result of `choose`."""

    chosen: str | None
    """Name of the candidate that `eckart promote` takes; None if no candidate is within the limits."""
    nearest: str
    """The chosen candidate; if there is none, the candidate that comes nearest to the limits."""
    gates: Mapping[str, Sequence[Gate]]
    """Candidate → its gates on validation examples."""

    @property
    def closed(self) -> dict[str, list[Gate]]:
        """Candidate → the gates that it does not pass; only for candidates that do not pass all gates."""
        closed = {name: [gate for gate in gates if not gate.passed] for name, gates in self.gates.items()}
        return {name: gates for name, gates in closed.items() if gates}


def choose(candidates: Mapping[str, Measured], metric: MetricName, limits: Limits) -> Choice:
    """Choose the candidate with the best metric on validation examples among the candidates within the limits.

    For equal metrics, the candidate with the fewest parameters is chosen. If no candidate is within the limits, the
    nearest one breaks the fewest limits. Among candidates that break equally many limits, the nearest one has the
    smallest excess ÷ max(|value|, |limit|), at its worst gate.
    """
    checked = {name: gates(measured, metric, limits) for name, measured in candidates.items()}

    def order(name: str) -> tuple[float, ...]:
        closed = [gate for gate in checked[name] if not gate.passed]
        beyond = max((gate.excess / max(abs(gate.value), abs(gate.limit)) for gate in closed), default=0.0)
        return len(closed), beyond, *best_first(candidates[name], metric)

    nearest = min(candidates, key=order)
    passes = all(gate.passed for gate in checked[nearest])
    return Choice(nearest if passes else None, nearest, checked)


class GoalOutcome(BaseModel):
    """The result of a goal for a recipe, in reports/choice.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    goal: Goal
    recipe: str
    met: bool
    candidate: str
    """The candidate that meets the goal, or the nearest one."""
    next_keep: float | None
    """A keep that may come closer to the goal; null if none is worth a try."""


class Chosen(BaseModel):
    """The choice in reports/choice.json, which the stage compare writes for programs that show a study."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    study: str
    """Name of the study."""
    goals: tuple[GoalOutcome, ...]
    """The results of `study.goals` for all recipes."""
    candidate: str | None
    """The candidate that `eckart promote` takes; null if no candidate is within the limits."""
    non_inferior: bool
    """Whether the test examples show that the candidate's metric drops by at most `promotion.largest_drop`."""
    alternative: str | None
    """The smallest non-inferior candidate within the limits of size and speed; null if that is `candidate` or none."""


def short(number: float) -> str:
    """Format a number with four digits; numbers below ROUNDING become 0."""
    return f"{0.0 if abs(number) < ROUNDING else number:.4g}"
