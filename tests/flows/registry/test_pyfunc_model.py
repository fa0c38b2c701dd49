"""A version as it is used: by MLflow, by its server, and by transformers, in an environment without the pipeline."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModelContext, scoring_server
from transformers import (
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    BertForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model import hf_format
from eckart.model.layers import factorize_target
from eckart.model.lstm import LSTMConfig, LSTMForCausalLM
from eckart.model.targets import weight_of
from flows.promotion.flow import _same
from flows.promotion.gates import digest
from flows.registry import smoke_test as asking
from flows.registry.model_package import save, settings_of
from flows.registry.pyfunc_model import Served
from flows.registry.versions import CHAMPION, connected
from flows.tracking import mirror
from tasks.artifacts.generation import Generation
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tests import tiny
from tests.tasks.nlp_tasks import test_embedding, test_summarization, test_token_classification
from tests.tasks.nlp_tasks import test_question_answering as test_answers
from tests.tasks.scoring import test_scores
from tests.workspace import a_task, bert, reviews, tiny_config, tiny_tokenizer

TASK = a_task("classification", ("bad", "good"), "accuracy", 6)
TEXTS = ["the plot is dull", "the cast is warm and clever and fresh and moving and brilliant", "the music"]
CONTINUATION = 3


def write(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    hf_format.save(model, folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def compressed() -> PreTrainedModel:
    model = bert()
    name = "bert.encoder.layer.0.intermediate.dense"
    factorize_target(model, name, *decompose(weight_of(model.get_submodule(name)), ErrorNorm()).truncate(3))
    model.config.id2label = dict(enumerate(TASK.labels))
    return model


def probabilities(model: PreTrainedModel, *texts: list[str]) -> torch.Tensor:
    """`(rows, classes)`, computed one row at a time."""
    rows = [
        tiny_tokenizer()(*row, truncation=True, max_length=6, return_tensors="pt") for row in zip(*texts, strict=True)
    ]
    with torch.no_grad():
        return torch.cat([model(**row).logits for row in rows]).softmax(-1)


def loaded(folder: Path, task: Task = TASK, batch_size: int = 2) -> Served:
    """As MLflow loads what `save` has written."""
    served, settings = Served(), settings_of(task, batch_size, CONTINUATION)
    served.load_context(PythonModelContext({"model": str(folder)}, settings))
    return served


def ask(served: Served, rows: pd.DataFrame) -> pd.DataFrame:
    return served.predict(PythonModelContext({}, {}), rows)


class TestAnswers:
    def test_each_row_gets_its_likeliest_label_and_the_probability_of_it(self, tmp_path: Path) -> None:
        model = compressed()
        result = ask(loaded(write(tmp_path, model)), pd.DataFrame({"text": TEXTS}))
        scores, labels = probabilities(model, TEXTS).max(-1)
        assert result["label"].tolist() == [TASK.labels[label] for label in labels]
        assert result["score"].tolist() == pytest.approx(scores.tolist(), abs=1e-6)

    def test_pairs_of_texts(self, tmp_path: Path) -> None:
        model, second = compressed(), TEXTS[::-1]
        result = ask(loaded(write(tmp_path, model)), pd.DataFrame({"text": TEXTS, "text_pair": second}))
        assert result["score"].tolist() == pytest.approx(
            probabilities(model, TEXTS, second).max(-1)[0].tolist(), abs=1e-6
        )

    def test_a_regression_gives_its_numbers(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = BertForSequenceClassification(tiny_config(num_labels=1, problem_type="regression")).eval()
        task = a_task("regression", (), "pearson")
        result = ask(loaded(write(tmp_path, model), task), pd.DataFrame({"text": TEXTS[:1]}))
        with torch.no_grad():
            wanted = model(**tiny_tokenizer()(TEXTS[:1], return_tensors="pt")).logits
        assert result["value"].tolist() == pytest.approx([float(wanted)], abs=1e-6)


@dataclass(frozen=True)
class Case:
    """A kind of task, a model of it, and rows as the test split has them."""

    task: Task
    model: Callable[[], PreTrainedModel]
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    rows: Callable[[], pd.DataFrame]


def classifier() -> PreTrainedModel:
    return test_scores.bert(id2label=dict(enumerate(TASK.labels))).eval()


def tagger() -> PreTrainedModel:
    labels = dict(enumerate(test_token_classification.TAGS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForTokenClassification(tiny_config(initializer_range=0.3, num_labels=5, id2label=labels)).eval()


def lstm() -> PreTrainedModel:
    return tiny.drawn(
        LSTMForCausalLM,
        LSTMConfig(vocab_size=tiny.VOCABULARY, embedding_size=8, hidden_size=8, num_hidden_layers=2, pad_token_id=0),
    ).eval()


def tagged() -> pd.DataFrame:
    """Rows of differing lengths, with a word that has no token, and some beyond `max_length`."""
    words = [[*text.split(), *["and", "dull"] * (number % 3)] for number, text in enumerate(reviews()["text"])]
    words[1].insert(2, "\u200b")
    return pd.DataFrame({"text": words, "label": [[0] * len(row) for row in words]})


def running() -> pd.DataFrame:
    """Lines of a text: short ones, of no and of one token, and one of several blocks."""
    lengths = (5, 0, 1, 2, 19, 6, 12, 3)
    ids = torch.randint(2, tiny.VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(0)).tolist()
    words = iter(f"w{number}" for number in ids)
    return pd.DataFrame({"text": [" ".join(itertools.islice(words, length)) for length in lengths]})


LANGUAGE = a_task("language_modeling", (), "perplexity", 6)
CASES = {
    "classification": Case(TASK, classifier, tiny_tokenizer, lambda: test_scores.rows()),
    "multi_label_classification": Case(
        a_task("multi_label_classification", TASK.labels, "f1_micro", 6),
        lambda: test_scores.bert(id2label=dict(enumerate(TASK.labels)), problem_type="multi_label_classification"),
        tiny_tokenizer,
        lambda: test_scores.rows(),
    ),
    "token_classification": Case(
        a_task("token_classification", test_token_classification.TAGS, "f1", 8), tagger, tiny_tokenizer, tagged
    ),
    "embedding": Case(
        test_embedding.task(pooling="max"), test_embedding.model, tiny_tokenizer, lambda: test_scores.rows()
    ),
    "question_answering": Case(
        test_answers.task(12), test_answers.bert, tiny_tokenizer, lambda: test_answers.asked(20)
    ),
    "summarization": Case(
        test_summarization.task(prefix="summarize: ", generation=Generation(beams=3, length_penalty=2.0)),
        test_summarization.t5,
        test_summarization.tokenizer,
        lambda: test_summarization.rows(20),
    ),
    "language_modeling": Case(LANGUAGE, lambda: tiny.causal_llama().eval(), tiny.words, running),
    "language_modeling by an LSTM": Case(LANGUAGE, lstm, tiny.words, running),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_version_answers_as_its_kind_scores(case: Case, tmp_path: Path) -> None:
    model, rows = case.model(), case.rows().drop(columns="label", errors="ignore")
    wanted = kind_of(case.task).answers(model, case.tokenizer(), case.rows(), 7)
    served = loaded(write(tmp_path, model, case.tokenizer()), case.task, batch_size=3)
    result = ask(served, rows).to_dict("records")
    assert all(_same(answer, other) for answer, other in zip(result, wanted, strict=True))
    assert len({str(sorted(row.items())) for row in wanted}) > 1
    none = ask(served, rows.head(0))
    assert none.empty
    assert list(none) == list(kind_of(case.task).answer_columns)


class TestTags:
    def test_a_word_that_the_model_does_not_read_has_none(self, tmp_path: Path) -> None:
        case = CASES["token_classification"]
        words = [["the", "\u200b", "plot"], ["the"] * 9, []]
        result = ask(loaded(write(tmp_path, case.model()), case.task), pd.DataFrame({"text": words}))["tags"]
        assert [[tag is None for tag in tags] for tags in result] == [
            [False, True, False],
            [False] * 6 + [True] * 3,  # of 8 tokens two are special
            [],
        ]


class TestSpans:
    def test_the_score_is_the_probability_of_the_span(self, tmp_path: Path) -> None:
        """Of a context in one window: the product of two softmaxes, computed without padding."""
        model, task = test_answers.bert(), test_answers.task(32)
        rows = test_answers.asked(9)[["text", "text_pair"]]
        result = ask(loaded(write(tmp_path, model), task, batch_size=4), rows)
        for number, (question, context) in enumerate(rows.itertuples(index=False)):
            inputs = tiny_tokenizer()(question, context, return_offsets_mapping=True, return_tensors="pt")
            offsets = inputs.pop("offset_mapping")[0].tolist()
            with torch.no_grad():
                outputs = model(**inputs)
            start, end = (values[0].double().softmax(-1) for values in (outputs.start_logits, outputs.end_logits))
            spans = {
                (first, last): float(start[first] * end[last])
                for first in range(len(offsets))
                for last in range(first, len(offsets))
                if inputs.sequence_ids(0)[first] == inputs.sequence_ids(0)[last] == 1
            }
            first, last = max(spans, key=lambda pair: spans[pair])
            assert result["answer"][number] == context[offsets[first][0] : offsets[last][1]]
            assert result["score"][number] == pytest.approx(spans[first, last], rel=1e-4)

    def test_an_empty_context_has_no_answer_and_a_long_question_no_room(self, tmp_path: Path) -> None:
        served = loaded(write(tmp_path, test_answers.bert()), test_answers.task(12))
        result = ask(served, pd.DataFrame({"text": ["is dull"], "text_pair": [""]}))
        assert result.to_dict("records") == [{"answer": "", "score": 0.0}]
        with pytest.raises(MlflowException, match=r"data\.max_length"):
            ask(served, pd.DataFrame({"text": ["is dull " * 9], "text_pair": ["the plot"]}))


@pytest.mark.parametrize("name", ["embedding", "token_classification", "question_answering"])
@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA])
def test_a_missing_text_is_refused(name: str, missing: Any, tmp_path: Path) -> None:
    """Its answer would be that to the word None or nan."""
    case = CASES[name]
    column = "text_pair" if name == "question_answering" else "text"
    rows = case.rows()[:2].astype(object)
    rows = rows[[part for part in ("text", "text_pair") if part in rows]]
    rows.at[1, column] = ["the", missing] if name == "token_classification" else missing
    with pytest.raises(MlflowException, match=rf"row 1: {column} is .*, which is no text"):
        ask(loaded(write(tmp_path, case.model(), case.tokenizer()), case.task), rows)


@pytest.mark.parametrize("name", ["embedding", "token_classification"])
@pytest.mark.parametrize("given", [[{"the plot": "is dull"}], ["the plot", ["is", {"dull": 1}]]])
def test_a_dictionary_is_no_text(name: str, given: list[Any], tmp_path: Path) -> None:
    """Its keys would be answered."""
    case = CASES[name]
    with pytest.raises(MlflowException, match="which is no text"):
        ask(loaded(write(tmp_path, case.model(), case.tokenizer()), case.task), pd.DataFrame({"text": given}))


def test_the_rows_of_several_texts_are_not_taken_apart(tmp_path: Path) -> None:
    """There would be more answers than rows. One row of lists is how MLflow passes a dictionary of lists."""
    case = CASES["embedding"]
    served = loaded(write(tmp_path, case.model(), case.tokenizer()), case.task)
    assert len(ask(served, pd.DataFrame({"text": [["the plot", "is dull"]]}))) == 2
    with pytest.raises(MlflowException, match=r"row 0: text is .*, which is no text"):
        ask(served, pd.DataFrame({"text": [["the plot", "is dull"], ["the cast"]]}))
    assert len(ask(served, pd.DataFrame({"text": [["the plot", "is dull"]], "other": [{"a": 1}]}))) == 2


def test_pairs_of_unequal_lists_are_refused(tmp_path: Path) -> None:
    case = CASES["question_answering"]
    given = pd.DataFrame({"text": [["what", "who"]], "text_pair": [["the plot"]]})
    with pytest.raises(MlflowException, match="text_pair"):
        ask(loaded(write(tmp_path, case.model(), case.tokenizer()), case.task), given)


@pytest.mark.parametrize("name", ["language_modeling", "language_modeling by an LSTM"])
class TestLanguage:
    def test_a_text_of_whole_blocks_has_the_loss_that_is_scored(self, name: str, tmp_path: Path) -> None:
        case = CASES[name]
        text = " ".join(f"w{2 + number * 7 % 28}" for number in range(8 * case.task.max_length))
        scored = (
            kind_of(case.task).score(case.model(), case.tokenizer(), pd.DataFrame({"text": [text]}), 3, "test").score
        )
        served = loaded(write(tmp_path, case.model(), case.tokenizer()), case.task)
        result = ask(served, pd.DataFrame({"text": [text]}))
        assert result["loss"].tolist() == pytest.approx([scored.loss], rel=1e-5)

    def test_a_continuation_is_greedy_whatever_stands_beside_it(self, name: str, tmp_path: Path) -> None:
        case = CASES[name]
        model, tokenizer, texts = case.model(), case.tokenizer(), case.rows()["text"].tolist()
        result = ask(loaded(write(tmp_path, model, tokenizer), case.task, batch_size=8), case.rows())
        assert [loss is None for loss in result["loss"]] == [len(text.split()) < 2 for text in texts]
        for text, written in zip(texts, result["continuation"], strict=True):
            if not text:
                assert written is None
                continue
            ids = tokenizer(text, return_tensors="pt")["input_ids"][:, -case.task.max_length :]
            with torch.no_grad():
                for _ in range(CONTINUATION):
                    ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            assert written == tokenizer.decode(ids[0, -CONTINUATION:], skip_special_tokens=True)


def test_what_is_written_has_positions(tmp_path: Path) -> None:
    """The model has 32: of a long text the last tokens are read, so many that there is room behind them."""
    task, model = a_task("language_modeling", (), "perplexity", 32), tiny.causal_llama().eval()
    served = loaded(write(tmp_path, model, tiny.words()), task)
    words = [f"w{2 + number * 5 % 28}" for number in range(40)]
    result = ask(served, pd.DataFrame({"text": [" ".join(words), " ".join(words[-29:])]}))
    assert len(set(result["continuation"])) == 1
    settings = settings_of(task, 2, 32)
    with pytest.raises(ValueError, match=r"^promotion\.continuation .*\b32\b"):
        Served().load_context(PythonModelContext({"model": str(tmp_path)}, settings))


class TestVersion:
    @pytest.fixture(scope="class")
    def root(self, database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A workspace whose registry has a compressed model as the champion."""
        root = tmp_path_factory.mktemp("served")
        shutil.copy(database, root)
        folder = write(root / "models/finetuned/svd-0.5", compressed())
        with pytest.MonkeyPatch.context() as patch:
            for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
                patch.delenv(name, raising=False)
            save(folder, root / "saved", TASK, pairs=False, batch_size=2, continuation=CONTINUATION)
            patch.chdir(root)
            with connected("tiny") as models:
                experiment = mirror.experiment(models.client, "study")
                version = models.add(root / "saved", "svd-0.5", digest(folder), experiment, None, {})
                models.client.set_registered_model_alias("tiny", CHAMPION, version.version)
        return root

    @pytest.fixture(scope="class")
    def environment(self, root: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "PYTHONPATH"))}
        return {**kept, "MLFLOW_TRACKING_URI": f"sqlite:///{root / 'mlflow.db'}", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def test_what_is_stored(self, root: Path) -> None:
        (stored,) = (root / "mlruns").rglob("MLmodel")
        files = [path for path in stored.parent.rglob("*") if path.is_file()]
        assert not {path.suffix for path in files} & {".pkl", ".pickle", ".bin", ".pt", ".pth"}
        assert digest(stored.parent / "artifacts/model") == digest(root / "models/finetuned/svd-0.5")
        pinned = (stored.parent / "requirements.txt").read_text().split()
        assert {line.partition("==")[0] for line in pinned} >= {"torch", "transformers", "mlflow"}
        assert not any("+" in line or "eckart" in line for line in pinned)  # an index has neither

    def test_without_the_pipeline_mlflow_and_transformers_load_it(
        self, root: Path, environment: dict[str, str], tmp_path: Path
    ) -> None:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_PIPELINE, str(tmp_path), *TEXTS],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        model = AutoModelForSequenceClassification.from_pretrained(root / "models/finetuned/svd-0.5")
        inputs = tiny_tokenizer()(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(result["logits"]), model(**inputs).logits)
        scores, labels = probabilities(model, TEXTS).max(-1)
        assert [row["label"] for row in result["answers"]] == [TASK.labels[label] for label in labels]
        assert [row["score"] for row in result["answers"]] == pytest.approx(scores.tolist(), abs=1e-6)
        assert all("/code/" in file for file in result["code"])  # the version brings its own
        together = [round(row["score"], 6) for row in result["answers"]]
        alone = together[:1]
        assert result["forms"] == {"string": alone, "list": together, "series": together, "columns": together}
        assert result["accuracy"] == pytest.approx(2 / 3)


