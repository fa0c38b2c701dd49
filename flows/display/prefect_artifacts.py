"""What a run's page in Prefect's UI shows of the study, and of a promotion."""

from __future__ import annotations

import csv
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.engine import stages
from flows.environment.redaction import shown
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.artifacts.names import candidate_name
from tasks.artifacts.results_schema import CONTROL_NAME

if TYPE_CHECKING:
    from flows.engine.stages import Outcome, Planned
    from flows.study import Execute
    from flows.tracking.mirror import Mirror
    from tasks.config.promotion_limits import Gate

_COLUMNS = ("dense", "factorized", "recovered", "target_parameters", "macs_per_token", "speedup")
_LINES = 20  # of a stage that failed
_ROWS = 100  # of each kind of change


class LastLines:
    """The last lines that each stage printed."""

    def __init__(self) -> None:
        self.of: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_LINES))

    def listening(self, execute: Execute) -> Execute:
        """The same execution, whose lines are kept here, too."""

        def followed(planned: Planned, command: str, log: Callable[[str], None]) -> Outcome | float:
            def keep(line: str) -> None:
                self.of[planned.name].append(line)
                log(line)

            return execute(planned, command, keep)

        return followed


def comparison(study: str, mirror: Mirror) -> None:
    """The comparison as a table artifact, each candidate linked with its run in MLflow."""
    with Path("reports/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = []
    for row in rows:
        name = row["recipe"] if row["recipe"] == CONTROL_NAME else candidate_name(row["recipe"], row["keep"])
        table.append({"candidate": name, **{column: _short(row[column]) for column in _COLUMNS}})
    linked = ", ".join(f"[{name}]({mirror.page(run)})" for name, run in mirror.lineage.items())
    links = "MLflow was not reached." if mirror.down else f"MLflow: [this run]({mirror.page()}), {linked}"
    metric = METRICS[cast("MetricName", rows[0]["metric"])].with_direction
    create_table_artifact(table, key=f"comparison-{_slug(study)}", description=f"{metric}. {links}")


def changes(study: str, run: str, outcomes: Sequence[Outcome] | None) -> None:
    """What is not as it was in the last complete run, as a Markdown artifact; then `run` is the last, if it is one.

    Args:
        outcomes: of all stages; None if the run is not complete.
    """
    from flows.display import run_diff  # a slow import

    before, complete = run_diff.load(), outcomes is not None
    if not (before or complete):
        return
    name = f"{run}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    now = run_diff.of(name, stages.read_now() if outcomes is None else outcomes, complete)
    if before:
        found = run_diff.changes(before, now)
        parts = [f"### {kind}\n\n{_changes(rows)}" for kind, rows in found.items()]
        same = "parameters, data, code and metrics" if complete else "parameters, data and code"
        text = "\n\n".join(parts) or f"Nothing: the same {same}."
        _markdown(f"## Since {before.name}\n\n{text}", f"changes-{_slug(study)}")
    if complete:
        run_diff.keep(now)


def failure(study: str, causes: Mapping[str, str], lines: LastLines) -> None:
    """Each stage that failed with its cause and its last lines, as a Markdown artifact."""
    parts = [f"## {name}\n\n{cause}\n\n~~~~\n" + "\n".join(lines.of[name]) + "\n~~~~" for name, cause in causes.items()]
    _markdown("\n\n".join(parts), f"failure-{_slug(study)}")


def gates(model: str, decision: str, found: Sequence[Gate]) -> None:
    """The gates of a promotion and what came of it, as a Markdown artifact."""
    rows = pd.DataFrame([gate.row for gate in found], columns=["gate", "value", "limit", ""])
    _markdown(f"{decision}\n\n{_table(rows)}", f"promotion-{_slug(model)}")


def _changes(rows: Sequence[tuple[str, Any, Any]]) -> str:
    cells = [(name, _said(before), _said(now), _difference(before, now)) for name, before, now in rows[:_ROWS]]
    table = _table(pd.DataFrame(cells, columns=["", "before", "now", "difference"]))
    return table if len(rows) <= _ROWS else f"{table}\n\nand {len(rows) - _ROWS} more"


def _said(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _difference(before: Any, now: Any) -> str:
    both = isinstance(before, float) and isinstance(now, float)
    return f"{now - before:+.3g}" if both else ""


def _table(rows: pd.DataFrame) -> str:
    return str(rows.to_markdown(index=False, disable_numparse=True))


def _markdown(text: str, key: str) -> None:
    create_markdown_artifact(shown(text), key=key)


def _short(number: str) -> str:
    """Four digits of a fraction, all of a count; an empty cell stays empty."""
    return number if number.isdigit() or not number else f"{float(number):.4g}"


def _slug(name: str) -> str:
    """Keys of artifacts are lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
