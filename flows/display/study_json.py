"""The results of the last complete run as one JSON object, for scripts. `eckart table --help` lists its keys."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.engine import cached_objects, lock_file
from tasks.artifacts.errors import EckartError
from tasks.artifacts.metrics import METRICS
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import (
    CARDS,
    COMPARISON_PAGE,
    COMPARISON_PICTURE,
    COMPARISON_TABLE,
    COMPARISON_TEXT,
    FINETUNED,
    ONNX,
    ONNX_FILES,
    RUNTIMES,
)
from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.report.choose_candidate import CHOICE, Chosen

REPORTS = {
    "page": COMPARISON_PAGE,
    "text": COMPARISON_TEXT,
    "table": COMPARISON_TABLE,
    "picture": COMPARISON_PICTURE,
}
_SIZES = ("target_parameters", "model_parameters", "macs_per_token", "bytes")


def note() -> str | None:
    """Return a sentence if the results are not those that dvc.lock records, as after `git checkout`."""
    recorded = lock_file.outputs_of("compare".__eq__)
    files = {file: recorded.get(str(file)) for file in (CHOICE, RUNTIMES, *REPORTS.values()) if file.is_file()}
    if all(digest in (None, cached_objects.digest_of(cached_objects.measured(file))) for file, digest in files.items()):
        return None
    return f"These are not the results that {lock_file.LOCK} records: `eckart run` brings those here."


def require(file: Path) -> Path:
    """Return `file`, which a complete run writes, or raise EckartError."""
    if not file.is_file():
        raise EckartError(f"there is no {file}: `eckart run` writes it; run that first")
    return file


def best() -> str | None:
    """Return the name of the candidate that `eckart promote` takes."""
    return _chosen().candidate


def study_json() -> dict[str, Any]:
    """Return the results. A number that was not measured is None."""
    rows = _rows(REPORTS["table"])
    control = next(row for row in rows if row["recipe"] == CONTROL_NAME)
    metric, chosen = METRICS[control["metric"]], _chosen()
    exported = {(row["model"], row["runtime"]): row for row in _rows(RUNTIMES)}
    return {
        "study": chosen.study,
        "metric": control["metric"],
        "lower_is_better": metric.lower_is_better,
        "original": {"metric": float(control["dense"]), **_sizes(control)},
        "control": {"metric": float(control["recovered"])},
        "best": chosen.candidate,
        "non_inferior": chosen.non_inferior,
        "alternative": chosen.alternative,
        "candidates": [_candidate(row, exported) for row in rows if row is not control],
        "goals": [{**found.model_dump(), "goal": found.goal.model_dump(exclude_none=True)} for found in chosen.goals],
        "files": {name: str(path) for name, path in REPORTS.items()},
    }


def _chosen() -> Chosen:
    try:
        return Chosen.model_validate_json(require(CHOICE).read_text())
    except ValidationError as error:
        raise EckartError(
            f"{CHOICE} cannot be read: it is damaged, or of another version of Eckart. `eckart run` writes it anew"
        ) from error


def _rows(file: Path) -> list[dict[str, str]]:
    with require(file).open(newline="") as lines:
        return list(csv.DictReader(lines))


def _candidate(row: Mapping[str, str], exported: Mapping[tuple[str, str], Mapping[str, str]]) -> dict[str, Any]:
    name = candidate_name(row["recipe"], row["keep"])
    exports = {runtime: exported[name, runtime] for runtime in ONNX_FILES if (name, runtime) in exported}
    return {
        "name": name,
        "recipe": row["recipe"],
        "keep": float(row["keep"]),
        "metric": float(row["recovered"]),
        "before_fine_tuning": _number(row["factorized"]),
        "from_original": {end: _number(row[f"from_dense_{end}"]) for end in ("low", "high")},
        "from_control": {end: _number(row[f"from_control_{end}"]) for end in ("low", "high")},
        **_sizes(row),
        "speedup": _speedup(row, "speedup"),
        "exports": {runtime: _export(run) for runtime, run in exports.items()},
        "files": {
            "model": str(FINETUNED / name),
            "card": str(CARDS / f"{name}.md"),
            **{runtime: str(ONNX / name / ONNX_FILES[runtime]) for runtime in exports},
        },
    }


def _export(run: Mapping[str, str]) -> dict[str, Any]:
    shape = next(column for column in run if column.endswith(".of_torch")).removesuffix(".of_torch")  # the first
    return {
        "metric": float(run["metric"]),
        "bytes": int(run["bytes"]),
        "speedup": _speedup(run, f"{shape}.of_torch"),
        "speedup_in_runtime": _speedup(run, f"{shape}.of_same"),
    }


def _speedup(row: Mapping[str, str], column: str) -> dict[str, float | None]:
    return {
        "median": _number(row[column]),
        "low": _number(row[f"{column}_low"]),
        "high": _number(row[f"{column}_high"]),
    }


def _sizes(row: Mapping[str, str]) -> dict[str, int]:
    return {column: int(row[column]) for column in _SIZES}


def _number(cell: str) -> float | None:
    return float(cell) if cell else None
