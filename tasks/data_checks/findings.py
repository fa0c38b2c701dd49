"""The findings of the data checks, as written to reports/check.json: each measured value with its limit."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.artifacts.limits import within

FINDINGS = Path("reports/check.json")


class Finding(BaseModel):
    """Result of one check: a measured value with its limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    measure: str
    where: str
    """The split, or the two data sets that are compared."""
    value: float | None
    """None if it was not measured."""
    limit: float | None = None
    """None if params.yaml switches the check off."""
    chance: float = 0.0
    """Allowance for chance: how far the value may exceed the limit; 0 for counts."""
    passed: bool = True
    note: str
    """Details of the value and what to do if it breaks the limit, or why it was not measured."""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.limit is None:
            return "off"
        return "passed" if self.passed else "broken"

    @property
    def line(self) -> str:
        """The finding as one line of text, for logs and error messages."""
        start = f"{self.measure} ({self.where})"
        if self.value is None:
            return f"{start}: not measured, {self.note}"
        limit = "no limit" if self.limit is None else f"limit {self.limit:.4g}"
        chance = f" and {self.chance:.2g} for chance" if self.chance and self.limit is not None else ""
        return f"{start}: {self.value:.4g}, {limit}{chance}: {self.verdict if self.passed else self.note}"


class Findings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    findings: tuple[Finding, ...]

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.passed]


def at_least(measure: str, where: str, value: float, limit: float | None, note: str) -> Finding:
    passed = limit is None or within(limit, value)
    return Finding(measure=measure, where=where, value=value, limit=limit, passed=passed, note=note)


def at_most(measure: str, where: str, value: float, limit: float | None, note: str, chance: float = 0.0) -> Finding:
    passed = limit is None or within(value, limit + chance)
    return Finding(measure=measure, where=where, value=value, limit=limit, chance=chance, passed=passed, note=note)


def unmeasured(measure: str, where: str, why: str) -> Finding:
    return Finding(measure=measure, where=where, value=None, note=why)
