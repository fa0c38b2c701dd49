"""Five of thirty unattended nights: Prefect, DVC and MLflow agree on the result of each.

This runs all thirty, makes three candidates again, and writes the table of docs/operations.md (many minutes):
`MONTH=FILE.md python -m pytest tests/flows/test_month.py`.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pandas as pd
import pytest
import torch
from mlflow.entities import Run
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flows.registry.versions import PROMOTED_AT, ROLLED_BACK
from tests.flows import month as nights
from tests.flows.engine.test_faults import mountable
from tests.flows.month import CANDIDATE, LEEWAY, Month, Morning, passed

TABLE = os.environ.get("MONTH")


@pytest.fixture
def month(request: pytest.FixtureRequest, prefect: dict[str, str], tmp_path: Path) -> Month:
    """Run the nights, and check the state after each."""
    if TABLE and not mountable():
        pytest.skip("this machine lets no user mount a file system, which one of the disks that are full is")
    found = Month(tmp_path / "workspace", prefect)
    found.begin(None if TABLE else request.getfixturevalue("study"))
    for night in nights.THIRTY if TABLE else nights.FIVE:
        evening = {"same": found.alias("champion"), "previous": found.alias("previous")}
        morning = found.live_through(night)
        if TABLE:
            Path(TABLE).write_text(table(found))
        explained(found, morning)
        assert morning.champion == (evening | {"own": found.own()})[night.champion]
    return found


def test_a_month(month: Month) -> None:
    nights_that_were_killed_were_ended_by_the_next(month)
    the_champion_is_the_best_that_passed(month)
    any_candidate_comes_back(month)


def explained(month: Month, morning: Morning) -> None:
    """Check that Prefect's state is the expected one, and that DVC and MLflow agree with it."""
    night, run = morning.night, morning.run
    assert run.state_name == night.state, run.state
    assert run.start_time
    assert run.expected_start_time
    assert run.start_time - run.expected_start_time >= night.begins
    told = {one.info.status for one in of_run(month, str(run.id))}
    running = {one.info.run_id for one in month.runs() if one.info.status == "RUNNING"}
    if night.fate == "killed":
        assert told == {"RUNNING"}
        return  # DVC's locks may be half-written, which the next run mends
    assert month.up_to_date() == morning.complete
    assert not running
    assert told <= {"FINISHED" if morning.complete else "FAILED"}
    assert told or night.champion != "own"


def of_run(month: Month, flow_run: str) -> list[Run]:
    return [one for one in month.runs() if one.data.tags.get("prefect.flow_run") == flow_run]


def nights_that_were_killed_were_ended_by_the_next(month: Month) -> None:
    killed = [morning for morning in month.mornings if morning.night.fate == "killed"]
    assert killed
    for morning in killed:
        assert {one.info.status for one in of_run(month, str(morning.run.id))} == {"KILLED"}
        assert month.flow_run(morning.run.id).state_name == "Crashed"


def the_champion_is_the_best_that_passed(month: Month) -> None:
    """Compare the versions by their gates, and on the last night's test examples, which the gates may not have had."""
    versions = month.versions()
    champion = month.alias("champion")
    assert {number for number, one in versions.items() if PROMOTED_AT in one.tags} == {
        number for number, one in versions.items() if passed(one)
    }
    standing = {number: one for number, one in versions.items() if passed(one) and ROLLED_BACK not in one.tags}
    assert champion == max(standing, key=lambda number: standing[number].tags[PROMOTED_AT])
    scores = {number: accuracy(month, number) for number in versions if ROLLED_BACK not in versions[number].tags}
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


def any_candidate_comes_back(month: Month) -> None:
    """Reproduce candidates after `gc`; the command fails unless all bytes are the same."""
    before = month.bytes()
    month.command("gc", "--yes")
    after = month.bytes()
    own = [morning.revision for morning in month.mornings if morning.night.champion == "own"]
    for revision in [own[0], own[len(own) // 2], own[-1]] if TABLE else own[:1]:
        month.command("reproduce", CANDIDATE, "--rev", revision, *(["--again"] if TABLE else []))
    if TABLE:
        month.command("gc", "--yes", "--commits", "7")
        sizes = pd.DataFrame({"without gc": before, "gc": after, "gc --commits 7": month.bytes()})
        Path(TABLE).write_text(f"{table(month)}\n\n{sizes.to_markdown()}\n")


def said(message: str) -> str:
    """Return the first cause that a message names, shortened."""
    _, *causes = message.splitlines() or [""]
    return textwrap.shorten(causes[0] if causes else message, 150, placeholder=" …")


def table(month: Month) -> str:
    rows = []
    for number, one in enumerate(month.mornings, start=1):
        assert one.run.state
        late = f", {one.night.begins.seconds // 60} minutes late" if one.night.begins else ""
        rows.append(
            {
                "night": number,
                "since the evening before": one.night.before,
                "Prefect": f"{one.run.state_name}{late}",
                "its message": said(one.run.state.message or ""),
                "stages that ran": ", ".join(one.executed) if len(one.executed) < 4 else len(one.executed),
                "champion": one.champion,
                "seconds": round(one.seconds),
                "bytes of DVC": one.cache,
            }
        )
    return str(pd.DataFrame(rows).to_markdown(index=False))
