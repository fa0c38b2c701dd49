"""Laws of every NLP task: what its scores, losses and statistics may not depend on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest
import torch
from transformers import ByT5Tokenizer, PreTrainedModel, PreTrainedTokenizerBase

from eckart.calibration.embeddings import Pooling
from eckart.calibration.statistics import collect
from eckart.model.targets import find_targets
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task, load_split, load_task
from tasks.data.loading import batches
from tasks.nlp_tasks import TASK_NAMES, kind_of, task_class
from tasks.scoring.bootstrap import metric_of_all
from tests.tasks.nlp_tasks import test_embedding as embedding
from tests.tasks.nlp_tasks import test_language_modeling as language
from tests.tasks.nlp_tasks import test_multi_label_classification as multi_label
from tests.tasks.nlp_tasks import test_question_answering as question
from tests.tasks.nlp_tasks import test_summarization as summary
from tests.tasks.nlp_tasks import test_token_classification as token
from tests.tasks.scoring import test_scores as classification
from tests.tasks.sources import write_jsonl
from tests.workspace import run_stage, tiny_params, tiny_tokenizer, write_base, write_params


@dataclass(frozen=True)
class Case:
    """A task, a model of it, and rows of differing lengths: padding has a say."""

    task: Task
    model: Callable[[], PreTrainedModel]
    rows: Callable[[], pd.DataFrame]
    tokenizer: Callable[[], PreTrainedTokenizerBase] = tiny_tokenizer


CASES = {
    "classification": Case(classification.task("accuracy"), classification.bert, classification.rows),
    "regression": Case(
        classification.task("pearson"),
        lambda: classification.bert(1, problem_type="regression"),
        lambda: classification.rows(regression=True),
    ),
    "embedding": Case(embedding.task(), embedding.model, embedding.rows),
    "multi_label_classification": Case(multi_label.TASK, multi_label.model, multi_label.rows),
    "token_classification": Case(token.TASK, token.bert, token.rows),
    "question_answering": Case(question.task(), question.bert, lambda: question.asked(30)),
    "summarization": Case(summary.task(), summary.t5, lambda: summary.rows(15), summary.tokenizer),
    "language_modeling": Case(
        language.task(), language.model, lambda: language.rows(language.TEXT), language.tokenizer
    ),
}
every_task = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def test_every_task_has_a_case() -> None:
    assert {part.task.kind for part in CASES.values()} == set(TASK_NAMES)


@every_task
def test_a_score_depends_on_neither_batches_nor_order_nor_mode_and_leaves_the_model(case: Case) -> None:
    kind, model, rows = kind_of(case.task), case.model(), case.rows()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = kind.score(model.eval(), case.tokenizer(), rows, 16, "test").score
    shuffled = rows if kind.running_text else rows.sample(frac=1, random_state=0)
    for size, frame in [(1, rows), (7, rows), (16, shuffled)]:
        score = kind.score(model.train(), case.tokenizer(), frame, size, "test").score
        assert score.examples == expected.examples
        assert score.metrics == pytest.approx(expected.metrics, rel=1e-5)
        assert score.loss == pytest.approx(expected.loss, rel=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@every_task
def test_the_loss_is_the_mean_of_the_model_s_own_over_examples_without_padding(case: Case) -> None:
    """Of a summary, over its tokens; of an embedding, whose model returns no loss, that of the task."""
    kind, model, rows = kind_of(case.task), case.model().eval(), case.rows()
    collate, losses, weights = kind.collate(case.tokenizer(), model), [], []
    for example in kind.encode(rows, case.tokenizer(), "test"):
        with torch.no_grad():
            own = model(**(batch := collate([example]))).get("loss")
            losses.append(float(kind.loss(model, batch) if own is None else own))
        weights.append(len(example["labels"]) if case.task.kind == "summarization" else 1)
    expected = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert kind.score(model, case.tokenizer(), rows, 8, "test").score.loss == pytest.approx(expected, rel=1e-5)


@every_task
def test_the_loss_of_an_example_does_not_depend_on_those_beside_it(case: Case) -> None:
    kind, model = kind_of(case.task), case.model().eval()
    collate = kind.collate(case.tokenizer(), model)
    examples = list(kind.encode(case.rows(), case.tokenizer(), "test"))[:5]
    with torch.no_grad():
        alone = sum(float(kind.loss(model, collate([example]))) for example in examples)
        assert float(kind.loss(model, collate(examples))) == pytest.approx(alone, rel=1e-5)


@every_task
def test_statistics_do_not_depend_on_the_batches(case: Case) -> None:
    kind, model = kind_of(case.task), case.model().double().eval()
    data, collate = kind.encode(case.rows(), case.tokenizer(), "test"), kind.collate(case.tokenizer(), model)
    data = data.select(range(min(30, len(data))))
    targets = find_targets(model, next(batches(data, collate, 1, "cpu"))).targets
    whole, parts = (collect(model, batches(data, collate, size, "cpu"), targets, loss=kind.loss) for size in (60, 4))
    for name, tensors in whole.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, parts[name][key], rtol=1e-8, atol=1e-11, msg=f"{name} of {key}")


@every_task
def test_the_metric_follows_from_the_rows(case: Case) -> None:
    for metric in task_class(case.task.kind).metrics:
        task = case.task.model_copy(update={"metric": metric})
        scored = kind_of(task).score(case.model(), case.tokenizer(), case.rows(), 8, "test")
        assert metric_of_all(task, scored.predictions) == pytest.approx(scored.score.metric, abs=1e-6)


@every_task
def test_an_output_that_is_not_finite_is_an_error(case: Case) -> None:
    model = case.model()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    with pytest.raises(StageError):
        kind_of(case.task).score(model, case.tokenizer(), case.rows(), 8, "test")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("classification", "regression", "multi_label_classification", "summarization")),
        *(("embedding", {"pooling": pooling}) for pooling in get_args(Pooling)),
    ],
)
def test_an_empty_text_is_answered_and_the_same_beside_others(name: str, settings: dict[str, Any]) -> None:
    """A tokenizer that adds no special token finds no token in it. Texts to score have none that is empty."""
    case = CASES[name]
    tokenizer, kind, model = case.tokenizer(), kind_of(case.task.model_copy(update=settings)), case.model().eval()
    tokenizer.backend_tokenizer.post_processor = None
    answers = [kind.answers(model, tokenizer, pd.DataFrame({"text": ["", *more]}), 8)[0] for more in ([], ["the plot"])]
    alone, beside = (pd.DataFrame([row]).explode([*row]).infer_objects() for row in answers)
    pd.testing.assert_frame_equal(alone, beside, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["token_classification", "question_answering"])
def test_a_tokenizer_without_offsets_is_refused(name: str) -> None:
    with pytest.raises(StageError, match=r"ByT5Tokenizer .*model\.base"):
        kind_of(CASES[name].task).encode(CASES[name].rows(), ByT5Tokenizer(), "train")


@pytest.mark.parametrize(
    ("data", "rows"), [(question.DATA, question.squad), (token.DATA, token.tagged)], ids=["questions", "tags"]
)
def test_a_study_goes_from_files_to_scores(workspace: Path, data: dict[str, Any], rows: Callable[[], Any]) -> None:
    write_base(workspace / "models/base/tiny")
    distillation = {"layers": 1.0, "logits": 1.0, "temperature": 2.0}
    changes = {"study": {"recipes": ["kfac"]}, "recipes": {"kfac": {"recovery": {"distillation": distillation}}}}
    write_params(
        Path(), tiny_params(data={"source": write_jsonl(rows()), **data}, check={"fewest_examples": 7}, **changes)
    )
    for stage in ("extract", "check", "teacher", "calibration", "importance"):
        run_stage(stage)
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, "kfac", "0.5")
    evaluation = json.loads(Path("reports/evaluate/kfac-0.5.json").read_text())
    for step in ("factorized", "recovered"):
        assert evaluation[step]["examples"] == len(load_split("test"))
        assert set(evaluation[step]["metrics"]) == set(task_class(load_task().kind).metrics)
    model = kind_of(load_task()).auto.from_pretrained("models/finetuned/kfac-0.5")
    assert tuple(model.config.id2label.values()) == (load_task().labels or ("LABEL_0", "LABEL_1"))


@pytest.mark.parametrize("name", ["classification", "regression", "embedding", "token_classification", "summarization"])
def test_inputs_without_room_for_text_are_refused(name: str) -> None:
    """Of one with too little room for its special tokens, the tokenizer would cut nothing."""
    case = CASES[name]
    special = case.tokenizer().num_special_tokens_to_add(pair=name != "embedding" and "text_pair" in case.rows())
    task = case.task.model_copy(update={"max_length": special})
    with pytest.raises(StageError, match=r"data\.max_length is"):
        kind_of(task).encode(case.rows(), case.tokenizer(), "train")
