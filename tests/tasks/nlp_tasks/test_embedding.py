"""Embeddings: how they are compared with the original's, and a study from texts to a folder."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import TypeAdapter
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer, BertModel, BertTokenizer, PreTrainedModel

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.config.schema import Data
from tasks.config.validation import mistakes
from tasks.exporting.merged_checkpoint import to_plain
from tasks.models import sentence_files
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.embedding import Embedding
from tests.tasks.sources import write_jsonl
from tests.workspace import (
    a_task,
    repository_params,
    reviews,
    run_stage,
    run_study,
    tiny_config,
    tiny_params,
    tiny_tokenizer,
    write_base,
    write_params,
)

MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "3_Dense"}
ANGLES = [0.0, 0.1, 0.3, 1.0, 1.2, 3.0]
DATA = {"task": "embedding", "metric": "recall_at_10", "columns": {"text_pair": None, "label": None}}
PARTS = {"teacher": {"epochs": 0}, "importance": {"labels": "drawn"}}


def task(metric: str = "recall_at_10", **changes: Any) -> Task:
    return a_task("embedding", (), metric).model_copy(update=changes)


def model(seed: int = 0) -> PreTrainedModel:
    """Weights large enough for embeddings that differ from text to text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertModel(tiny_config(initializer_range=0.3)).eval()


def rows() -> pd.DataFrame:
    """Pairs of texts of differing lengths with scores, and what another model answers."""
    texts = [text + " and dull" * (position % 4) for position, text in enumerate(reviews()["text"])]
    frame = pd.DataFrame({"text": texts[:20], "text_pair": texts[20:40], "label": np.arange(20) % 7 / 2.0})
    return kind_of(task()).with_originals(model(1), tiny_tokenizer(), frame)


class OnACircle(Embedding):
    """Embeds the texts "0" to "5" at angles, so that neighbors can be counted by hand."""

    def __init__(self, spec: Task, angles: list[float]) -> None:
        super().__init__(spec)
        self.angles = np.array(angles)

    def _embeddings(self, model: Any, tokenizer: Any, frame: pd.DataFrame, batch: int) -> np.ndarray:
        names = [name for name in ("text", "text_pair") if name in frame]
        angles = self.angles[frame[names].astype(int).to_numpy()]
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1)

    def _distinct(self, tokenizer: Any, frame: pd.DataFrame) -> np.ndarray:
        return frame[[name for name in ("text", "text_pair") if name in frame]].to_numpy()


def scored(found: list[float], frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch, neighbors: int = 2) -> Any:
    monkeypatch.setattr("tasks.nlp_tasks.embedding._NEIGHBORS", neighbors)
    given: Any = None
    with_originals = OnACircle(task(), ANGLES).with_originals(given, given, frame)
    return OnACircle(task(), found).score(given, given, with_originals, 8, "test")


