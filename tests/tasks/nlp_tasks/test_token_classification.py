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
    GPT2Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eckart.model.batches import IGNORED
from tasks.artifacts.task_spec import load_task
from tasks.data_checks.class_shares import classes
from tasks.nlp_tasks import kind_of
from tests.tasks.sources import SPLIT, WHOLE, extracted, refusal, write_jsonl
from tests.workspace import a_task, reviews, tiny_config, tiny_tokenizer

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TASK = a_task("token_classification", TAGS, "f1")
COLUMNS = {"text": "tokens", "text_pair": None, "label": "tags"}
DATA = {"columns": COLUMNS, "task": "token_classification", "metric": "f1", **WHOLE}


def pieces() -> PreTrainedTokenizerBase:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##s", "the", ".", "u"]
    return BertTokenizer(vocab={token: position for position, token in enumerate(tokens)})


def of_bytes(**settings: bool) -> PreTrainedTokenizerBase:
    """GPT-2's way: a word begins with the space before it; `th` and ` th` are single tokens."""
    tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "Ġth"]
    return GPT2Tokenizer(
        vocab={token: position for position, token in enumerate(tokens)},
        merges=[("t", "h"), ("Ġ", "th")],
        pad_token="<|endoftext|>",
        **settings,
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


@pytest.mark.parametrize(
    ("words", "settings", "expected"),
    [
        (["the", "playing", "plays"], {}, {"1 the": 0, "2 play": 1, "4 play": 2}),
        (["u.u.", "the"], {}, {"1 u": 0, "5 the": 1}),  # the tokenizer splits at dots
        (["the", "\u200b", "", "the"], {}, {"1 the": 0, "2 the": 3}),  # words without a token
        (["the", "playing", "plays"], {"max_length": 4}, {"1 the": 0, "2 play": 1}),
        (["the", "the"], {"max_length": 3}, {"1 the": 0}),
    ],
)
def test_the_first_sub_token_of_a_word_is_labeled(
    words: list[str], settings: dict[str, int], expected: dict[str, int]
) -> None:
    assert labels(pieces(), *words, **settings) == expected


def test_words_keep_the_space_before_them() -> None:
    """Which marks them as words for a tokenizer of bytes. The space before é, of two bytes, is a token of its own."""
    assert labels(of_bytes(), "th", "th", "éth", "a b") == {"0 th": 0, "1 Ġth": 1, "2 Ġ": 2, "6 Ġ": 3}


def test_a_space_is_the_first_token_of_a_word_as_for_transformers() -> None:
    words = ["th", "é", "th", "éth", "a"]
    tokenizer = of_bytes(add_prefix_space=True)  # transformers asks for this to tokenize words
    by_word = tokenizer(words, is_split_into_words=True).word_ids()
    assert [int(token.split()[0]) for token in labels(tokenizer, *words)] == [*map(by_word.index, range(len(words)))]


def test_rows_are_as_the_tokenizer_splits_them_by_itself() -> None:
    words = [text.split() for text in reviews()["text"]]
    data = kind_of(TASK).encode(frame(*words), tiny_tokenizer(), "train")
    alone = tiny_tokenizer()(words, is_split_into_words=True, truncation=True, max_length=16)
    assert data["input_ids"] == alone["input_ids"]
    assert data["attention_mask"] == alone["attention_mask"]
    for row in range(len(words)):
        by_word = [IGNORED if word is None else word for word in alone.word_ids(row)]
        assert data["labels"][row] == by_word


# --- metrics


def measured(tags: Sequence[str], labels: list[str], guesses: list[str]) -> dict[str, float]:
    """All metrics of one row between tokens that are not labeled, and of a row without any."""
    ids = {tag: position for position, tag in enumerate(tags)}
    wanted = [[IGNORED, *(ids[tag] for tag in labels), IGNORED], [IGNORED] * (len(labels) + 2)]
    guessed = [[1, *(ids[tag] for tag in guesses), 0], [1] * (len(labels) + 2)]
    return kind_of(a_task("token_classification", tags, "f1")).all_metrics(np.array(guessed), np.array(wanted))


def test_an_entity_is_right_only_as_a_whole() -> None:
    """Two of four entities that are meant, of three that are found: precision 2/3, recall 1/2; 6 of 8 tags."""
    labels = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "I-LOC", "O", "B-PER"]
    guesses = ["B-PER", "I-PER", "O", "B-LOC", "B-LOC", "O", "O", "O"]
    result = measured(TAGS, labels, guesses)
    assert result["accuracy"] == 6 / 8
    assert result["f1"] == pytest.approx(2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2))


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


# --- files


def tagged() -> list[dict[str, list[str]]]:
    subjects = {"plot": "B-WORK", "music": "I-WORK"}
    words = [text.split() for text in reviews()["text"]]
    return [{"tokens": row, "tags": [subjects.get(word, "O") for word in row]} for row in words]


