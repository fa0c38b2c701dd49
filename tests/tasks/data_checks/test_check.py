"""What the check of the data finds, and what it leaves in peace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tasks import check as stage
from tasks.artifacts.task_spec import REFERENCE, SPLITS, Split, Task
from tasks.config.schema import Check
from tasks.data_checks.champion_data import Reference, changes
from tasks.data_checks.class_shares import counts_of_both, shift
from tasks.data_checks.counts import of_cells, of_splits
from tasks.data_checks.drift import drift
from tasks.data_checks.findings import FINDINGS, Finding
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class
from tests.workspace import a_task, run_stage, tiny_params, tiny_workspace, write_params

LIMITS = Check.model_validate(tiny_params()["check"])
SENTIMENT = a_task("classification", ["bad", "good"], "accuracy")
SEEDS = range(3)
PLAIN = [f"word{number}" for number in range(300)]
OTHER = [*PLAIN[:200], *(f"new{number}" for number in range(100))]


def sentences(count: int, seed: int, words: list[str] = PLAIN) -> list[str]:
    """Texts of ten words, each drawn anew."""
    drawn = np.random.default_rng(seed).choice(words, (count, 10))
    return [" ".join(row) for row in drawn]


def rows(count: int, seed: int, words: list[str] = PLAIN, good: float = 0.5) -> pd.DataFrame:
    """Reviews of chance, of which a share is good."""
    labels = np.random.default_rng([seed, 1]).random(count) < good
    return pd.DataFrame({"text": sentences(count, seed, words), "label": labels.astype("int64")})


def splits(**other: pd.DataFrame) -> dict[Split, pd.DataFrame]:
    found = {"train": rows(60, 0), "validation": rows(20, 1), "test": rows(30, 2), **other}
    return {name: found[name] for name in ("train", "validation", "test")}  # type: ignore[misc]


def broken(found: Mapping[Split, pd.DataFrame], task: Task = SENTIMENT, **limits: Any) -> dict[tuple[str, str], float]:
    """Measure and split of what breaks a limit, and its value."""
    some = of_splits(found, task, LIMITS.model_copy(update=limits))
    return {(one.measure, one.where): one.value for one in some if not one.passed and one.value is not None}


def changed(now: pd.DataFrame, then: pd.DataFrame, task: Task = SENTIMENT, **limits: Any) -> dict[str, Finding]:
    some = changes(now, task, Reference(then, task), LIMITS.model_copy(update=limits))
    return {one.measure: one for one in some}


def shifted(now: pd.DataFrame, then: pd.DataFrame, task: Task = SENTIMENT) -> bool:
    return not changed(now, then, task, largest_drift=None)["label shift"].passed


def test_good_splits_break_nothing() -> None:
    assert broken(splits()) == {}


def test_a_doubled_row_is_counted_once() -> None:
    some = rows(20, 0)
    doubled = pd.concat([some, some[:5].assign(label=0)])
    limit = {"largest_doubled": 0.19}
    assert broken(splits(train=doubled), **limit) == {("doubled rows", "train"): pytest.approx(5 / 25)}
    assert broken(splits(train=doubled), largest_doubled=5 / 25) == {}
    assert broken(splits(train=doubled), largest_doubled=None) == {}


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_leak_is_found_whatever_its_label_case_and_punctuation(name: str) -> None:
    good = splits()
    leaked = good[name].copy()  # type: ignore[index]
    copied = good["train"]["text"][:6].str.upper().str.replace(" ", ", ")
    leaked.loc[leaked.index[:6], "text"] = copied.to_numpy()
    share = 6 / len(leaked)
    assert broken(splits(**{name: leaked}), largest_leaked=share - 0.01) == {("leaked rows", name): share}
    assert broken(splits(**{name: leaked}), largest_leaked=share) == {}


def test_pairs_leak_only_as_a_whole() -> None:
    pairs = {name: rows.assign(text_pair=rows["text"] + name) for name, rows in splits().items()}
    pairs["test"]["text"] = pairs["train"]["text"].iloc[0]
    assert broken(pairs) == {}


def test_few_rows_and_an_absent_class_are_found() -> None:
    few = rows(7, 3).assign(label=1)
    assert broken(splits(validation=few)) == {("rows", "validation"): 7, ("rarest class", "validation"): 0}
    assert broken(splits(validation=few), fewest_rows=7, fewest_of_class=None) == {}


TEXTS = sentences(10, 0)
ANSWER = {"text": np.array(["word"]), "answer_start": np.array([0])}
GOOD: dict[TaskName, tuple[list[str], dict[str, Any]]] = {
    "classification": (["bad", "good"], {"text": TEXTS, "label": [0, 1] * 5}),
    "multi_label_classification": (["a", "b"], {"text": TEXTS, "label": [[], [0], [1], [0, 1], [1]] * 2}),
    "regression": ([], {"text": TEXTS, "label": np.linspace(0, 5, 10, dtype="float32")}),
    "token_classification": (["O", "X"], {"text": [np.array(["a", text]) for text in TEXTS], "label": [[0, 1]] * 10}),
    "question_answering": ([], {"text": TEXTS, "text_pair": TEXTS, "label": [ANSWER] * 10}),
    "summarization": ([], {"text": TEXTS, "label": TEXTS}),
    "language_modeling": ([], {"text": ["", *TEXTS[1:]]}),
}
BAD: dict[TaskName, tuple[str, Any]] = {
    "classification": ("label", [2] + [0, 1] * 4 + [1]),
    "multi_label_classification": ("label", [[2], [0], [1], [0, 1], [1]] * 2),
    "regression": ("label", np.float32([5.1] + [0] * 9)),
    "token_classification": ("label", [[0]] + [[0, 1]] * 9),
    "question_answering": ("text_pair", ["", *TEXTS[1:]]),
    "summarization": ("label", ["", *TEXTS[1:]]),
    "language_modeling": ("label", [0] * 10),
}


@pytest.mark.parametrize("kind", TASK_NAMES)
def test_every_kind_of_task_has_a_schema(kind: TaskName, tmp_path: Path) -> None:
    names, columns = GOOD[kind]
    task, file = a_task(kind, names, task_class(kind).metrics[0]), tmp_path / "rows.parquet"

    def found(content: Mapping[str, Any]) -> set[str]:
        pd.DataFrame(content).to_parquet(file)
        read = dict.fromkeys(("train", "validation", "test"), pd.read_parquet(file))
        some = of_cells(read, task, LIMITS.model_copy(update={"label_range": (0.0, 5.0)}))  # type: ignore[arg-type]
        return {one.passed for one in some}

    assert found(columns) == {True}
    column, values = BAD[kind]
    assert found({**columns, column: values}) == {False}
    now = pd.DataFrame(columns)
    assert all(one.passed for one in changed(now, now, task).values())
    assert broken(dict.fromkeys(("train", "validation", "test"), now), task, largest_leaked=None) == {}  # type: ignore[arg-type]


def test_the_distance_of_labels_is_that_by_hand() -> None:
    assert shift(pd.Series([30, 10]), pd.Series([10, 30]))[0] == pytest.approx(0.5)
    assert shift(pd.Series([30, 10]), pd.Series([60, 20]))[0] == 0


def test_a_class_that_is_new_counts() -> None:
    three = a_task("classification", ["bad", "fair", "good"], "accuracy")
    then = rows(40, 0)
    both = counts_of_both(then.assign(label=1), three, then.assign(label=1), SENTIMENT)
    assert both is not None
    assert shift(*both)[0] == 1


def test_shifted_labels_are_found_and_chance_is_not() -> None:
    for seed in SEEDS:
        for count in (60, 1000):
            assert not shifted(rows(count, seed), rows(count, seed + 100))
        assert shifted(rows(1000, seed), rows(1000, seed + 100, good=0.75))


def test_shifted_numbers_are_found_and_chance_is_not() -> None:
    task = a_task("regression", [], "pearson")
    for seed in SEEDS:
        now, then = (rows(1000, part).assign(label=numbers(part)) for part in (seed, seed + 100))
        assert not shifted(now, then, task)
        assert shifted(now.assign(label=now["label"] + 1), then, task)


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=1000).astype("float32")


def test_drifted_words_are_found_and_chance_is_not() -> None:
    for seed in SEEDS:
        for count in (60, 500):
            assert changed(rows(count, seed), rows(count, seed + 100))["text drift"].passed
        assert not changed(rows(500, seed, OTHER), rows(500, seed + 100))["text drift"].passed


def test_the_same_rows_are_as_alike_as_can_be_in_any_order() -> None:
    some, others = sentences(200, 0), sentences(200, 1, OTHER)
    assert drift(some, some[::-1], 200)[0] == 0.5
    assert drift(some, others, 150) == drift(some[::-1], others[::-1], 150)


def test_rows_that_are_lost_are_counted_and_rows_that_came_are_not() -> None:
    few, many = rows(60, 0), rows(80, 1)
    assert changed(few, many)["lost rows"].value == 0.25
    assert not changed(few, many)["lost rows"].passed
    assert changed(many, few)["lost rows"].value == 0


def test_a_champion_of_another_kind_of_task_is_not_compared_with() -> None:
    found = changes(rows(60, 0), SENTIMENT, Reference(rows(60, 0), a_task("regression", [], "pearson")), LIMITS)
    assert [one.value for one in found] == [None] * 3


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny workspace whose data are split."""
    monkeypatch.chdir(tiny_workspace(tmp_path))
    run_stage("extract")
    return tmp_path


