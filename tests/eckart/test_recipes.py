"""The studies of this repository: each validates, and those that take a hub start and say so where there is none."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
from pydantic import TypeAdapter

from eckart.recovery import Recovery
from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import METRICS
from tasks.extract import extract
from tasks.multi_seed import study_file
from tasks.nlp_tasks import task_class
from tests.workspace import REPOSITORY, write_params

STUDIES = sorted(REPOSITORY.glob("studies/*.yaml"))
load = cache(study_file.load)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_it_validates(file: Path) -> None:
    for study in load(file):
        assert study.metric in task_class(study.params["data"]["task"]).metrics


def first_training(recipe: Mapping[str, Any]) -> tuple[float, ...]:
    """Return steps, batch size and learning rate of the first fine-tuning of a complete recipe."""
    recovery = TypeAdapter(Recovery).validate_python(recipe["recovery"])
    training, *_ = recovery.trainings.values()
    return training.steps, training.batch_size, training.learning_rate


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_the_control_is_trained_as_a_candidate_or_not_at_all(file: Path) -> None:
    """A task that replaces the `recipes` of another task must state those of the control again."""
    for study in load(file):
        recipes, settings = study.params["recipes"], study.params["study"]
        steps, *_ = control = first_training(recipes[settings["control"]])
        assert not steps or control in {first_training(recipes[name]) for name in settings["recipes"]}, study.task


def test_glue_has_all_nine_tasks_each_judged_as_the_benchmark_does() -> None:
    studies = load(REPOSITORY / "studies/bert-glue.yaml")
    assert {study.task: study.metric for study in studies} == {
        **dict.fromkeys(("sst2", "mnli", "qnli", "rte", "wnli"), "accuracy"),
        **dict.fromkeys(("mrpc", "qqp"), "f1"),
        "cola": "matthews",
        "stsb": "pearson",
    }
    alone = [study.task for study in studies if study.params["data"]["columns"]["text_pair"] is None]
    assert alone == ["cola", "sst2"]
    assert all(METRICS[study.metric].bounded for study in studies)  # so that their mean is printed


def test_every_command_beside_a_papers_table_has_its_tasks() -> None:
    text = (REPOSITORY / "docs/results/papers.md").read_text()
    commands = re.findall(r"`([\w-]+)((?: --task [\w-]+)+)`", text)
    assert len(commands) > 20
    for file in {file for file, _ in commands}:
        there = {study.task for study in load(REPOSITORY / f"studies/{file}.yaml")}
        assert {task for other, tasks in commands if other == file for task in tasks.split()[1::2]} <= there


def test_every_study_beside_a_papers_table_draws_figures() -> None:
    text = (REPOSITORY / "docs/results/papers.md").read_text()
    named = [file for file in STUDIES if re.search(rf"`{file.stem}[ `]", text)]
    assert len(named) > 10
    assert all(study.params["study"]["figures"] for file in named for study in load(file))


def test_it_starts_and_without_a_hub_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load(REPOSITORY / "studies/llama-7b.yaml")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write_params(tmp_path, study.content(0))
    with pytest.raises(StageError, match=study.params["data"]["source"]):
        extract()