@pytest.mark.usefixtures("workspace")
def test_every_row_keeps_its_words_and_their_tags() -> None:
    splits = extracted(write_jsonl(tagged()), **DATA)
    assert load_task().labels == ("B-WORK", "I-WORK", "O")
    assert sum(len(splits[name]) for name in SPLIT) == 60
    truth = {tuple(row["tokens"]): row["tags"] for row in tagged()}
    for rows in splits.values():
        for words, tags in zip(rows["text"], rows["label"], strict=True):
            assert [load_task().labels[tag] for tag in tags] == truth[tuple(words)]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("ignored", [0, 1])
@pytest.mark.parametrize("names", [["O", "B-WORK", "I-WORK", "B-NONE"], ["I-WORK", "O", "B-WORK"]])
def test_tags_of_the_hub_keep_their_names_and_ids(names: list[str], ignored: int) -> None:
    """Also a tag that no row has: a head that was trained for all of them fits; and as -100 the first word's tag."""
    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")), tags=datasets.List(datasets.ClassLabel(names=names))
    )
    ids = [ignored * [IGNORED] + [names.index(tag) for tag in row["tags"][ignored:]] for row in tagged()]
    content = {"tokens": [row["tokens"] for row in tagged()], "tags": ids}
    datasets.Dataset.from_dict(content, features=features).to_parquet("data/raw/rows.parquet")
    splits = extracted("data/raw/rows.parquet", **DATA)
    assert load_task().labels == tuple(names)
    truth = {tuple(row["tokens"]): tags for row, tags in zip(tagged(), ids, strict=True)}
    for words, tags in zip(splits["test"]["text"], splits["test"]["label"], strict=True):
        assert tags.tolist() == truth[tuple(words)]


def numbered() -> list[dict[str, Any]]:
    """Tags 0 and 1, and -100 for the first word of each row."""
    return [{**row, "tags": [-100, *(int(tag != "O") for tag in row["tags"][1:])]} for row in tagged()]


@pytest.mark.usefixtures("workspace")
def test_words_with_the_tag_of_ignored_tokens_have_no_label() -> None:
    splits = extracted(write_jsonl(numbered()), **DATA)
    task = load_task()
    assert task.labels == ("0", "1")
    test, kind = splits["test"], kind_of(task)
    labeled = kind.encode(test, tiny_tokenizer(), "test")["labels"]
    for tags, row in zip(test["label"], labeled, strict=True):
        assert tags[0] == IGNORED
        assert [label for label in row if label != IGNORED] == list(tags[1:])
    guess = kind.trivial(splits["train"], test, tiny_tokenizer())["guess"]
    assert {tag for row in guess for tag in row} == {0}
    assert classes(test, task).sum() == sum(len(row) - 1 for row in test["text"])


@pytest.mark.usefixtures("workspace")
def test_among_tags_that_are_words_an_ignored_one_is_a_word_too() -> None:
    extracted(write_jsonl([{**row, "tags": ["-100", *row["tags"][1:]]} for row in tagged()]), **DATA)
    assert "-100" not in load_task().labels


@pytest.mark.usefixtures("workspace")
def test_a_split_without_a_tag_is_named() -> None:
    """As the hub's test splits without labels."""
    source = Path(write_jsonl(numbered())).rename("data/raw/train.jsonl").parent
    row = {**numbered()[0], "tags": [-100] * len(numbered()[0]["tags"])}
    (source / "test.jsonl").write_text(json.dumps(row))
    own = {**DATA, "splits": {"train": "train", "validation": None, "test": "test"}}
    assert "no word of the test split" in refusal(str(source), **own)


@pytest.mark.usefixtures("workspace")
def test_empty_tags_among_numbers_are_named() -> None:
    rows = numbered()
    rows[0]["tags"][1] = None
    assert re.search(r"\bcolumn tags\b.*\b1 empty tags\b.*-100", refusal(write_jsonl(rows), **DATA))


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, r"\b1\b.*\btags\b.*\btokens\b.*data\.columns"),
        ({"tokens": [], "tags": []}, r"\btokens\b.*\b1\b"),
        ({"tokens": None}, r"\b1\b.*\btokens\b"),
        ({"tokens": ["a", "b"], "tags": ["O", None]}, r"\bcolumn tags\b.*\b1 empty tags\b"),
    ],
)
def test_a_row_that_is_no_tagged_row_is_named(change: dict[str, Any], named: str) -> None:
    assert re.search(named, refusal(write_jsonl([*tagged(), {**tagged()[0], **change}]), **DATA))


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("column", "change", "named"),
    [
        ("tokens", " ".join, r"\btokens\b.*data/raw/rows\.jsonl\b.*data\.columns\.text\b"),
        ("tags", lambda tags: ["O"] * len(tags), r"\btags\b.* 'O'"),
    ],
)
def test_a_column_that_is_none_of_a_tagged_text_is_named(column: str, change: Any, named: str) -> None:
    source = write_jsonl([{**row, column: change(row[column])} for row in tagged()])
    assert re.search(named, refusal(source, **DATA))
