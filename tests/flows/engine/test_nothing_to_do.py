"""A study with nothing to do: MLflow is told what it lacks, and nothing else is begun."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.engine import nothing_to_do
from flows.engine import stages as engine
from flows.engine.stages import Outcome, Planned
from tests.workspace import tiny_params, write_params

NAMES = ("teacher", "search@svd-0.5", "finetune@svd-0.5", "compare")


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    write_params(tmp_path, tiny_params())
    return tmp_path


def planned(name: str, cached: bool) -> Planned:
    outcome = Outcome(name, "Cached", 0.0, f"key of {name}") if cached else None
    writes = (str(Path("reports/comparison.txt").absolute()),) if name == "compare" else ()
    return Planned(name, (), alone=False, reads=(), writes=writes, definition="d", cached=outcome)


def runs(root: Path) -> dict[str, Run]:
    """By candidate, the parent's under the empty name, the newest of each."""
    client = MlflowClient(f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment
    found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    return {run.data.tags.get("eckart.candidate", ""): run for run in found}


def test_an_unknown_candidate_is_backfilled_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "plan", lambda clear: [planned(name, cached=True) for name in NAMES])
    outcomes = nothing_to_do.outcomes()
    assert outcomes
    assert [outcome.stage for outcome in outcomes] == list(NAMES)
    first = runs(root)
    assert set(first) == {"", "svd-0.5"}
    assert first["svd-0.5"].data.tags["eckart.backfilled"] == "true"
    assert {run.info.status for run in first.values()} == {"FINISHED"}
    assert first[""].data.params["data.columns.text"] == "text"
    assert first[""].data.metrics["stages.cached"] == len(NAMES)

    nothing_to_do.outcomes()
    second = runs(root)
    assert second["svd-0.5"].info.run_id == first["svd-0.5"].info.run_id
    assert second[""].info.run_id == first[""].info.run_id  # one that would say nothing new is not made


def test_whatever_is_to_be_run_is_left_to_prefect(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "plan", lambda clear: [planned(name, cached=name != "compare") for name in NAMES])
    assert nothing_to_do.outcomes() is None
    assert not (root / "mlflow.db").exists()
