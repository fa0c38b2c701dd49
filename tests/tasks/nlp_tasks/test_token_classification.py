"""Token classification: a tag for each word, from files to scores."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    BertForTokenClassification,
    BertTokenizer,
    ByT5Tokenizer,
    DataCollatorForTokenClassification,
    GPT2Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eckart.calibration.losses import IGNORED, token_loss
from eckart.calibration.statistics import collect
from eckart.model.targets import find_targets
from tasks.artifacts.task_spec import SPLITS, load_split, load_task
from tasks.config.schema import Model
from tasks.data.loading import batches
from tasks.extract import extract
from tasks.models.base_model import load_base
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import StageError
from tests.workspace import (
    a_task,
    reviews,
    run_stage,
    tiny_config,
    tiny_params,
    tiny_tokenizer,
    write_base,
    write_params,
)

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TASK = a_task("token_classification", TAGS, "f1")
COLUMNS = {"text": "tokens", "text_pair": None, "label": "tags"}


def pieces() -> PreTrainedTokenizerBase:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##s", "the", ".", "u"]
    return BertTokenizer(vocab={token: position for position, token in enumerate(tokens)})


def of_bytes() -> PreTrainedTokenizerBase:
    """GPT-2's way: a word begins with the space before it; `th` and ` th` are single tokens."""
    tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "Ġth"]
    return GPT2Tokenizer(
        vocab={token: position for position, token in enumerate(tokens)},
        merges=[("t", "h"), ("Ġ", "th")],
        pad_token="<|endoftext|>",
    )


def frame(*rows: Sequence[str]) -> pd.DataFrame:
    """The position of a word as its tag."""
    return pd.DataFrame({"text": [tuple(row) for row in rows], "label": [list(range(len(row))) for row in rows]})


def labels(tokenizer: PreTrainedTokenizerBase, *words: str, max_length: int = 16) -> dict[str, int]:
    """Token (with its position) → label, of the tokens that have one."""
    row = kind_of(TASK.model_copy(update={"max_length": max_length})).encode(frame(words), tokenizer, "train")[0]
    tokens = tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert len(row["labels"]) == len(tokens) <= max_length
    return {f"{n} {tokens[n]}": label for n, label in enumerate(row["labels"]) if label != IGNORED}


def test_the_first_sub_token_of_a_word_is_labelled() -> None:
    assert labels(pieces(), "the", "playing", "plays") == {"1 the": 0, "2 play": 1, "4 play": 2}


def test_a_word_of_several_words_of_the_tokenizer_is_labelled_once() -> None:
    assert labels(pieces(), "u.u.", "the") == {"1 u": 0, "5 the": 1}


def test_a_word_without_a_token_is_not_labelled() -> None:
    assert labels(pieces(), "the", "\u200b", "", "the") == {"1 the": 0, "2 the": 3}


def test_words_that_are_cut_off_are_not_labelled() -> None:
    assert labels(pieces(), "the", "playing", "plays", max_length=4) == {"1 the": 0, "2 play": 1}
    assert labels(pieces(), "the", "the", max_length=2) == {}


def test_words_keep_the_space_before_them() -> None:
    """Which marks them as words for a tokenizer of bytes; é is two bytes."""
    assert labels(of_bytes(), "th", "th", "éth", "a b") == {"0 th": 0, "1 Ġth": 1, "3 Ã": 2, "7 a": 3}


def test_rows_are_as_the_tokenizer_splits_them_by_itself() -> None:
    words = [text.split() for text in reviews()["text"]]
    data = kind_of(TASK).encode(frame(*words), tiny_tokenizer(), "train")
    alone = tiny_tokenizer()(words, is_split_into_words=True, truncation=True, max_length=16)
    assert data["input_ids"] == alone["input_ids"]
    assert data["attention_mask"] == alone["attention_mask"]
    for row in range(len(words)):
        by_word = [IGNORED if word is None else word for word in alone.word_ids(row)]
        assert data["labels"][row] == by_word


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(StageError, match=r"ByT5Tokenizer .*model\.base"):
        kind_of(TASK).encode(frame(["the"]), ByT5Tokenizer(), "train")


