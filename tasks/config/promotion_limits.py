"""The limits of `promotion` in params.yaml, and which candidate is chosen within them.

The report and `eckart promote` choose by the same function, so that a study has one answer. Validation rows choose; the
gates of a promotion hold what is chosen against the same limits on the test rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.artifacts.metrics import METRICS, MetricName
from tasks.config.schema import Limits as Limits
from tasks.config.schema import Promotion as Promotion

CHOICE = Path("reports/choice.json")
ROUNDING = 1e-9
"""0.842 - 0.832 is no more than 0.01."""


@dataclass(frozen=True)
class Gate:
    """A number that was held against its limit."""

    name: str
    value: float
    limit: float
    at_most: bool
    """Whether the limit is the largest value that passes; else it is the least."""
    words: str
    """Both in a sentence."""
    lacking: str
    """What a value beyond the limit is: `too large`."""
    standard_error: float | None = None
    """Of a value that other rows would change; None of one that is what it is."""
    chance: float = 0.0
    """How far beyond the limit passes: so far chance may have taken it."""

    @property
    def excess(self) -> float:
        """How far the value is beyond the limit; negative if it is within."""
        return self.value - self.limit if self.at_most else self.limit - self.value

    @property
    def passed(self) -> bool:
        return self.excess <= self.chance + ROUNDING

    @property
    def by_chance(self) -> str:
        """By how much it is beyond the limit where it passes nevertheless, in words; empty where it is within."""
        if not self.passed or self.excess <= ROUNDING:
            return ""
        return f"{self.lacking} by {short(self.excess)}, within a standard error of {short(self.standard_error or 0.0)}"

    @property
    def refusal(self) -> str:
        return f"{self.words}: {self.lacking} by {short(self.excess)}"

    @property
    def plain(self) -> dict[str, str | float | bool]:
        """For a program."""
        limit = {"at_most" if self.at_most else "at_least": self.limit}
        error = {} if self.standard_error is None else {"standard_error": self.standard_error}
        return {"name": self.name, "value": self.value, **limit, **error, "passed": self.passed}

    @property
    def row(self) -> tuple[str, str, str, str]:
        """For a table: the name, the value, the limit, and what came of it."""
        value = short(self.value) + ("" if self.standard_error is None else f" ± {short(self.standard_error)}")
        limit = f"{'at most' if self.at_most else 'at least'} {short(self.limit)}"
        beyond = f"{self.lacking} by {short(self.excess)}"
        verdict = ": ".join(filter(None, ["passed", self.by_chance])) if self.passed else beyond
        return self.name, value, limit, verdict


@dataclass(frozen=True)
class Measured:
    """What a candidate has of what is limited; the metrics are those of the same rows."""

    metric: float
    teacher: float
    """What the teacher reaches."""
    standard_error: float
    """Of the difference of the two."""
    parameters: int
    """Of its targets."""
    keep: float
    """The same ÷ those of the teacher's targets."""
    speedup: float


def gates(one: Measured, metric: MetricName, wanted: Limits) -> list[Gate]:
    """What params.yaml asks of any candidate; the drop comes first."""
    drop, chance = METRICS[metric].worse_by(one.metric, one.teacher), wanted.chance(one.standard_error)
    way = "better" if drop < 0 else "worse"
    words = f"{METRICS[metric].title} {short(one.metric)} is {short(abs(drop))} {way} than the teacher's "
    words += f"{short(one.teacher)}; {short(wanted.largest_drop)} are allowed, and {short(chance)} for chance"
    found = [
        Gate("drop from the teacher", drop, wanted.largest_drop, True, words, "too much", one.standard_error, chance)
    ]
    if wanted.keep is not None:
        words = f"keep is {short(one.keep)}; {short(wanted.keep)} are allowed"
        found.append(Gate("keep", one.keep, wanted.keep, True, words, "too large"))
    if wanted.least_speedup is not None:
        words = f"{short(one.speedup)} times as fast as the teacher; {short(wanted.least_speedup)} are asked for"
        found.append(Gate("speed-up", one.speedup, wanted.least_speedup, False, words, "too slow"))
    return found


@dataclass(frozen=True)
class Choice:
    """Which candidate `eckart promote` takes."""

    chosen: str | None
    """None: no candidate is within the limits."""
    nearest: str
    """The one that comes nearest to being within them; the chosen one, where there is one."""
    gates: Mapping[str, Sequence[Gate]]
    """Of every candidate, on validation rows."""

    @property
    def closed(self) -> dict[str, list[Gate]]:
        """Candidate → the limits that it is beyond, of those that are beyond some."""
        closed = {name: [gate for gate in some if not gate.passed] for name, some in self.gates.items()}
        return {name: some for name, some in closed.items() if some}


def choose(candidates: Mapping[str, Measured], metric: MetricName, wanted: Limits) -> Choice:
    """The candidate with the best metric among those within the limits; of equal ones the smallest.

    The nearest, where none is within them, is beyond the fewest limits, and of these the least far, as a share of the
    limit or of the value, whichever is larger.

    Args:
        candidates: by name, as measured on validation rows.
    """
    found = {name: gates(one, metric, wanted) for name, one in candidates.items()}

    def order(name: str) -> tuple[float, ...]:
        one, closed = candidates[name], [gate for gate in found[name] if not gate.passed]
        beyond = max((gate.excess / max(abs(gate.value), abs(gate.limit)) for gate in closed), default=0.0)
        return len(closed), beyond, -METRICS[metric].goodness(one.metric), one.parameters

    nearest = min(candidates, key=order)
    within = all(gate.passed for gate in found[nearest])
    return Choice(nearest if within else None, nearest, found)


class Chosen(BaseModel):
    """The choice as the compare stage writes it down, for what shows a study."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: str | None
    """What `eckart promote` takes; null where no candidate is within the limits."""
    non_inferior: bool
    """Whether the test rows show that it loses no more than `promotion.largest_drop`."""
    alternative: str | None
    """The smallest candidate of which they do show it, where that is another one."""


def short(number: float) -> str:
    """Four digits; what is nothing but rounding is 0."""
    return f"{0.0 if abs(number) < ROUNDING else number:.4g}"
