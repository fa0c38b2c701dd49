"""What a run's page in Prefect's UI shows of the study."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

from prefect.artifacts import create_table_artifact

from tasks.candidate_names import candidate_name
from tasks.metrics import METRICS, MetricName
from tasks.records import CONTROL_NAME

if TYPE_CHECKING:
    from flows.tracking.mirror import Mirror

_COLUMNS = ("dense", "factorized", "recovered", "target_parameters", "macs_per_token", "speedup")


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


def _short(number: str) -> str:
    """Four digits of a fraction, all of a count; an empty cell stays empty."""
    return number if number.isdigit() or not number else f"{float(number):.4g}"


def _slug(name: str) -> str:
    """Keys of artifacts are lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