# --- metrics


def measured(tags: Sequence[str], labels: list[str], guesses: list[str]) -> dict[str, float]:
    """All metrics of one row between tokens that are not labelled, and of a row without any."""
    ids = {tag: position for position, tag in enumerate(tags)}
    wanted = [[IGNORED, *(ids[tag] for tag in labels), IGNORED], [IGNORED] * (len(labels) + 2)]
    found = [[1, *(ids[tag] for tag in guesses), 0], [1] * (len(labels) + 2)]
    return kind_of(a_task("token_classification", tags, "f1")).all_metrics(np.array(found), np.array(wanted))


def test_an_entity_is_right_only_as_a_whole() -> None:
    """Two of four entities that are meant, of three that are found: precision 2/3, recall 1/2; 6 of 8 tags."""
    labels = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-LOC", "O", "B-PER"]
    guesses = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "O", "O", "O"]
    result = measured(TAGS, labels, guesses)
    assert result["accuracy"] == 6 / 8
    assert result["f1"] == pytest.approx(2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))


def test_an_entity_of_another_type_is_wrong() -> None:
    assert measured(TAGS, ["B-PER", "I-PER"], ["B-LOC", "I-LOC"]) == {"accuracy": 0, "f1": 0}


def test_no_entity_at_all_is_no_error() -> None:
    assert measured(TAGS, ["O", "O"], ["O", "O"]) == {"accuracy": 1, "f1": 0}


def test_entities_do_not_go_on_in_the_next_row() -> None:
    task, tags = a_task("token_classification", TAGS, "f1"), np.array([[0, 1], [2, 0]])
    assert kind_of(task).all_metrics(tags, tags)["f1"] == 1
    joined = np.array([[0, 1], [0, 0]])
    assert kind_of(task).all_metrics(joined, tags)["f1"] == pytest.approx(
        2 / 3
    )  # one of two; as one entity it would be 0


def test_f1_of_other_tags_is_their_mean() -> None:
    """NN: 2/(2+1+0), VB: 2/(2+0+1), DT: 1."""
    result = measured(["NN", "VB", "DT"], ["NN", "VB", "VB", "DT"], ["NN", "VB", "NN", "DT"])
    assert result == {"accuracy": 3 / 4, "f1": pytest.approx((2 / 3 + 2 / 3 + 1) / 3)}


# --- scores and statistics


def bert() -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForTokenClassification(tiny_config(num_labels=len(TAGS), initializer_range=0.3)).eval()


def rows() -> pd.DataFrame:
    """Rows of differing lengths: padding has a say."""
    words = [(text + " and dull" * (number % 4)).split() for number, text in enumerate(reviews()["text"])]
    return pd.DataFrame({"text": words, "label": [[len(word) % len(TAGS) for word in row] for row in words]})


def test_a_score_is_that_of_all_rows_one_by_one() -> None:
    model, data = bert(), kind_of(TASK).encode(rows(), tiny_tokenizer(), "test")
    right, losses = [], []
    with torch.no_grad():
        for row in data:
            logits = model(torch.tensor([row["input_ids"]])).logits[0, 1:-1]  # each word is a token
            wanted = torch.tensor(row["labels"][1:-1])
            right.append(logits.argmax(-1) == wanted)
            losses.append(torch.nn.functional.cross_entropy(logits, wanted))
    result = kind_of(TASK).score(model, tiny_tokenizer(), rows(), 8, "test").score
    assert result.rows == 60
    assert result.metrics["accuracy"] == torch.cat(right).double().mean()
    assert result.loss == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert result.metric == result.metrics["f1"]


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_a_score_does_not_depend_on_the_batches(batch_size: int) -> None:
    one, other = (
        kind_of(TASK).score(bert(), tiny_tokenizer(), rows(), size, "test").score for size in (16, batch_size)
    )
    assert one.metrics == other.metrics
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