def test_lists_go_through_mlflow_s_json_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of words, and of tags of which some are null; by what `mlflow models predict` calls, in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which MLflow adds the version's code
    monkeypatch.setattr(
        asking, "_predict", lambda model, *files: scoring_server._predict(model, *map(str, files), "json")
    )
    case = CASES["token_classification"]
    files = write(tmp_path / "files", case.model())
    save(files, tmp_path / "saved", case.task, pairs=False, batch_size=3, continuation=CONTINUATION)
    pd.DataFrame({"text": case.rows()["text"][:3]}).to_parquet(tmp_path / "rows.parquet")
    rows = pd.read_parquet(tmp_path / "rows.parquet")  # which makes arrays of lists
    result = asking.ask(str(tmp_path / "saved"), rows)
    assert result == ask(loaded(files, case.task), rows).to_dict("records")
    assert None in result[1]["tags"]
    for no_word in (None, 3):
        with pytest.raises(MlflowException, match=rf"row 0: text is .*{no_word}.*, which is no text"):
            asking.ask(str(tmp_path / "saved"), pd.DataFrame({"text": [["the", no_word]]}))


@pytest.mark.parametrize(("without", "needed"), [("tokenizer.json", True), ("vocab.txt", False)])
def test_a_version_with_a_sentencepiece_tokenizer_requires_its_package(
    without: str, needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if there is no fast tokenizer, as for Marian."""
    monkeypatch.setattr(metadata, "version", lambda _: "1.0")
    files = write(tmp_path / "files", compressed())
    (files / without).unlink(missing_ok=True)
    (files / "source.spm").touch()
    save(files, tmp_path / "saved", TASK, pairs=False, batch_size=2, continuation=CONTINUATION)
    required = (tmp_path / "saved/requirements.txt").read_text().split()
    assert ("sentencepiece==1.0" in required) == needed


def test_mlflow_scores_a_regression(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shutil.copy(database, tmp_path)}")
    task = a_task("regression", (), "pearson")
    files = write(tmp_path / "files", BertForSequenceClassification(tiny_config(num_labels=1)).eval())
    save(files, tmp_path / "saved", task, pairs=False, batch_size=2, continuation=CONTINUATION)
    rows = pd.DataFrame({"text": TEXTS})
    evaluated = mlflow.models.evaluate(
        str(tmp_path / "saved"),
        rows.assign(rating=ask(loaded(files, task), rows)["value"] + 2),
        targets="rating",
        model_type="regressor",
        evaluator_config={"log_model_explainability": False},
    )
    assert evaluated.metrics["mean_absolute_error"] == pytest.approx(2, abs=1e-6)


WITHOUT_PIPELINE = """
import gc, json, sys

gc.disable()  # while it imports

ABSENT = {"flows", "prefect", "dvc", "datasets", "pandera", "ruamel", "seqeval", "rouge_score", "evaluate"}

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import mlflow, pandas, torch
folder, *texts = sys.argv[1:]
model = mlflow.pyfunc.load_model("models:/tiny@champion")
answers = model.predict(pandas.DataFrame({"text": texts}))
forms = {"string": texts[0], "list": texts, "series": pandas.Series(texts), "columns": {"text": texts}}
labels = answers["label"].tolist()
labels[0] = {"bad": "good", "good": "bad"}[labels[0]]  # one of three is another
evaluated = mlflow.models.evaluate(
    "models:/tiny@champion",
    pandas.DataFrame({"text": texts, "label": labels}),
    targets="label",
    model_type="classifier",
    model_config={"column": "label"},
)
import eckart, tasks
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder = mlflow.artifacts.download_artifacts("models:/tiny@champion", dst_path=folder) + "/artifacts/model"
inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    logits = AutoModelForSequenceClassification.from_pretrained(folder)(**inputs).logits
code = [eckart.__file__, tasks.__file__]
print(
    json.dumps(
        {
            "answers": answers.to_dict("records"),
            "forms": {name: model.predict(form)["score"].round(6).tolist() for name, form in forms.items()},
            "accuracy": evaluated.metrics["accuracy_score"],
            "logits": logits.tolist(),
            "code": code,
        }
    )
)
"""