def test_data_that_break_no_limit_leave_the_same_file_whatever_the_limits(here: Path) -> None:
    run_stage("check")
    first = stage.CHECKED.read_bytes(), FINDINGS.read_bytes(), stage.PAGE.read_bytes()
    run_stage("check")
    assert first == (stage.CHECKED.read_bytes(), FINDINGS.read_bytes(), stage.PAGE.read_bytes())
    write_params(here, tiny_params(check={"fewest_rows": 7}))
    run_stage("check")
    assert stage.CHECKED.read_bytes() == first[0]
    assert FINDINGS.read_bytes() != first[1]


def test_data_that_break_limits_are_named_all_and_the_page_is_there(here: Path) -> None:
    write_params(here, tiny_params(check={"fewest_rows": 30, "fewest_of_class": 30}))
    with pytest.raises(SystemExit, match=r"^check: .*check\.fewest_rows.*check\.fewest_of_class") as error:
        run_stage("check")
    assert str(stage.PAGE) in str(error.value)
    assert "\n" not in str(error.value)
    assert not stage.CHECKED.exists()
    found = json.loads(FINDINGS.read_text())["findings"]
    assert sum(not one["passed"] for one in found) == 5
    assert stage.PAGE.read_text().count(">broken<") == 5


def test_a_reference_is_compared_with(here: Path) -> None:
    for part in ("train.parquet", "task.json"):
        shutil.copy(SPLITS / part, REFERENCE)
    train = pd.read_parquet(REFERENCE / "train.parquet")
    pd.concat([train] * 2).to_parquet(REFERENCE / "train.parquet")
    with pytest.raises(SystemExit, match=r"check\.largest_lost"):
        run_stage("check")


def test_names_on_the_page_are_escaped(here: Path) -> None:
    task = json.loads((SPLITS / "task.json").read_text())
    (SPLITS / "task.json").write_text(json.dumps({**task, "labels": ["<script>", "<script>", "<b>"]}))
    with pytest.raises(SystemExit):
        run_stage("check")
    assert "&lt;b&gt;" in stage.PAGE.read_text()
    assert "<b>" not in stage.PAGE.read_text()