@pytest.mark.parametrize(("size", "multiple"), [(1, None), (5, None), (5, 40)])
def test_statistics_does_not_depend_on_the_batches_and_the_padding(size: int, multiple: int | None) -> None:
    model, data = bert().double(), kind_of(TASK).encode(rows(), tiny_tokenizer(), "calibration")
    targets = find_targets(model, next(batches(data.select(range(1)), _collate(), 1, "cpu"))).targets
    one = collect(model, batches(data, _collate(), 60, "cpu"), targets, loss=token_loss)
    other = collect(model, batches(data, _collate(multiple), size, "cpu"), targets, loss=token_loss)
    for kind, tensors in one.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, other[kind][key], rtol=1e-9, atol=1e-12, msg=f"{kind} of {key}")


def _collate(multiple: int | None = None) -> Any:
    return DataCollatorForTokenClassification(tiny_tokenizer(), pad_to_multiple_of=multiple)


# --- files


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace with a cache of its own and no hub."""
    (tmp_path / "workspace" / "data" / "raw").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "workspace")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "workspace"


def tagged() -> list[dict[str, list[str]]]:
    subjects = {"plot": "B-WORK", "music": "I-WORK"}
    words = [text.split() for text in reviews()["text"]]
    return [{"tokens": row, "tags": [subjects.get(word, "O") for word in row]} for row in words]


def write(rows: list[dict[str, Any]], name: str = "rows") -> str:
    file = Path(f"data/raw/{name}.jsonl")
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def params(source: str, **changes: Any) -> dict[str, Any]:
    data = {"source": source, "columns": COLUMNS, "task": "token_classification", "metric": "f1"}
    data["sizes"] = dict.fromkeys(("train", "validation", "test"), 60)
    return tiny_params(data={**data, **changes})


def run(source: str, **changes: Any) -> dict[str, pd.DataFrame]:
    write_params(Path(), params(source, **changes))
    extract()
    return {name: load_split(name) for name in ("train", "validation", "test", "calibration")}


def error(source: str, **changes: Any) -> str:
    with pytest.raises(StageError) as caught:
        run(source, **changes)
    assert not SPLITS.exists()
    return str(caught.value)


@pytest.mark.usefixtures("workspace")
def test_every_row_keeps_its_words_and_their_tags() -> None:
    splits = run(write(tagged()))
    assert load_task().labels == ("B-WORK", "I-WORK", "O")
    assert sum(len(splits[name]) for name in ("train", "validation", "test")) == 60
    truth = {tuple(row["tokens"]): row["tags"] for row in tagged()}
    for rows in splits.values():
        for words, tags in zip(rows["text"], rows["label"], strict=True):
            assert [load_task().labels[tag] for tag in tags] == truth[tuple(words)]


@pytest.mark.usefixtures("workspace")
def test_a_carved_test_has_no_row_of_train() -> None:
    splits = run(write(tagged() * 2), sizes=dict.fromkeys(("train", "validation", "test"), 120))
    sides = [{tuple(words) for words in splits[name]["text"]} for name in ("train", "validation", "test")]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 60


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("names", [["O", "B-WORK", "I-WORK", "B-NONE"], ["I-WORK", "O", "B-WORK"]])
def test_tags_of_the_hub_keep_their_names_and_ids(names: list[str]) -> None:
    """Also a tag that no row has: a head that was trained for all of them fits."""
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")), tags=datasets.List(datasets.ClassLabel(names=names))
    )
    content = {key: [row[key] for row in tagged()] for key in ("tokens", "tags")}
    datasets.Dataset.from_dict(content, features=features).to_parquet("data/raw/rows.parquet")
    splits = run("data/raw/rows.parquet")
    assert load_task().labels == tuple(names)
    truth = {tuple(row["tokens"]): [names.index(tag) for tag in row["tags"]] for row in tagged()}
    for words, tags in zip(splits["test"]["text"], splits["test"]["label"], strict=True):
        assert tags.tolist() == truth[tuple(words)]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, r"\b1\b.*\btags\b.*\btokens\b.*data\.columns"),
        ({"tokens": [], "tags": []}, r"\btokens\b.*\b1\b"),
        ({"tokens": None}, r"\b1\b.*\btokens\b"),
        ({"tokens": ["a", None], "tags": ["O", "O"]}, r"\btokens\b.*data\.columns\.text"),
        ({"tokens": ["a", "b"], "tags": ["O", None]}, r"\bcolumn tags\b"),
    ],
)
def test_a_row_that_is_no_tagged_row_is_named(change: dict[str, Any], named: str) -> None:
    assert re.search(named, error(write([*tagged(), {**tagged()[0], **change}])))


@pytest.mark.usefixtures("workspace")
def test_texts_are_no_lists_of_words() -> None:
    rows = [{"tokens": " ".join(row["tokens"]), "tags": row["tags"]} for row in tagged()]
    assert re.search(r"\btokens\b.*data/raw/rows\.jsonl\b.*data\.columns\.text\b", error(write(rows)))


@pytest.mark.usefixtures("workspace")
def test_strings_are_no_tags() -> None:
    rows = [{**row, "tags": "O"} for row in tagged()]
    assert re.search(r"\btags\b.*data\.columns\b", error(write(rows)))


@pytest.mark.usefixtures("workspace")
def test_a_single_tag_is_named() -> None:
    said = error(write([{**row, "tags": ["O"] * len(row["tags"])} for row in tagged()]))
    assert re.search(r"\btags\b.* 'O'", said)


@pytest.mark.usefixtures("workspace")
def test_a_tag_of_the_test_that_train_has_not_is_named() -> None:
    write(tagged(), "folder/train")
    write([{"tokens": ["plot"], "tags": ["B-NEW"]}], "folder/test")
    assert "['B-NEW']" in error("data/raw/folder", splits={"test": "test"})


@pytest.mark.usefixtures("workspace")
def test_a_head_for_the_same_tags_in_another_order_is_kept() -> None:
    names = TAGS[::-1]
    model = BertForTokenClassification(tiny_config(id2label=dict(enumerate(names))))
    model.save_pretrained("models/base/tagger")
    tiny_tokenizer().save_pretrained("models/base/tagger")
    loaded, tokenizer, *_ = load_base(
        Model(base="models/base/tagger", revision=None, dtype="float32", device_map=None), TASK
    )
    batch = tokenizer("the plot is dull", return_tensors="pt")
    torch.testing.assert_close(loaded.eval()(**batch).logits, model.eval()(**batch).logits.flip(-1))
    assert loaded.config.id2label == dict(enumerate(TAGS))


def test_a_study_goes_from_files_to_scores(workspace: Path) -> None:
    source = write(tagged())
    write_base(workspace / "models/base/tiny")
    changed = params(source)
    changed["study"]["recipes"] = ["kfac"]
    changed["recipes"]["kfac"]["recovery"]["distillation"] = {"layers": 1.0, "logits": 1.0, "temperature": 2.0}
    write_params(Path(), changed)
    for stage in ("extract", "check", "teacher", "control", "dense", "importance"):
        run_stage(stage)
    for stage in ("search", "factorize", "finetune", "evaluate"):
        run_stage(stage, "kfac", "0.5")
    run_stage("benchmark")
    run_stage("compare")
    evaluation = json.loads(Path("reports/evaluate/kfac-0.5.json").read_text())
    for step in ("factorized", "recovered"):
        assert evaluation[step]["rows"] == len(load_split("test"))
        assert set(evaluation[step]["metrics"]) == {"accuracy", "f1"}
        assert 0 <= evaluation[step]["metric"] == evaluation[step]["metrics"]["f1"] <= 1
    model = BertForTokenClassification.from_pretrained("models/finetuned/kfac-0.5")
    assert model.config.id2label == {0: "B-WORK", 1: "I-WORK", 2: "O"}
