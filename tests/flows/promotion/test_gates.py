"""The gates: what is held against what limit, with which numbers, and which champions cannot be compared with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from dvc.repo import Repo
from transformers import BertForTokenClassification, PreTrainedModel, PreTrainedTokenizerBase

from flows.promotion.gates import (
    TEST,
    Champion,
    Recorded,
    Refused,
    Terms,
    as_recorded,
    digest,
    gain,
    measure,
    questions,
)
from tasks.artifacts.task_spec import SPLITS
from tasks.config.schema import Promotion
from tasks.nlp_tasks import kind_of
from tasks.report.choose_candidate import Measured
from tasks.scoring.splits import write_predictions
from tests import tiny
from tests.tasks.report.test_choose_candidate import refused, said
from tests.workspace import a_task, bert, reviews, tiny_config, tiny_tokenizer

LABELS = ("negative", "positive")
WANTED = Promotion(
    model="m",
    largest_drop=0.01,
    standard_errors=0.0,
    keep=0.5,
    least_speedup=1.2,
    least_gain=0.0,
    continuation=4,
)
TERMS = Terms("s", "accuracy", threads=1, batch_size=8, wanted=WANTED)
CANDIDATE = Recorded(
    name="kfac-0.5",
    content="",
    task=a_task("classification", ("negative", "positive"), "accuracy"),
    pairs=False,
    test="",
    metric=0.84,
    dense=0.842,
    validation=Measured(0.85, dense=0.85, standard_error=0.0, parameters=5, keep=0.5, speedup=1.5),
    outcomes=(),
    inputs={},
)


def wanting(**changes: Any) -> Terms:
    return dataclasses.replace(TERMS, wanted=WANTED.model_copy(update=changes))


def of_perplexity(**changes: Any) -> Terms:
    return dataclasses.replace(wanting(**changes), metric="perplexity")


class TestPerplexity:
    """Lower is better, and there is no largest value."""

    def test_a_gain_is_how_much_lower_it_is_than_the_champion_s(self) -> None:
        champion = Champion(Path(), "version 3")
        terms = of_perplexity(least_gain=1.5)
        assert gain(18.5, 20.0, 0.3, champion, terms).passed
        refusal = gain(19.0, 20.0, 0.3, champion, terms).refusal
        assert said(refusal) == ["19", "20", "3", "1", "1.5", "0", "0.5"]
        assert gain(21.0, 20.0, 0.3, champion, terms).value == -1

    def test_a_gain_may_lack_what_chance_takes(self) -> None:
        champion = Champion(Path(), "version 3")
        terms = of_perplexity(least_gain=1.5, standard_errors=2.0, largest_drop=1.0)
        assert gain(19.0, 20.0, 0.26, champion, terms).passed
        assert not gain(19.0, 20.0, 0.24, champion, terms).passed

    @pytest.mark.parametrize(("recorded", "passes"), [(20.019, True), (20.03, False), (19.97, False)])
    def test_the_record_is_met_up_to_a_share_of_it_whatever_the_rows(self, recorded: float, passes: bool) -> None:
        assert [as_recorded(20.0, recorded, rows, of_perplexity()).passed for rows in (10, 10**6)] == [passes] * 2
        assert as_recorded(20_000.0, 1000 * recorded, 10, of_perplexity()).passed is passes


def test_a_bounded_metric_meets_the_record_up_to_what_two_rows_move() -> None:
    assert as_recorded(0.72, 0.70, 100, TERMS).passed
    assert not as_recorded(0.721, 0.70, 100, TERMS).passed


@pytest.mark.parametrize(("differing", "passes"), [(0, True), (2, True), (3, False)])
def test_of_classes_two_answers_may_differ_however_far_they_move_the_metric(differing: int, passes: bool) -> None:
    """One answer in a rare class moves an F1 by many times 1 / examples."""
    assert as_recorded(0.72, 0.70, 100_000, TERMS, differing).passed is passes
    assert as_recorded(0.72, 0.72, 100_000, TERMS, differing).passed


def test_digests_are_those_of_dvc(tmp_path: Path) -> None:
    files = {"b.txt": "b", "a/é.txt": "é", "a.txt": "", "a/b/c d.txt": "c"}
    for name, text in files.items():
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_text(text)
    (tmp_path / "file").write_text("content")
    with chdir(tmp_path):
        Repo.init(no_scm=True).add(["folder", "file"])
    for name in ("folder", "file"):
        assert f"md5: {digest(tmp_path / name)}\n" in (tmp_path / f"{name}.dvc").read_text()


class TestMeasure:
    """A tiny classifier on twenty reviews, in a folder with nothing of a study but the test split.

    There is no task.json: a run may have written another one since the candidate was chosen.
    """

    @pytest.fixture(autouse=True)
    def split(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        rows = reviews().iloc[::3]
        SPLITS.mkdir(parents=True)
        labels = [LABELS.index(label) for label in rows["label"]]
        pd.DataFrame({"text": rows["text"], "label": labels}).to_parquet(TEST)
        taught(pd.DataFrame({"label": labels, "guess": labels}))
        model, tokenizer = bert(), tiny_tokenizer()
        scored = kind_of(CANDIDATE.task).score(model, tokenizer, rows.assign(label=labels), TERMS.batch_size, "test")
        recorded(scored.predictions["guess"])

    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        return written(tmp_path / "challenger", bert())

    @pytest.fixture
    def candidate(self, files: Path) -> Recorded:
        """One of which the study has recorded what is true; half of the rows are positive, and it says one class."""
        return dataclasses.replace(CANDIDATE, content=digest(files), test=digest(TEST), metric=0.5, dense=0.5)

    def test_what_is_served_is_measured_anew(self, files: Path, candidate: Recorded) -> None:
        gates, answers = measure(files, candidate, None, TERMS)
        assert all(gate.passed for gate in gates)
        assert {gate.name: gate.value for gate in gates} == {
            "files other than measured": 0,
            "difference from the record": 0,
            "drop from the original": 0,
            "keep": 0.5,
            "speedup": 1.5,
        }
        assert len(answers) == 8
        assert {answer["label"] for answer in answers} <= set(LABELS)

    def test_a_metric_that_is_not_the_recorded_one_is_refused(self, files: Path, candidate: Recorded) -> None:
        recorded(pd.Series([0, 1] * 10))
        gates, _ = measure(files, dataclasses.replace(candidate, metric=0.7, dense=0.7), None, TERMS)
        assert refused(gates) == [
            ("difference from the record", "0.5", "0.7", "0.1", "0.1"),
            ("drop from the original", "0.5", "0.2", "0.7", "0.01", "0", "0.19"),
        ]
        # The original model has twenty examples right, the candidate half of them: a standard deviation of 1 ÷ 2 each.
        assert gates[2].standard_error == pytest.approx(0.5 / 20**0.5, rel=0.1)

    def test_other_files_than_those_that_were_measured_are_refused(self, files: Path, candidate: Recorded) -> None:
        (files / "config.json").write_text((files / "config.json").read_text() + "\n")
        with pytest.raises(Refused) as caught:
            measure(files, candidate, None, TERMS)
        assert [(gate.name, gate.passed) for gate in caught.value.gates] == [("files other than measured", False)]

    def test_other_test_examples_than_those_of_the_study_are_refused(self, files: Path, candidate: Recorded) -> None:
        with pytest.raises(Refused, match=r"test\.parquet\b"):
            measure(files, dataclasses.replace(candidate, test="0" * 32), None, TERMS)

    @pytest.mark.parametrize(("least", "passes"), [(0.0, True), (0.01, False)])
    def test_the_champion_is_measured_on_the_same_rows(
        self, files: Path, candidate: Recorded, tmp_path: Path, least: float, passes: bool
    ) -> None:
        champion = Champion(written(tmp_path / "champion", bert()), "version 3")
        gates, _ = measure(files, candidate, champion, wanting(least_gain=least))
        assert (gates[-1].name, gates[-1].value, gates[-1].passed) == ("gain over the champion", 0, passes)
        assert said(gates[-1].words) == ["0.5", "0.5", "3", "0", f"{least:g}", "0"]
        assert gates[-1].standard_error == 0  # it is the same model

    @pytest.mark.parametrize(
        ("model", "labels", "named"),
        [
            (bert, ("bad", "good"), r"\bbad, good\b.*\bnegative, positive\b.*promotion\.model\b"),
            (
                lambda: type(bert())(tiny_config(num_labels=1, problem_type="regression")),
                ("LABEL_0",),
                r"\bnumber\b.*\bnegative, positive\b",
            ),
            # whose labels and weights have the same names and shapes
            (
                lambda: BertForTokenClassification(bert().config),
                LABELS,
                r"BertForTokenClassification\b.*\bBertForSequenceClassification\b",
            ),
            (
                lambda: type(bert())(tiny_config(max_position_embeddings=8)),
                LABELS,
                r"data\.max_length.*\b8\b",
            ),
            (None, (), "`promote`"),  # it has no such files: it was registered otherwise
        ],
    )
    def test_a_champion_that_cannot_be_compared_with_is_named(
        self,
        model: Callable[[], PreTrainedModel] | None,
        labels: tuple[str, ...],
        named: str,
        files: Path,
        candidate: Recorded,
        tmp_path: Path,
    ) -> None:
        folder = tmp_path / "champion"
        if model:
            written(folder, model(), labels)
        with pytest.raises(Refused, match=rf"version 3\b.*{named}"):
            measure(files, candidate, Champion(folder, "version 3"), TERMS)


class TestLanguage:
    """A tiny language model, which is asked about lines of which some have no token."""

    TASK = a_task("language_modeling", (), "perplexity", 8)
    LINES = ("w2 w3 w4 w5 w6 w7 w8 w9", "", "w9", " ".join(["w7 w5 w3"] * 1000))

    @pytest.fixture(autouse=True)
    def split(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        SPLITS.mkdir(parents=True)
        pd.DataFrame({"text": self.LINES}).to_parquet(TEST)
        scored = kind_of(self.TASK).score(
            tiny.causal_llama(), tiny.words(), pd.DataFrame({"text": self.LINES}), 8, "test"
        )
        taught(scored.predictions)

    @pytest.fixture
    def files(self, tmp_path: Path) -> Path:
        return spoken(tmp_path / "challenger", tiny.words())

    @pytest.fixture
    def candidate(self, files: Path) -> Recorded:
        frame = pd.DataFrame({"text": self.LINES})
        metric = kind_of(self.TASK).score(tiny.causal_llama(), tiny.words(), frame, 8, "test").score.metric
        return dataclasses.replace(
            CANDIDATE, task=self.TASK, content=digest(files), test=digest(TEST), metric=metric, dense=metric
        )

    def test_it_is_measured_and_answers_with_losses(self, files: Path, candidate: Recorded, tmp_path: Path) -> None:
        champion = Champion(spoken(tmp_path / "champion", tiny.words()), "version 3")
        gates, answers = measure(files, candidate, champion, of_perplexity())
        assert all(gate.passed for gate in gates)
        assert [answer["loss"] is None for answer in answers] == [False, True, True, False]
        assert questions(self.TASK)["text"].str.len().max() == 2000  # of a text that may be a whole book

    def test_a_champion_with_another_vocabulary_cannot_be_compared_with(
        self, files: Path, candidate: Recorded, tmp_path: Path
    ) -> None:
        """Its perplexity is that of other tokens."""
        tokenizer = tiny.words()
        tokenizer.add_tokens("w30")
        champion = Champion(spoken(tmp_path / "champion", tokenizer), "version 3")
        with pytest.raises(Refused, match=r"version 3\b.*promotion\.model\b"):
            measure(files, candidate, champion, of_perplexity())


def taught(rows: pd.DataFrame) -> None:
    """Write the per-example results of the original model, as the stage `dense` does."""
    write_predictions("dense", {"dense": {"test": rows}})


def recorded(guesses: pd.Series) -> None:
    """Write the answers of the candidate, as the stage `evaluate` does."""
    write_predictions(CANDIDATE.name, {"recovered": {"test": pd.DataFrame({"label": guesses, "guess": guesses})}})


def spoken(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    tiny.causal_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def written(folder: Path, model: PreTrainedModel, labels: tuple[str, ...] = LABELS) -> Path:
    model.config.id2label = dict(enumerate(labels))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"]
    return folder
