"""Extractive question answering: windows, spans, the metrics of SQuAD 1.1, from files to scores."""

from __future__ import annotations

import re
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertForQuestionAnswering,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.predictions import span_logits
from eckart.recovery.distillation import logits_error
from eckart.text.qa_windows import LONGEST, best_answers, best_span
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task, load_task
from tasks.data.loading import batches
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.question_answering import question_scores
from tests.tasks.sources import SPLIT, WHOLE, extracted, refusal, write_jsonl
from tests.workspace import a_task, reviews, tiny_config, tiny_tokenizer

COLUMNS = {"text": "question", "text_pair": "context", "label": "answers"}
DATA = {"columns": COLUMNS, "task": "question_answering", "metric": "exact_match", "stride": 3, **WHOLE}
CONTEXT = "the plot is dull and the music is"  # a word a token


def task(max_length: int = 10, stride: int | None = 2) -> Task:
    """Of `[CLS] 2 of the question [SEP] 5 of the context [SEP]`."""
    return a_task("question_answering", (), "f1", max_length).model_copy(update={"stride": stride})


def frame(answer: str, context: str = CONTEXT, question: str = "is dull") -> pd.DataFrame:
    label = {"text": [answer], "answer_start": [context.index(answer)]}
    return pd.DataFrame({"text": [question], "text_pair": [context], "label": [label]})


def places(answer: str, **changes: Any) -> list[tuple[int, int]]:
    data = kind_of(task(**changes)).encode(frame(answer), tiny_tokenizer(), "train")
    return list(zip(data["start_positions"], data["end_positions"], strict=True))


# --- windows


def test_windows_overlap_by_the_stride_and_their_offsets_are_those_of_the_context() -> None:
    windows = kind_of(task()).windows(frame("plot"), tiny_tokenizer())
    assert [tiny_tokenizer().decode(window.inputs["input_ids"]) for window in windows] == [
        "[CLS] is dull [SEP] the plot is dull and [SEP]",
        "[CLS] is dull [SEP] dull and the music is [SEP]",
    ]
    for window in windows:
        tokens = tiny_tokenizer().convert_ids_to_tokens(window.inputs["input_ids"])
        assert (window.offsets[[0, 1, 2, 3, -1]] == -1).all()
        assert [CONTEXT[begin:end] for begin, end in window.offsets[4:-1]] == tokens[4:-1]


@pytest.mark.parametrize(
    ("answer", "settings", "expected"),
    [
        ("plot", {}, [(5, 5), (0, 0)]),
        ("plot is", {}, [(5, 6), (0, 0)]),
        ("music", {}, [(0, 0), (7, 7)]),
        ("dull and", {}, [(7, 8), (4, 5)]),  # in the overlap
        ("and the", {}, [(0, 0), (5, 6)]),  # the first window has a part of it
        ("is dull and the", {}, [(0, 0), (0, 0)]),  # no window has all of it
        ("lo", {}, [(5, 5), (0, 0)]),  # a part of a token
        ("and the", {"stride": None}, [(0, 0), (0, 0)]),
        ("the music", {"stride": None}, [(0, 0), (4, 5)]),
        ("and the", {"max_length": 16}, [(8, 9)]),  # a single window
        (" plot is ", {"max_length": 16}, [(5, 6)]),  # white space is no token
    ],
)
def test_an_answer_is_in_the_windows_that_have_all_of_it(
    answer: str, settings: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    assert places(answer, **settings) == expected


def test_a_position_in_a_window_is_that_of_the_answer() -> None:
    data = asked(203)
    windows = kind_of(task()).windows(data, tiny_tokenizer())
    rows = [window.row for window in windows]
    assert (sorted(rows), set(rows)) == (rows, set(range(203)))
    encoded = kind_of(task()).encode(data, tiny_tokenizer(), "train")
    for window, first, last in zip(windows, encoded["start_positions"], encoded["end_positions"], strict=True):
        if first:
            begin, end = window.offsets[first, 0], window.offsets[last, 1]
            assert data["text_pair"][window.row][begin:end] == data["label"][window.row]["text"][0]


def test_training_takes_the_first_answer() -> None:
    rows = frame("plot")
    rows["label"] = [{"text": ["music", "plot"], "answer_start": [CONTEXT.index("music"), CONTEXT.index("plot")]}]
    assert kind_of(task(16)).encode(rows, tiny_tokenizer(), "train")["start_positions"] == [10]


def test_without_a_cls_token_the_first_token_means_nowhere() -> None:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", *set(CONTEXT.split())])}, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?")
    data = kind_of(task(7)).encode(frame("music"), plain, "train")
    assert list(zip(data["start_positions"], data["end_positions"], strict=True)) == [(0, 0), (5, 5)]


