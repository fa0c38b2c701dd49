"""What a new workspace's params.yaml says of a model and data: read off the files, and accepted by the check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tasks import check_params, first_params, params_file
from tasks.errors import EckartError
from tests.workspace import BASE, REPOSITORY, bert, reviews, tiny_tokenizer, write_base

RAW = Path("data/raw")


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a tiny base model and no data yet."""
    monkeypatch.chdir(tmp_path)
    RAW.mkdir(parents=True)
    write_base(Path(BASE))
    return tmp_path


def table(name: str = "rows.csv", **columns: Any) -> str:
    frame = pd.DataFrame({"text": reviews()["text"], **columns})
    (RAW / name).parent.mkdir(exist_ok=True)
    frame.to_csv(RAW / name, index=False)
    return str(RAW / name)


def told(source: str, **given: Any) -> dict[str, Any]:
    wishes = {"text": None, "text_pair": None, "label": None, "task": None} | given
    return first_params.of_data(source, BASE, **wishes)


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (["good", "bad", "so so"], "classification"),
        ([1, 2, 3, 4, 5], "classification"),
        ([True, False], "classification"),
        ([0.5, 1.25, 2.0], "regression"),
        (list(range(30)), "regression"),
    ],
)
def test_the_label_tells_the_task(workspace: Path, labels: list[Any], task: str) -> None:
    source = table(label=[labels[row % len(labels)] for row in range(60)])
    assert told(source)["data"]["task"] == task


def test_what_is_told_makes_params_without_a_mistake(workspace: Path) -> None:
    source = table(stars=[row % 3 for row in range(60)])
    (workspace / "params.yaml").write_text((REPOSITORY / "params.yaml").read_text())
    params_file.update({**told(source, label="stars"), "model": {"base": BASE}})
    typed = check_params.check()
    assert typed["data"].columns.label == "stars"
    assert typed["data"].sizes.train == 60


def test_rows_fit_into_the_length_and_the_model(workspace: Path) -> None:
    """A review has 6 words, and two special tokens around; twenty of them are more than the model's 64 positions."""
    source = table(label=[row % 2 for row in range(60)])
    assert told(source)["data"]["max_length"] == 8
    frame = pd.DataFrame({"text": [" ".join([text] * 20) for text in reviews()["text"]], "label": 60 * [0]})
    frame.to_csv(RAW / "long.csv", index=False)
    assert told("data/raw/long.csv")["data"]["max_length"] == 64


def test_a_model_with_the_head_of_the_task_is_taken_as_it_is(workspace: Path) -> None:
    bert(num_labels=3).save_pretrained(BASE)
    tiny_tokenizer().save_pretrained(BASE)
    three, two = (table(f"{count}.csv", label=[row % count for row in range(60)]) for count in (3, 2))
    assert told(three)["teacher"] == {"epochs": 0}
    assert "teacher" not in told(two)


def test_files_named_by_split_are_the_splits(workspace: Path) -> None:
    for split in ("train", "test"):
        table(f"folder/{split}.csv", label=[row % 2 for row in range(60)])
    assert told("data/raw/folder")["data"]["splits"] == {"train": "train", "test": "test"}


def test_text_alone_is_running_text(workspace: Path) -> None:
    found = told(table())
    assert found["data"]["task"] == "language_modeling"
    assert found["data"]["columns"]["label"] is None


@pytest.mark.parametrize("given", [{"text": "body"}, {"label": "stars"}, {}])
def test_columns_that_are_not_there_are_asked_for_by_those_that_are(workspace: Path, given: dict[str, str]) -> None:
    pd.DataFrame({"review": ["a", "b"], "grade": [1, 2]}).to_csv(RAW / "other.csv", index=False)
    with pytest.raises(EckartError, match="review, grade"):
        told("data/raw/other.csv", **given)


def test_texts_are_no_classes(workspace: Path) -> None:
    with pytest.raises(EckartError):
        told(table(label=[f"summary {row}" for row in range(60)]))


def test_a_folder_that_is_no_model_is_named(workspace: Path) -> None:
    Path(BASE, "config.json").write_text(json.dumps({}))
    with pytest.raises(EckartError, match=BASE):
        told(table(label=[row % 2 for row in range(60)]))
