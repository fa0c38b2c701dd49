"""Tables and texts (artifacts) for a run's page in Prefect: comparison, changes since the last run, failures, gates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pandas as pd
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.engine import stages
from flows.environment.redaction import redact
from tasks.artifacts.metrics import METRICS

if TYPE_CHECKING:
    from flows.engine.stages import Outcome
    from flows.tracking.mirror import Mirror
    from tasks.report.choose_candidate import Gate

_COLUMNS = {
    "original": "dense",
    "before fine-tuning": "factorized",
    "after fine-tuning": "recovered",
    "target parameters": "target_parameters",
    "MACs per token": "macs_per_token",
    "times as fast": "speedup",
}
"""Title of a column of the table → column of the comparison."""
_ROWS = 100  # largest number of changes of one kind that are listed


def comparison(study: str, mirror: Mirror) -> None:
    """Show the comparison of the candidates as a table, with links to their runs in MLflow."""
    from flows.display import run_diff  # a slow import

    rows = run_diff.comparison()
    table = [
        {"candidate": name, **{title: _short(row[column]) for title, column in _COLUMNS.items()}}
        for name, row in rows.items()
    ]
    linked = ", ".join(f"[{name}]({mirror.page(run)})" for name, run in mirror.lineage.items())
    links = "MLflow was not reached." if mirror.down else f"MLflow: [this run]({mirror.page()}), {linked}"
    metric = METRICS[next(iter(rows.values()))["metric"]].with_direction
    description = f"{metric}, on test examples. {links}"
    create_table_artifact(table, key=f"comparison-{_slug(study)}", description=description)


def changes(study: str, run: str, outcomes: Sequence[Outcome] | None) -> None:
    """Show what changed since the last complete run; if this run is complete, store it as the last complete run.

    Args:
        run: name of this run.
        outcomes: outcomes of all stages; None if the run is not complete.
    """
    from flows.display import run_diff  # a slow import

    before, complete = run_diff.load(), outcomes is not None
    if not (before or complete):
        return
    name = f"{run}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    now = run_diff.current(name, stages.read_now() if outcomes is None else outcomes, complete)
    if before:
        differences = run_diff.changes(before, now)
        parts = [f"### {kind}\n\n{_changes(rows)}" for kind, rows in differences.items()]
        same = "parameters, data, code and metrics" if complete else "parameters, data and code"
        text = "\n\n".join(parts) or f"Nothing: the same {same}."
        _markdown(f"## Since {before.name}\n\n{text}", f"changes-{_slug(study)}")
    if complete:
        run_diff.keep(now)


def failure(study: str, causes: Mapping[str, str], lines: Mapping[str, Iterable[str]]) -> None:
    """Show the failed stages, each with its cause and the last lines that it printed."""
    parts = [
        f"## {name}\n\n{cause}\n\n~~~~\n" + "\n".join(lines.get(name, ())) + "\n~~~~" for name, cause in causes.items()
    ]
    _markdown("\n\n".join(parts), f"failure-{_slug(study)}")


def gates(model: str, decision: str, checked: Sequence[Gate]) -> None:
    """Show the decision about a promotion of the registered model `model`, and a table of its gates."""
    _markdown(f"{decision}\n\n{gate_table(checked)}", f"promotion-{_slug(model)}")


def gate_table(checked: Sequence[Gate]) -> str:
    """Return the gates as a Markdown table."""
    return _table(pd.DataFrame([gate.row for gate in checked], columns=["gate", "value", "limit", ""]))


def _changes(rows: Sequence[tuple[str, Any, Any]]) -> str:
    cells = [(name, _cell(before), _cell(now), _difference(before, now)) for name, before, now in rows[:_ROWS]]
    table = _table(pd.DataFrame(cells, columns=["", "before", "now", "difference"]))
    return table if len(rows) <= _ROWS else f"{table}\n\nand {len(rows) - _ROWS} more"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _difference(before: Any, now: Any) -> str:
    numbers = isinstance(before, float) and isinstance(now, float)
    return f"{now - before:+.3g}" if numbers else ""


def _table(rows: pd.DataFrame) -> str:
    return str(rows.to_markdown(index=False, disable_numparse=True))


def _markdown(text: str, key: str) -> None:
    create_markdown_artifact(redact(text), key=key)


def _short(number: str) -> str:
    """Shorten the text of a number to four digits; leave counts and empty cells unchanged."""
    return number if number.isdigit() or not number else f"{float(number):.4g}"


def _slug(name: str) -> str:
    """Turn a name into a valid key of an artifact: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