@pytest.mark.parametrize(("max_length", "stride"), [(5, None), (10, 5)])
def test_a_question_that_leaves_no_room_is_named(max_length: int, stride: int | None) -> None:
    with pytest.raises(StageError, match=rf"\b2\b.*max_length={max_length}\b.*data\.max_length"):
        places("plot", max_length=max_length, stride=stride)
    assert places("plot", max_length=max_length + 10, stride=stride)


# --- spans


def spans(tokens: int, question: int = 1) -> np.ndarray:
    """A context of `tokens` of one character each behind a question, and a special token behind it."""
    inside = np.array([[position, position + 1] for position in range(tokens)])
    outside = np.full((question, 2), -1)
    return np.concatenate([outside, inside, outside[:1]])


def test_no_answer_is_longer_than_the_longest() -> None:
    start, end = np.zeros(42), np.zeros(42)
    start[1], end[LONGEST], end[LONGEST + 1] = 5, 1, 9
    assert best_span(start, end, spans(40)) == (9, (1, LONGEST + 1))  # of 30 tokens, and not the one of 31 from 0 on
    end[LONGEST + 1] = 0
    assert best_span(start, end, spans(40)) == (6, (0, LONGEST))


@given(st.integers(1, 40), st.integers(0, 10**6))
def test_the_best_span_is_the_best_of_all(tokens: int, seed: int) -> None:
    start, end = np.random.default_rng(seed).normal(size=(2, tokens + 2))
    pairs = [(first, last) for first in range(tokens) for last in range(first, min(first + LONGEST, tokens))]
    best = max(pairs, key=lambda pair: start[pair[0] + 1] + end[pair[1] + 1])
    assert best_span(start, end, spans(tokens))[1] == (best[0], best[1] + 1)


@pytest.mark.parametrize(("first", "second", "answer"), [(3.0, 2.0, "plot"), (2.0, 3.0, "music")])
def test_the_better_window_answers(first: float, second: float, answer: str) -> None:
    logits = np.zeros((2, 12))  # of a batch with longer windows
    logits[0, 5], logits[1, 7] = first, second
    windows = kind_of(task()).windows(frame("plot"), tiny_tokenizer())
    assert [best.text for best in best_answers(windows, logits, logits, [CONTEXT])] == [answer]


# --- metrics


@pytest.mark.parametrize(
    ("guess", "golds", "exact", "f1"),
    [
        ("The cat.", ["cat"], 1, 1),
        ("an  apple,\n a day", ["Apple day"], 1, 1),
        ("U.S.A.", ["usa"], 1, 1),
        ("thermal theatre", ["mal tre"], 0, 0),  # which begin with an article's letters
        ("a-b", ["ab"], 1, 1),  # the script removes punctuation before articles
        ("the cat sat", ["a cat sat down"], 0, 0.8),  # 2 words of 2 and of 3
        ("dog", ["cat"], 0, 0),
        ("cat cat", ["cat"], 0, 2 / 3),  # a word counts as often as both have it
        ("cat", ["dog", "cat", "mouse"], 1, 1),
        ("cat sat", ["cat sat down here", "sat"], 0, 2 / 3),  # the best of both
        ("", ["cat"], 0, 0),
        ("the", ["a"], 1, 0),  # as in the script: equal, but without a word in common
    ],
)
def test_metrics_by_hand(guess: str, golds: list[str], exact: float, f1: float) -> None:
    scores = question_scores([guess], [golds]).iloc[0]
    assert (scores["exact_match"], scores["f1"]) == (exact, pytest.approx(f1))


# --- batches


def asked(count: int) -> pd.DataFrame:
    """Questions about contexts of differing lengths, of one or two windows each."""
    texts = [text + " and dull" * (number % 4) for number, text in enumerate(reviews()["text"])]
    rows = []
    for number in range(count):
        context = texts[number % len(texts)]
        answer = context.split()[1 + number % 5]  # but an article
        label = {"text": [answer], "answer_start": [context.index(answer)]}
        rows.append({"text": ["is", "is dull", "the plot is"][number % 3], "text_pair": context, "label": label})
    return pd.DataFrame(rows)


def bert() -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForQuestionAnswering(tiny_config(initializer_range=0.3)).eval()


