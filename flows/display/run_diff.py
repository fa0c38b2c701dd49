"""Find the parameters, data, code and metrics that changed since the last complete run of the study.

`dvc diff` compares commits, but there may be many nightly runs between two commits. So the inputs and metrics of the
last complete run are kept in a file of the workspace.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flows.engine.stages import Outcome, Reads, overlaps
from flows.tracking.mirror import flatten, git
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import COMPARISON_TABLE
from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.config.params_file import PARAMS
from tasks.runtime.code_folders import CODE, PACKAGES

LAST = Path(".eckart/last_run.json")
"""File with the last complete run. No stage reads or writes it."""
_CODE = "code."  # in resolved.yaml, the value of code.STAGE is a digest of the stage's code
_RESOLVED = (str(PARAMS), str(CODE), *PACKAGES)  # not listed as data: their contents are listed as parameters and code
_DIGITS = 10
_METRICS = ("dense", "factorized", "recovered", "target_parameters", "macs_per_token", "bytes", "speedup")


@dataclass(frozen=True)
class Run:
    """Inputs and metrics of a run of the study."""

    name: str
    """The run's name in Prefect, and when it ended."""
    params: dict[str, Any]
    """Dotted name of a parameter that a stage reads → its value."""
    data: dict[str, str]
    """Path of a file that a stage reads and no stage writes → start of DVC's digest."""
    code: dict[str, str]
    """Stage → start of the digest of its code. The git revision is another entry."""
    metrics: dict[str, float]
    """Name of a candidate and a column of the comparison → number; empty if the run is not complete."""


def current(name: str, stages: Sequence[Outcome] | Sequence[Reads], complete: bool = True) -> Run:
    """Return the inputs and metrics of the run that has just ended in the working directory.

    Args:
        stages: the inputs and outputs of all stages.
        complete: whether all stages are up to date; if not, the metrics are left out.
    """
    params = flatten({key: value for stage in stages for key, value in stage.params.items()})
    written = {path for stage in stages for path in stage.outs}
    read = {path: md5 for stage in stages for path, md5 in stage.deps.items()}
    own = {path: md5[:_DIGITS] for path, md5 in read.items() if not overlaps(path, written)}
    return Run(
        name,
        params={key: value for key, value in params.items() if not key.startswith(_CODE)},
        data={path: md5 for path, md5 in own.items() if path not in _RESOLVED},
        code={name.rpartition("git.")[2]: value[:_DIGITS] for name, value in git().items()}
        | {key.removeprefix(_CODE): value[:_DIGITS] for key, value in params.items() if key.startswith(_CODE)},
        metrics={
            f"{candidate} {column}": float(row[column])
            for candidate, row in (comparison() if complete else {}).items()
            for column in _METRICS
            if row.get(column)
        },
    )


def load() -> Run | None:
    """Return the last complete run; None if none was kept or its file cannot be read."""
    try:
        return TypeAdapter(Run).validate_json(LAST.read_bytes())
    except (OSError, ValueError):
        return None


def keep(run: Run) -> None:
    """Keep a complete run, so that the next run can be compared with it. Errors of the disk are ignored."""
    with suppress(OSError):
        LAST.parent.mkdir(exist_ok=True)
        LAST.write_text(json.dumps(asdict(run)))


def changes(before: Run, now: Run) -> dict[str, list[tuple[str, Any, Any]]]:
    """Return the differences: kind (params, data, …) → (name, value before, value now); a missing value is None."""
    names = ("params", "data", "code", *(["metrics"] if now.metrics else []))
    kinds = {kind: _differing(getattr(before, kind), getattr(now, kind)) for kind in names}
    return {kind: rows for kind, rows in kinds.items() if rows}


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    rows = [(name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now])]
    return [row for row in rows if row[1] != row[2]]


def comparison() -> dict[str, dict[str, str]]:
    """Read the comparison; return name of a candidate or of the control → its row, a mapping of column → cell."""
    with COMPARISON_TABLE.open() as file:
        return {
            CONTROL_NAME if row["recipe"] == CONTROL_NAME else candidate_name(row["recipe"], row["keep"]): row
            for row in csv.DictReader(file)
        }
