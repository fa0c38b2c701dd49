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
from tasks.data_checks.champion_data import changes
from tasks.data_checks.class_shares import counts_of_both, shift
from tasks.data_checks.counts import of_splits
from tasks.data_checks.drift import drift
from tasks.data_checks.findings import FINDINGS, Finding
from tasks.data_checks.text_normalization import contents
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
    return {"train": rows(60, 0), "validation": rows(20, 1), "test": rows(30, 2), **other}  # type: ignore[dict-item]


def broken(found: Mapping[Split, pd.DataFrame], task: Task = SENTIMENT, **limits: Any) -> dict[tuple[str, str], float]:
    """Measure and split of what breaks a limit, and its value."""
    findings = of_splits(found, task, LIMITS.model_copy(update=limits))
    return {(finding.measure, finding.where): finding.value or 0.0 for finding in findings if not finding.passed}


def changed(now: pd.DataFrame, then: pd.DataFrame, task: Task = SENTIMENT, **limits: Any) -> dict[str, Finding]:
    findings = changes(now, task, (then, task), LIMITS.model_copy(update=limits))
    return {finding.measure: finding for finding in findings}


def shifted(now: pd.DataFrame, then: pd.DataFrame, task: Task = SENTIMENT) -> bool:
    return not changed(now, then, task, largest_drift=None)["label shift"].passed


def test_good_splits_break_nothing() -> None:
    assert broken(splits()) == {}


def test_a_doubled_row_is_counted_once() -> None:
    doubled = pd.concat([rows(20, 0), rows(20, 0)[:5].assign(label=0)])
    limit = {"largest_doubled": 0.19}
    assert broken(splits(train=doubled), **limit) == {("duplicates", "train"): pytest.approx(5 / 25)}
    assert broken(splits(train=doubled), largest_doubled=5 / 25) == {}
    assert broken(splits(train=doubled), largest_doubled=None) == {}


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_leak_is_found_whatever_its_label_case_and_punctuation(name: str) -> None:
    good = splits()
    leaked = good[name].copy()  # type: ignore[index]
    copied = good["train"]["text"][:6].str.upper().str.replace(" ", ", ")
    leaked.loc[leaked.index[:6], "text"] = copied.to_numpy()
    share = 6 / len(leaked)
    assert broken(splits(**{name: leaked}), largest_leaked=share - 0.01) == {("leaked examples", name): share}
    assert broken(splits(**{name: leaked}), largest_leaked=share) == {}


def test_vowel_signs_and_tone_marks_are_part_of_a_word() -> None:
    texts = ["काम", "कीमा", "कोमा", "ไม่", "ไม้", "cafe", "cafe\u0301", "❤️", "☀️"]
    assert contents(pd.DataFrame({"text": texts})).nunique() == len(texts)


def test_pairs_leak_only_as_a_whole() -> None:
    pairs = {name: rows.assign(text_pair=rows["text"] + name) for name, rows in splits().items()}
    pairs["test"]["text"] = pairs["train"]["text"].iloc[0]
    assert broken(pairs) == {}


def test_pairs_leak_in_either_order() -> None:
    pairs = {name: rows.assign(text_pair=rows["text"] + name) for name, rows in splits().items()}
    test, train = pairs["test"], pairs["train"]
    test.loc[test.index[0], ["text", "text_pair"]] = train[["text_pair", "text"]].iloc[0].to_numpy()
    assert broken(pairs, largest_leaked=0.0) == {("leaked examples", "test"): 1 / len(test)}


def test_few_rows_an_absent_class_and_labels_out_of_range_are_found() -> None:
    few = rows(7, 3).assign(label=1)
    assert broken(splits(validation=few)) == {("examples", "validation"): 7, ("rarest class", "validation"): 0}
    assert broken(splits(validation=few), fewest_examples=7, fewest_of_class=None) == {}
    numbers = splits(test=rows(9, 2).assign(label=np.float32([5.1, *range(6), -1, 0])))
    task = a_task("regression", [], "pearson")
    assert broken(numbers, task, label_range=(0.0, 5.0)) == {("labels out of range", "test"): 2}
    assert broken(numbers, task) == {}


TEXTS = sentences(10, 0)
COLUMNS: dict[TaskName, tuple[list[str], dict[str, Any]]] = {
    "classification": (["bad", "good"], {"text": TEXTS, "label": [0, 1] * 5}),
    "embedding": ([], {"text": TEXTS}),
    "multi_label_classification": (["a", "b"], {"text": TEXTS, "label": [[], [0], [1], [0, 1], [1]] * 2}),
    "regression": ([], {"text": TEXTS, "label": np.linspace(0, 5, 10, dtype="float32")}),
    "token_classification": (["O", "X"], {"text": [np.array(["a", text]) for text in TEXTS], "label": [[0, 1]] * 10}),
    "question_answering": ([], {"text": TEXTS, "text_pair": TEXTS, "label": [{"text": ["word"]}] * 10}),
    "summarization": ([], {"text": TEXTS, "label": TEXTS}),
    "language_modeling": ([], {"text": ["", *TEXTS[1:]]}),
}


@pytest.mark.parametrize("kind", TASK_NAMES)
def test_good_data_of_every_task_break_nothing(kind: TaskName) -> None:
    names, columns = COLUMNS[kind]
    task, now = a_task(kind, names, task_class(kind).metrics[0]), pd.DataFrame(columns)
    assert all(finding.passed for finding in changed(now, now, task).values())
    same: dict[Split, pd.DataFrame] = dict.fromkeys(("train", "validation", "test"), now)
    assert broken(same, task, largest_leaked=None, label_range=(0.0, 5.0)) == {}


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
    now, then = sentences(200, 0), sentences(200, 1, OTHER)
    assert drift(now, now[::-1], 200)[0] == 0.5
    assert drift(now, then, 150) == drift(now[::-1], then[::-1], 150)


@pytest.mark.parametrize("reference", [None, (rows(60, 0), a_task("regression", [], "pearson"))])
def test_nothing_is_compared_without_a_champion_of_this_task(reference: Any) -> None:
    found = changes(rows(60, 0), SENTIMENT, reference, LIMITS)
    assert [finding.value for finding in found] == [None] * 3


def test_rows_that_are_lost_are_counted_and_rows_that_came_are_not() -> None:
    few, many = rows(60, 0), rows(80, 1)
    assert changed(few, many)["lost examples"].value == 0.25
    assert not changed(few, many)["lost examples"].passed
    assert changed(many, few)["lost examples"].value == 0


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny workspace whose data are split."""
    monkeypatch.chdir(tiny_workspace(tmp_path))
    run_stage("extract")
    return tmp_path


def test_data_that_break_no_limit_leave_the_same_file_whatever_the_limits(here: Path) -> None:
    run_stage("check")
    first = stage.CHECKED.read_bytes(), FINDINGS.read_bytes()
    write_params(here, tiny_params(check={"fewest_examples": 7}))
    run_stage("check")
    assert stage.CHECKED.read_bytes() == first[0]
    assert FINDINGS.read_bytes() != first[1]


def test_data_that_break_limits_are_named_all_and_the_page_is_there(here: Path) -> None:
    write_params(here, tiny_params(check={"fewest_examples": 30, "fewest_of_class": 30}))
    with pytest.raises(SystemExit, match=r"^check: .*check\.fewest_examples.*check\.fewest_of_class") as error:
        run_stage("check")
    assert str(stage.PAGE) in str(error.value)
    assert "\n" not in str(error.value)
    assert not stage.CHECKED.exists()
    found = json.loads(FINDINGS.read_text())["findings"]
    assert sum(not finding["passed"] for finding in found) == 5
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
