"""Four unattended nights: Prefect, DVC and MLflow agree on the result of each."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from mlflow.entities import Run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flows.registry.versions import PROMOTED_AT
from tests.flows.month import CANDIDATE, LEEWAY, NIGHTS, Month, Morning, passed
from tests.flows.toy import Study


def test_a_month(study: Study, prefect: dict[str, str], tmp_path: Path) -> None:
    month = Month(tmp_path / "workspace", prefect)
    month.begin(study)
    for night in NIGHTS:
        evening = month.champion()
        morning = month.live_through(night)
        explained(month, morning)
        assert morning.champion == (month.own() if night.champion == "own" else evening)
    nights_that_were_killed_were_ended_by_the_next(month)
    the_champion_is_the_best_that_passed(month)
    a_candidate_comes_back_after_gc(month)


def explained(month: Month, morning: Morning) -> None:
    """Check that Prefect's state is the expected one, and that DVC and MLflow agree with it."""
    night, run = morning.night, morning.run
    assert run.state_name == night.state, run.state
    assert run.start_time
    assert run.expected_start_time
    assert run.start_time - run.expected_start_time >= night.begins
    statuses = {made.info.status for made in of_run(month, str(run.id))}
    running = {made.info.run_id for made in month.runs() if made.info.status == "RUNNING"}
    if night.killed:
        assert statuses == {"RUNNING"}
        return  # DVC's locks may be half-written, which the next run mends
    assert month.up_to_date() == morning.complete
    assert not running
    assert statuses <= {"FINISHED" if morning.complete else "FAILED"}
    assert statuses or night.champion != "own"


def of_run(month: Month, flow_run: str) -> list[Run]:
    return [made for made in month.runs() if made.data.tags.get("prefect.flow_run") == flow_run]


def nights_that_were_killed_were_ended_by_the_next(month: Month) -> None:
    killed = [morning for morning in month.mornings if morning.night.killed]
    assert killed
    for morning in killed:
        assert {made.info.status for made in of_run(month, str(morning.run.id))} == {"KILLED"}
        assert month.flow_run(morning.run.id).state_name == "Crashed"


def the_champion_is_the_best_that_passed(month: Month) -> None:
    """Compare the versions by their gates, and on the last night's test examples, which the gates may not have had."""
    versions = month.versions()
    champion = month.champion()
    promoted = {number: version for number, version in versions.items() if PROMOTED_AT in version.tags}
    assert set(promoted) == {number for number, version in versions.items() if passed(version)}
    assert champion == max(promoted, key=lambda number: promoted[number].tags[PROMOTED_AT])
    scores = {number: accuracy(month, number) for number in versions}
    assert scores[champion] >= max(scores.values()) - LEEWAY


def accuracy(month: Month, number: str) -> float:
    """Return the accuracy of a version's files, computed with transformers only."""
    files = month.folder(number)
    model = AutoModelForSequenceClassification.from_pretrained(files).eval()
    rows = pd.read_parquet(month.root / "data/splits/test.parquet")
    inputs = AutoTokenizer.from_pretrained(files)(rows["text"].tolist(), padding=True, return_tensors="pt")
    with torch.no_grad():
        answers = model(**inputs).logits.argmax(-1)
    return float((answers == torch.tensor(rows["label"].to_numpy())).float().mean())


def a_candidate_comes_back_after_gc(month: Month) -> None:
    """Reproduce the first night's candidate; the command fails unless all bytes are the same."""
    month.command("gc", "--yes")
    revision = next(morning.revision for morning in month.mornings if morning.night.champion == "own")
    month.command("reproduce", CANDIDATE, "--rev", revision)
