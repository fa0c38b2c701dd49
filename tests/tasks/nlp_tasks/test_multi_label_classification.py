"""Multi-label classification: any number of labels a text, from the file to a served version."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from eckart.calibration.head_loss import objective_of
from eckart.calibration.losses import logits_error
from eckart.calibration.predictions import binary_logits
from eckart.calibration.statistics import collect
from eckart.model.targets import find_targets
from tasks.artifacts.paths import EXPORTS
from tasks.artifacts.task_spec import load_task
from tasks.data.loading import batches
from tasks.nlp_tasks import kind_of, task_class
from tests.tasks.scoring import test_scores
from tests.tasks.sources import SPLIT, WHOLE, extracted, refusal, write_jsonl
from tests.workspace import (
    TO_IMPORTANCE,
    a_task,
    reviews,
    run_stage,
    tiny_params,
    tiny_tokenizer,
    write_base,
    write_params,
)

LABELS = ("cast", "good", "music", "plot")
TASK = a_task("multi_label_classification", LABELS, "f1_micro")
DATA = {"task": TASK.kind, "metric": "f1_micro", **WHOLE}


def labels_of(text: str) -> list[str]:
    """The words of a review that are among some labels: of most reviews none, one or two."""
    return [word for word in (*LABELS, "warm") if word in text.split()]


def labeled(separated: bool = True) -> list[dict[str, Any]]:
    rows = [{"text": text, "label": labels_of(text)} for text in reviews()["text"]]
    return [{**row, "label": "|".join(row["label"])} for row in rows] if separated else rows


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("separated", [True, False])
def test_every_text_keeps_its_labels_none_included(separated: bool) -> None:
    splits = extracted(write_jsonl(labeled(separated)), **DATA)
    names = load_task().labels
    assert names == tuple(sorted(names))
    kept = {
        text: [names[label] for label in labels]
        for split in SPLIT
        for text, labels in zip(splits[split]["text"], splits[split]["label"], strict=True)
    }
    assert kept == {text: sorted(labels_of(text)) for text in reviews()["text"]}
    assert [] in kept.values()


@pytest.mark.usefixtures("workspace")
def test_a_single_label_is_refused() -> None:
    assert "plot" in refusal(write_jsonl([{**row, "label": "plot"} for row in labeled()]), **DATA)


@pytest.mark.usefixtures("workspace")
def test_no_label_is_refused() -> None:
    assert "label" in refusal(write_jsonl([{**row, "label": []} for row in labeled()]), **DATA)


@pytest.mark.usefixtures("workspace")
def test_cells_that_are_lists_of_lists_are_named() -> None:
    """Such as spans; asked without a task, they are no sets of labels."""
    spans = [{**row, "label": [None, [6, 9]]} for row in labeled()]
    assert "lists of lists" in refusal(write_jsonl(spans), **DATA)
    frame = pd.DataFrame(spans)
    assert not task_class("multi_label_classification").looks_like(frame["text"], frame["label"])


@pytest.mark.usefixtures("workspace")
def test_one_set_of_labels_is_refused_such_as_vectors_of_two_classes() -> None:
    vectors = [{**row, "label": [number % 2, 1 - number % 2]} for number, row in enumerate(labeled())]
    assert "the same labels, 0, 1" in refusal(write_jsonl(vectors), **DATA)


@pytest.mark.usefixtures("workspace")
def test_a_split_without_a_label_is_named() -> None:
    source = Path(write_jsonl(labeled(separated=False))).rename("data/raw/train.jsonl").parent
    (source / "test.jsonl").write_text(json.dumps({"text": "the plot", "label": []}))
    own = {**DATA, "splits": {"train": "train", "validation": None, "test": "test"}}
    assert "no example of the test split" in refusal(str(source), **own)


@pytest.mark.usefixtures("workspace")
def test_numbers_beside_rows_without_a_label_are_whole() -> None:
    frame = reviews().assign(label=[1, None, 2] * 20)
    frame.to_csv("data/raw/rows.csv", index=False)
    extracted("data/raw/rows.csv", **DATA)
    assert load_task().labels == ("1", "2")


def vector(number: int) -> list[int]:
    return [number % 2, number % 3 % 2, 1]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("cell", "named"),
    [
        (vector, r"\b0 and 1\b"),
        (lambda number: [float(value) for value in vector(number)], r"\b0 and 1\b"),
        (lambda number: [value == 1 for value in vector(number)], r"\b0 and 1\b"),
        (lambda number: {"plot": number % 2, "cast": 1}, r"\bmappings\b"),
        (lambda number: str(["plot", f"cast {number % 3}"]), r"\btext\b.*\['plot', 'cast"),
    ],
)
def test_what_is_no_names_of_labels_is_refused(cell: Callable[[int], Any], named: str) -> None:
    rows = [{"text": text, "label": cell(number)} for number, text in enumerate(reviews()["text"])]
    assert re.search(rf"column label .*{named}.*\bnames\b.*a\|b", refusal(write_jsonl(rows), **DATA))


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("cell", [lambda number: [0, 1][: number % 3], lambda number: f"[{number % 2}]|[2]"])
def test_labels_that_look_like_vectors_or_lists_are_names(cell: Callable[[int], Any]) -> None:
    """A set repeats no label, and vectors are of one length; a separator separates names."""
    rows = [{"text": text, "label": cell(number)} for number, text in enumerate(reviews()["text"])]
    extracted(write_jsonl(rows), **DATA)
    assert load_task().labels in (("0", "1"), ("[0]", "[1]", "[2]"))


WANTED, LOGITS = np.array([[1, 0], [1, 1], [0, 0]]), np.array([[2.0, -1.0], [0.0, -3.0], [-1.0, 0.5]])


def test_metrics_and_loss_by_hand() -> None:
    """A logit of 0 is a probability of 1/2, which is enough. Label 1: 2 right of 2 and 2; label 2: none of 1 and 1."""
    task = kind_of(a_task(TASK.kind, LABELS[:2], "f1_micro"))
    by_hand = {"f1_micro": 2 * 2 / (3 + 3), "f1_macro": (1 + 0) / 2, "exact_match": 1 / 3}
    assert task.all_metrics(LOGITS, WANTED) == pytest.approx(by_hand)
    probabilities = 1 / (1 + np.exp(-LOGITS))
    loss = -np.log(np.where(WANTED, probabilities, 1 - probabilities)).mean()
    assert task.mean_loss(LOGITS, WANTED.astype(float)) == pytest.approx(loss)


def test_the_trivial_baseline_answers_the_most_frequent_set() -> None:
    train, test = pd.DataFrame({"label": [[0, 2], [1], [0, 2]]}), pd.DataFrame({"label": [[0], []]})
    rows = kind_of(TASK).trivial(train, test, tiny_tokenizer())
    assert [list(guess) for guess in rows["guess"]] == [[1, 0, 1, 0]] * 2
    assert [list(label) for label in rows["label"]] == [[1, 0, 0, 0], [0] * 4]
    assert kind_of(TASK).only_answer(rows) == "cast, music"


def model() -> PreTrainedModel:
    return test_scores.bert(4, problem_type=TASK.kind, id2label=dict(enumerate(LABELS))).eval()


def rows() -> pd.DataFrame:
    texts = [text + " and dull" * (place % 4) for place, text in enumerate(reviews()["text"])]
    return pd.DataFrame({"text": texts, "label": [sorted({place % 4, place % 3}) for place in range(60)]})


def test_distillation_is_the_divergence_of_each_label_by_itself() -> None:
    """KL of two Bernoulli distributions, a mean over texts and labels; a softmax over labels would be another."""
    student, teacher = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    guessed, taught = (binary_logits(SequenceClassifierOutput(logits=logits), {}) for logits in (student, teacher))
    p, q = (teacher / 2).sigmoid(), (student / 2).sigmoid()
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    torch.testing.assert_close(logits_error(guessed, taught, 2.0), 4 * divergence.mean())


def test_drawn_statistics_are_expected_over_the_labels_of_the_model() -> None:
    """The mean over many seeds is Σ_l E(∂ℓ_l/∂z_l)² ÷ labels² = σ(z) (1 − σ(z)) ÷ labels², for the bias of the head."""
    net, data = model().double(), kind_of(TASK).encode(rows().head(6), tiny_tokenizer(), "test")
    example = next(batches(data, kind_of(TASK).collate(tiny_tokenizer(), net), 1, "cpu"))
    with torch.no_grad():
        p = net(**example).logits[0].sigmoid()
    gradients = []
    for seed in range(200):
        loss = kind_of(TASK.model_copy(update={"seed": seed})).objective("drawn").calibration_loss
        gradients.append(torch.autograd.grad(loss(net, example), net.classifier.bias)[0])
    torch.testing.assert_close(torch.stack(gradients).square().mean(0), p * (1 - p) / 16, rtol=0.3, atol=0)


def test_eckart_s_api_sees_each_label_by_itself() -> None:
    data = kind_of(TASK).encode(rows(), tiny_tokenizer(), "test")
    examples = list(batches(data, kind_of(TASK).collate(tiny_tokenizer(), model()), 8, "cpu"))
    assert objective_of(model(), examples, "kfac").predictions is binary_logits
    targets = find_targets(model(), examples[0]).targets
    assert collect(model(), examples, targets, loss=objective_of(model(), examples, "kfac").loss)


def test_a_study_goes_from_files_to_an_exported_candidate(workspace: Path) -> None:
    write_base(workspace / "models/base/tiny")
    changes = {
        "study": {"recipes": ["kfac"]},
        "export": {"recipes": ["kfac"]},
        "importance": {"labels": "drawn"},
        "recipes": {"kfac": {"recovery": {"distillation": {"layers": 1.0, "logits": 1.0, "temperature": 2.0}}}},
    }
    write_params(Path(), tiny_params(data={"source": write_jsonl(labeled()), **DATA}, **changes))
    for stage in TO_IMPORTANCE:
        run_stage(stage)
    for stage in ("search", "factorize", "finetune", "evaluate", "export"):
        run_stage(stage, "kfac", "0.5")
    evaluation = json.loads(Path("reports/evaluate/kfac-0.5.json").read_text())
    assert set(evaluation["recovered"]["metrics"]) == {"f1_micro", "f1_macro", "exact_match"}
    exported = json.loads((EXPORTS / "kfac-0.5.json").read_text())
    assert exported["onnx"]["score"]["metrics"] == pytest.approx(evaluation["recovered"]["metrics"], abs=1e-6)
    assert set(exported) == {"onnx", "int8"}
    kept = AutoModelForSequenceClassification.from_pretrained("models/finetuned/kfac-0.5")
    assert kept.config.problem_type == "multi_label_classification"


@pytest.mark.usefixtures("workspace")
def test_numbers_of_one_file_are_the_words_of_another() -> None:
    Path("data/raw/folder").mkdir()
    reviews().assign(label=["1", "2", "1|2"] * 20).to_csv("data/raw/folder/train.csv", index=False)
    reviews().assign(label=[1, None, 2] * 20, text=[f"other {n}" for n in range(60)]).to_csv(
        "data/raw/folder/test.csv", index=False
    )
    splits = extracted("data/raw/folder", **DATA, splits={"test": "test"})
    assert load_task().labels == ("1", "2")
    assert any(splits["test"]["label"].map(lambda label: not any(label)))