def collate(tokenizer: PreTrainedTokenizerBase | None = None) -> Any:
    return kind_of(task()).collate(tokenizer or tiny_tokenizer(), bert())


def test_batches_are_padded_on_the_right() -> None:
    """Where positions count from, whatever the tokenizer of a decoder prefers."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "left"
    batch = collate(tokenizer)(list(kind_of(task()).encode(asked(8), tokenizer, "train")))
    assert batch["attention_mask"][:, 0].all()
    assert not batch["attention_mask"].all()
    assert batch["start_positions"].shape == (len(batch["input_ids"]),)


def test_rows_of_one_length_come_together() -> None:
    data = kind_of(task()).encode(asked(30), tiny_tokenizer(), "calibration")
    lengths = [int(batch["attention_mask"].sum()) for batch in batches(data, collate(), 1, "cpu")]
    assert lengths == sorted(len(ids) for ids in data["input_ids"])
    assert lengths[0] < lengths[-1]


def test_padding_teaches_nothing() -> None:
    student, teacher = torch.randn(2, 2, 3, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 3)

    def error(tokens: int) -> torch.Tensor:
        pair = (
            span_logits(
                ModelOutput(start_logits=start[:, :tokens], end_logits=end[:, :tokens]),
                {"attention_mask": mask[:, :tokens]},
            )
            for start, end in (student, teacher)
        )
        return logits_error(*pair, 2.0)

    assert error(4) > 0
    torch.testing.assert_close(error(6), error(4))


# --- files


def squad() -> list[dict[str, Any]]:
    """Ask for the word after `and`, in a text that stands twice in its context."""
    rows = []
    for text in reviews()["text"]:
        answer, context = text.split()[-1], f"{text} {text}"
        answers = {"text": [answer, answer], "answer_start": [context.index(answer), context.rindex(answer)]}
        rows.append({"question": f"is the {text.split()[1]}", "context": context, "answers": answers})
    return rows


def write_parquet(rows: list[dict[str, Any]]) -> str:
    """Write the types that the hub's copy of SQuAD has."""
    text, start = datasets.Value("string"), datasets.Value("int32")
    answers = datasets.Sequence({"text": text, "answer_start": start})
    content = {key: [row[key] for row in rows] for key in rows[0]}
    features = datasets.Features(question=text, context=text, answers=answers)
    datasets.Dataset.from_dict(content, features=features).to_parquet("data/raw/rows.parquet")
    return "data/raw/rows.parquet"


def as_list(label: dict[str, list[Any]]) -> list[dict[str, Any]]:
    pairs = zip(label["text"], label["answer_start"], strict=True)
    return [{"text": text, "answer_start": start} for text, start in pairs]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("write", "change"),
    [(write_jsonl, dict), (write_jsonl, as_list), (write_parquet, dict)],
    ids=["as SQuAD", "a list of pairs", "typed"],
)
def test_every_question_keeps_its_context_and_its_answers(write: Any, change: Any) -> None:
    splits = extracted(write([{**row, "answers": change(row["answers"])} for row in squad()]), **DATA)
    truth = {(row["question"], row["context"]): row["answers"] for row in squad()}
    assert sum(len(splits[name]) for name in SPLIT) == 60
    assert (load_task().labels, load_task().stride) == ((), 3)
    for rows in splits.values():
        for question, context, label in zip(rows["text"], rows["text_pair"], rows["label"], strict=True):
            assert {key: values.tolist() for key, values in label.items()} == truth[question, context]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"text": [], "answer_start": []}, r"\b1\b"),
        ({"text": ["plot"], "answer_start": [5]}, r"\b1\b.*\banswer_start\b.*\bcontext\b"),
        ({"text": ["plot"], "answer_start": [-36]}, r"\b1\b.*\banswer_start\b.*\bcontext\b"),
        ({"text": ["plot", "the"], "answer_start": [4]}, '"text": .*"answer_start": '),
        ({"text": [" "], "answer_start": [3]}, '"text": .*"answer_start": '),
        ({"text": ["plot"]}, '"answer_start": '),
        ("plot", '"answer_start": '),
    ],
)
def test_an_answer_that_is_none_is_named(answer: Any, named: str) -> None:
    row = {**squad()[0], "question": "is it the plot", "context": "the plot is dull", "answers": answer}
    write_jsonl(squad(), "folder/train")
    write_jsonl([row], "folder/test")
    assert re.search(rf"\banswers\b.*\btest\b.*{named}", refusal("data/raw/folder", splits={"test": "test"}, **DATA))
