"""What changed since the last complete run of the study here, as `dvc diff` says it of two commits.

The runs of many nights may lie between two commits, so what a run read and found is kept in the workspace.
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
"""No stage reads or writes it."""
_CODE = "code."  # in resolved.yaml: digests of code, by stage
_RESOLVED = (str(PARAMS), str(CODE), *PACKAGES)  # named by the values and digests that follow from them
_DIGITS = 10
_METRICS = ("dense", "factorized", "recovered", "target_parameters", "macs_per_token", "bytes", "speedup")


@dataclass(frozen=True)
class Run:
    """A run of the study."""

    name: str
    """In Prefect, and when it was over."""
    params: dict[str, Any]
    """Dotted name → value, of those that stages read."""
    data: dict[str, str]
    """Path → the beginning of DVC's digest, of what stages read and none wrote."""
    code: dict[str, str]
    """Stage → the beginning of the digest of its code; and the git revision."""
    metrics: dict[str, float]
    """Candidate and column of the comparison → number; none of a run that is not complete."""


def of(name: str, stages: Sequence[Outcome] | Sequence[Reads], complete: bool = True) -> Run:
    """The run that is just over in the working directory, of which `stages` are all."""
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
    """The last one that was kept; None if there is none that can be read."""
    try:
        return TypeAdapter(Run).validate_json(LAST.read_bytes())
    except (OSError, ValueError):
        return None


def keep(run: Run) -> None:
    """Keep it for the next; nothing if the disk is full."""
    with suppress(OSError):  # the study is complete all the same
        LAST.parent.mkdir(exist_ok=True)
        LAST.write_text(json.dumps(asdict(run)))


def changes(before: Run, now: Run) -> dict[str, list[tuple[str, Any, Any]]]:
    """Kind → name, value before and value now of all that is not the same; None is what is not there."""
    named = ("params", "data", "code", *(["metrics"] if now.metrics else []))
    kinds = {kind: _differing(getattr(before, kind), getattr(now, kind)) for kind in named}
    return {kind: found for kind, found in kinds.items() if found}


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    rows = [(name, before.get(name), now.get(name)) for name in dict.fromkeys([*before, *now])]
    return [row for row in rows if row[1] != row[2]]


def _overlap(one: str, other: str) -> bool:
    """Whether one is the other, or a folder that it lies in: a stage may read the folder of what others write."""
    return Path(one).is_relative_to(other) or Path(other).is_relative_to(one)


def _metrics() -> dict[str, float]:
    with Path("reports/comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    found: dict[str, float] = {}
    for row in rows:
        name = CONTROL_NAME if row["recipe"] == CONTROL_NAME else candidate_name(row["recipe"], row["keep"])
        found |= {f"{name} {column}": float(row[column]) for column in _METRICS if row.get(column)}
    return found
