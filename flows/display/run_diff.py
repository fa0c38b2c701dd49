"""Changes since the last complete run of the study: of parameters, data, code and metrics.

`dvc diff` compares commits, but many nightly runs may lie between two of those. So the inputs and metrics of the last
complete run are kept in the workspace.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from flows.tracking.mirror import flatten, git
from tasks.artifacts.names import candidate_name
from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.config.schema import PARAMS
from tasks.runtime.code_folders import CODE, PACKAGES

if TYPE_CHECKING:
    from flows.engine.stages import Outcome, Reads

LAST = Path(".eckart/last_run.json")
"""The last complete run. No stage reads or writes this file."""
_CODE = "code."  # keys of resolved.yaml: digests of code, by stage
_RESOLVED = (str(PARAMS), str(CODE), *PACKAGES)  # named by the values and digests that follow from them
_DIGITS = 10
_METRICS = ("dense", "factorized", "recovered", "target_parameters", "macs_per_token", "bytes", "speedup")


@dataclass(frozen=True)
class Run:
    """The inputs and metrics of a run of the study."""

    name: str
    """Its name in Prefect, and when it ended."""
    params: dict[str, Any]
    """Dotted name → value, of all parameters that stages read."""
    data: dict[str, str]
    """Path → start of DVC's digest, of all files that stages read and none wrote."""
    code: dict[str, str]
    """Stage → start of the digest of its code; and the git revision."""
    metrics: dict[str, float]
    """Candidate and column of the comparison → number; empty if the run is not complete."""


def current(name: str, stages: Sequence[Outcome] | Sequence[Reads], complete: bool = True) -> Run:
    """Return the run that has just ended in the working directory, with all its stages."""
    params = flatten({key: value for stage in stages for key, value in stage.params.items()})
    written = {path for stage in stages for path in stage.outs}
    read = {path: md5 for stage in stages for path, md5 in stage.deps.items()}
    own = {path: md5[:_DIGITS] for path, md5 in read.items() if not any(_overlap(path, out) for out in written)}
    return Run(
        name,
        params={key: value for key, value in params.items() if not key.startswith(_CODE)},
        data={path: md5 for path, md5 in own.items() if path not in _RESOLVED},
        code={name.rpartition("git.")[2]: value[:_DIGITS] for name, value in git().items()}
        | {key.removeprefix(_CODE): value[:_DIGITS] for key, value in params.items() if key.startswith(_CODE)},
        metrics=_metrics() if complete else {},
    )


def load() -> Run | None:
    """Return the run that was kept last; None if there is none that can be read."""
    try:
        return TypeAdapter(Run).validate_json(LAST.read_bytes())
    except (OSError, ValueError):
        return None


def keep(run: Run) -> None:
    """Keep a run for the next one to compare with; do nothing if the disk is full."""
    with suppress(OSError):
        LAST.parent.mkdir(exist_ok=True)
        LAST.write_text(json.dumps(asdict(run)))


def changes(before: Run, now: Run) -> dict[str, list[tuple[str, Any, Any]]]:
    """Return kind → (name, value before, value now) of all that differs; None stands for what is missing."""
    names = ("params", "data", "code", *(["metrics"] if now.metrics else []))
    kinds = {kind: _differing(getattr(before, kind), getattr(now, kind)) for kind in names}
    return {kind: rows for kind, rows in kinds.items() if rows}


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    rows = [(name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now])]
    return [row for row in rows if row[1] != row[2]]


def _overlap(first: str, second: str) -> bool:
    """Whether one path is the other or contains it: a stage may read a folder that others write into."""
    return Path(first).is_relative_to(second) or Path(second).is_relative_to(first)


def _metrics() -> dict[str, float]:
    with Path("reports/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    metrics: dict[str, float] = {}
    for row in rows:
        name = CONTROL_NAME if row["recipe"] == CONTROL_NAME else candidate_name(row["recipe"], row["keep"])
        metrics |= {f"{name} {column}": float(row[column]) for column in _METRICS if row.get(column)}
    return metrics