def test_recall_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two nearest of 0 are 1 and 2; of 1: 0, 2; of 2: 1, 0; of 3: 4, 2; of 4: 3, 2; of 5: 4, 3."""
    frame = pd.DataFrame({"text": [str(place) for place in range(6)]})
    same = scored(ANGLES, frame, monkeypatch)
    assert (same.score.metric, same.score.loss) == (1.0, pytest.approx(0))
    turned = scored([angle + 2 for angle in ANGLES], frame, monkeypatch)
    assert turned.score.metric == 1.0
    assert turned.score.loss == pytest.approx(1 - np.cos(2))
    moved = scored([0.0, 0.1, 2.9, 1.0, 1.2, 3.0], frame, monkeypatch)
    # now of 0: 1, 3 (one of two); of 1: 0, 3; of 2: 5, 4 (none); of 3: 4, 1; of 4: 3, 1; of 5: 2, 4
    assert moved.predictions["recall_at_10"].tolist() == [0.5, 0.5, 0.0, 0.5, 0.5, 0.5]


def test_a_text_counts_once_and_pairs_count_as_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pd.DataFrame(
        {"text": ["0", "2", "4", "0"], "text_pair": ["1", "3", "5", "5"], "label": [5.0, 1.0, 2.0, 0.0]}
    )
    found = scored([0.0, 0.1, 2.9, 1.0, 1.2, 3.0], frame, monkeypatch)
    assert found.predictions["recall_at_10"].tolist() == [0.5, 0.25, 0.5, 0.5]
    cosines = np.cos([0.1, 1.9, 1.8, 3.0])
    assert found.predictions["value"].to_numpy() == pytest.approx(cosines)
    assert found.score.metrics["spearman"] == pytest.approx(spearmanr(cosines, frame["label"]).statistic)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_texts_of_equal_tokens_count_once(batch: int) -> None:
    """Their embeddings are equal but for rounding, which must not decide who is among the ten nearest."""
    texts = reviews()["text"]
    frame = pd.DataFrame({"text": [*texts, *texts.str.replace(" ", "  ")]})
    kind, original, tokenizer = kind_of(task()), model(), tiny_tokenizer()
    labeled = kind.with_originals(original, tokenizer, frame)
    assert kind.score(original, tokenizer, labeled, batch, "test").score.metric == 1.0


def test_the_loss_is_one_minus_the_cosine_and_training_to_it_gives_the_original_back() -> None:
    kind, frame, small = kind_of(task()), rows(), model()
    collate = kind.collate(tiny_tokenizer(), small)
    batch = collate(list(kind.encode(frame, tiny_tokenizer(), "train")))
    assert len(batch["labels"]) == 40
    before = float(kind.loss(small, batch).detach())
    assert before / 40 == pytest.approx(kind.score(small, tiny_tokenizer(), frame, 7, "test").score.loss, rel=1e-4)
    assert float(kind.loss(model(1), batch).detach()) == pytest.approx(0, abs=1e-4)
    optimizer = torch.optim.Adam(small.parameters(), 1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        kind.loss(small, batch).backward()
        optimizer.step()
    assert float(kind.loss(small, batch).detach()) < before / 2


def test_pairs_served_or_not_a_text_has_its_embedding() -> None:
    kind, frame = kind_of(task(prefix="the ")), rows()
    first = kind.answers(model(), tiny_tokenizer(), frame, 7)
    assert np.linalg.norm([answer["embedding"] for answer in first], axis=1) == pytest.approx(np.ones(20))
    assert first[0] != kind_of(task()).answers(model(), tiny_tokenizer(), frame, 7)[0]  # without the prefix


@pytest.mark.parametrize(
    ("columns", "metric", "message"),
    [
        ({"text_pair": None, "label": "score"}, "recall_at_10", "text_pair is null"),
        ({"text_pair": "other", "label": None}, "spearman", "text_pair and label"),
    ],
)
def test_scores_are_for_pairs(workspace: Path, columns: dict[str, Any], metric: str, message: str) -> None:
    source = write_jsonl([{"text": str(place), "other": "b", "score": 1.0} for place in range(60)])
    data = {"source": source, "task": "embedding", "metric": metric, "columns": columns}
    write_params(Path(), tiny_params(data=data, **PARTS))
    with pytest.raises(SystemExit, match=message):
        run_stage("extract")


@pytest.mark.parametrize(("texts", "refused"), [(11, True), (12, False)])
def test_there_are_more_texts_than_neighbors(texts: int, refused: bool) -> None:
    """Of eleven, each has the other ten as its nearest, whatever the model."""
    many, few = (pd.DataFrame({"text": [str(place) for place in range(count)] * 2}) for count in (20, texts))
    data = TypeAdapter(Data).validate_python(tiny_params(data=DATA)["data"])
    with pytest.raises(StageError, match=r"data\.sizes\.test") if refused else nullcontext():
        assert Embedding.convert_labels({"validation": many, "test": few}, data) == ()


@pytest.mark.parametrize("recipe", ["svd", "drone_tolerance", "zs_svd"])
def test_recipes_that_read_the_loss_are_refused_and_those_that_read_inputs_are_not(recipe: str) -> None:
    params = tiny_params(data=DATA, study={"recipes": [recipe], "control": recipe}, **PARTS)
    params["recipes"] = {recipe: repository_params()["recipes"][recipe]}
    params["importance"]["statistics"] = [*params["importance"]["statistics"], "gradients"]
    wrong = mistakes(params)
    assert bool(wrong) == (recipe != "svd")
    assert not any("write given" in line for line in wrong)


def test_an_embedding_model_is_not_trained_before_it_is_compressed() -> None:
    assert not mistakes(tiny_params(data=DATA, **PARTS))
    wrong = mistakes(tiny_params(data=DATA))
    assert [line.partition(":")[0] for line in wrong] == ["importance.labels", "teacher.epochs"]


def base_with(folder: Path, files: dict[str, Any]) -> Path:
    write_base(folder)
    sentence_files.write(folder, {name: json.dumps(content) for name, content in files.items()})
    return folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}}, "write cls"),
        ({"1_Pooling/config.json": {"pooling_mode": ["mean", "max"]}}, "mean and max"),
        ({"modules.json": [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "1"}]}, "Dense"),
        ({"modules.json": [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "2"}]}, "1_Pooling"),
    ],
)
def test_a_base_that_embeds_otherwise_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    folder = base_with(tmp_path / "base", files)
    with pytest.raises(StageError, match=message):
        sentence_files.of_base(folder, tiny_config(), tiny_tokenizer(), task())


def test_the_tokenizer_may_say_how_many_tokens_the_base_reads(tmp_path: Path) -> None:
    """As sentence-transformers 6 writes it, and reads it in a plain folder to which we add its files."""
    folder = base_with(tmp_path / "base", {"tokenizer_config.json": {"model_max_length": 8}})
    assert sentence_files.settings_of(folder).max_length == 8
    with pytest.raises(StageError, match=r"write 8 for data\.max_length"):
        sentence_files.of_base(folder, tiny_config(), tiny_tokenizer(), task(max_length=16))
    base_with(folder, {"sentence_bert_config.json": {"max_seq_length": 16}})
    assert sentence_files.settings_of(folder).max_length == 16


def test_further_modules_are_copied_but_not_part_of_the_pooling(tmp_path: Path) -> None:
    """So an ONNX file does not call something an embedding that the folder would change further."""
    modules = [{"type": f"a.{kind}", "path": path} for kind, path in MODULES.items()]
    folder, files = tmp_path / "base", {"1_Pooling/config.json": {"pooling_mode": "cls"}, "modules.json": modules[:3]}
    assert sentence_files.pooling_of(base_with(folder, files)) == "cls"
    base_with(folder, {"modules.json": modules, "3_Dense/config.json": {"out_features": 8}})
    assert sentence_files.pooling_of(folder) is None
    (tmp_path / "copy").mkdir()
    sentence_files.copy(folder, tmp_path / "copy")
    assert (tmp_path / "copy/3_Dense/config.json").exists()


def test_the_prompt_of_a_base_is_the_prefix(tmp_path: Path) -> None:
    """Or is left out on purpose. If the base does not pool its tokens, a prefix would be another thing."""
    prompts = {"config_sentence_transformers.json": {"prompts": {"query": "the "}, "default_prompt_name": "query"}}
    folder = base_with(tmp_path / "base", prompts)
    with pytest.raises(StageError, match="'the '"):
        sentence_files.of_base(folder, tiny_config(), tiny_tokenizer(), task())
    for prefix in ("the ", ""):
        assert sentence_files.of_base(folder, tiny_config(), tiny_tokenizer(), task(prefix=prefix))
    base_with(tmp_path / "base", {"1_Pooling/config.json": {"include_prompt": False}})
    assert sentence_files.of_base(folder, tiny_config(), tiny_tokenizer(), task(prefix=""))
    with pytest.raises(StageError, match=r"data\.prefix"):
        sentence_files.of_base(folder, tiny_config(), tiny_tokenizer(), task(prefix="the "))


@pytest.mark.parametrize(
    ("own", "message"),
    [({"max_seq_length": 8}, r"write 8 for data\.max_length"), ({"do_lower_case": True}, "lower case"), ({}, None)],
)
def test_texts_are_read_as_the_base_reads_them(tmp_path: Path, own: dict[str, Any], message: str | None) -> None:
    """The candidates are calibrated and scored on what their folders will read."""
    folder = base_with(tmp_path / "base", {"sentence_bert_config.json": {"max_seq_length": 16, **own}})
    tokenizer = BertTokenizer(vocab=tiny_tokenizer().get_vocab(), do_lower_case=False)
    with pytest.raises(StageError, match=message) if message else nullcontext():
        sentence_files.of_base(folder, tiny_config(), tokenizer, task(max_length=16))
    if "do_lower_case" in own:  # an upper-case ß is SS
        lower = BertTokenizer(vocab=tiny_tokenizer().get_vocab() | {"groß": len(tiny_tokenizer())}, do_lower_case=True)
        assert sentence_files.of_base(folder, tiny_config(), lower, task(max_length=16))


def test_a_study_goes_from_texts_to_a_folder_of_sentence_transformers(workspace: Path) -> None:
    """With the pooling and the prompts of the base model; recovery brings the embeddings closer to the original's."""
    own = {
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": True},
        "config_sentence_transformers.json": {"prompts": {"query": "the "}},
    }
    model().save_pretrained(base_with(workspace / "models/base/tiny", own))
    sizes = {"train": 24, "validation": 12, "test": 12, "calibration": 16}
    data = {**DATA, "source": write_jsonl(reviews()[["text"]].to_dict("records")), "pooling": "cls", "sizes": sizes}
    data["shares"] = {"validation": 0.3, "test": 0.3}
    recipes = {"kfac": {"recovery": {"steps": 60, "learning_rate": 5e-4}}}
    write_params(Path(), tiny_params(data=data, study={"recipes": ["kfac"]}, recipes=recipes, **PARTS))
    run_study("kfac")
    run_stage("export", "kfac", "0.5")
    dense = json.loads(Path("reports/dense.json").read_text())
    assert dense["score"]["metric"] == 1.0
    assert dense["trivial"] < 1.0
    evaluation = json.loads(Path("reports/evaluate/kfac-0.5.json").read_text())
    assert evaluation["recovered"]["loss"] < evaluation["factorized"]["loss"]
    assert dense["control"]["score"]["loss"] == pytest.approx(0, abs=1e-4)  # dropout would have moved it
    exported = json.loads(Path("reports/onnx/kfac-0.5.json").read_text())
    assert exported["onnx"]["score"]["loss"] == pytest.approx(evaluation["recovered"]["loss"], abs=1e-5)
    folder, plain = Path("models/finetuned/kfac-0.5"), Path("plain")
    to_plain("kfac-0.5", plain)
    for name, content in own.items():
        assert json.loads((folder / name).read_text()) == json.loads((plain / name).read_text()) == content
    assert [module["path"] for module in json.loads((folder / "modules.json").read_text())] == [
        "",
        "1_Pooling",
        "2_Normalize",
    ]
    small, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    first = small(**tokenizer(["the plot"], return_tensors="pt")).last_hidden_state[0, 0]
    (answer,) = kind_of(task(pooling="cls")).answers(small, tokenizer, pd.DataFrame({"text": ["the plot"]}), 8)
    assert answer["embedding"] == pytest.approx((first / first.norm()).tolist(), abs=1e-5)


def test_texts_without_a_word_have_a_trivial_baseline() -> None:
    """Of single letters or emoji; TF-IDF counts words of two letters and more."""
    frame = rows().assign(text=["a", "🙂"] * 10, text_pair=["b", "c"] * 10)
    assert len(kind_of(task()).trivial(frame, frame, tiny_tokenizer())) == len(frame)
