"""Extractive question answering: windows, spans, the metrics of SQuAD 1.1, from files to scores."""

from __future__ import annotations

import json
import re
from pathlib import Path
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
from torch.nn.functional import cross_entropy
from transformers import (
    BertForQuestionAnswering,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import span_logits, span_loss
from eckart.calibration.statistics import collect
from eckart.model.targets import find_targets
from eckart.recovery.distillation import logits_error
from eckart.text.qa_windows import LONGEST, Window, best_answers, best_span
from tasks.artifacts.task_spec import SPLITS, Task, load_split, load_task
from tasks.data.loading import batches
from tasks.extract import extract
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.question_answering import each_question, normal, question_metrics
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

COLUMNS = {"text": "question", "text_pair": "context", "label": "answers"}
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


def test_windows_overlap_by_the_stride() -> None:
    every = kind_of(task()).windows(frame("plot"), tiny_tokenizer())
    texts = [tiny_tokenizer().decode(window.inputs["input_ids"]) for window in every]
    assert texts == [
        "[CLS] is dull [SEP] the plot is dull and [SEP]",
        "[CLS] is dull [SEP] dull and the music is [SEP]",
    ]
    assert [window.row for window in every] == [0, 0]


def test_offsets_are_those_of_the_context_alone() -> None:
    for window in kind_of(task()).windows(frame("plot"), tiny_tokenizer()):
        tokens = tiny_tokenizer().convert_ids_to_tokens(window.inputs["input_ids"])
        assert (window.offsets[:4] == -1).all()
        assert (window.offsets[-1] == -1).all()
        assert [CONTEXT[begin:end] for begin, end in window.offsets[4:-1]] == tokens[4:-1]


@pytest.mark.parametrize(
    ("answer", "first", "second"),
    [
        ("plot", (5, 5), (0, 0)),
        ("plot is", (5, 6), (0, 0)),
        ("music", (0, 0), (7, 7)),
        ("dull and", (7, 8), (4, 5)),  # what both share
        ("and the", (0, 0), (5, 6)),  # the first has a part of it
        ("is dull and the", (0, 0), (0, 0)),  # none has all of it
        ("lo", (5, 5), (0, 0)),  # a part of a token
    ],
)
def test_an_answer_is_where_it_is_whole(answer: str, first: tuple[int, int], second: tuple[int, int]) -> None:
    assert places(answer) == [first, second]


def test_without_a_stride_windows_share_nothing() -> None:
    assert places("and the", stride=None) == [(0, 0), (0, 0)]
    assert places("the music", stride=None) == [(0, 0), (4, 5)]


def test_a_short_context_has_one_window() -> None:
    assert places("and the", max_length=16) == [(8, 9)]


def test_white_space_around_an_answer_is_no_token() -> None:
    assert places(" plot is ", max_length=16) == [(5, 6)]


def test_training_takes_the_first_answer() -> None:
    some = frame("plot")
    some["label"] = [{"text": ["music", "plot"], "answer_start": [CONTEXT.index("music"), CONTEXT.index("plot")]}]
    assert kind_of(task(16)).encode(some, tiny_tokenizer(), "train")["start_positions"] == [10]


def test_without_a_cls_token_the_first_token_means_nowhere() -> None:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", *set(CONTEXT.split())])}, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", pad_token="?")
    data = kind_of(task(7)).encode(frame("music"), plain, "train")
    assert list(zip(data["start_positions"], data["end_positions"], strict=True)) == [(0, 0), (5, 5)]


def test_many_questions_keep_their_order_and_their_answers() -> None:
    """The law of windows: where the answer is not nowhere, it is what stands there."""
    data = asked(1003)
    every = kind_of(task()).windows(data, tiny_tokenizer())
    rows = [window.row for window in every]
    assert sorted(rows) == rows
    assert set(rows) == set(range(1003))
    encoded = kind_of(task()).encode(data, tiny_tokenizer(), "train")
    for window, first, last in zip(every, encoded["start_positions"], encoded["end_positions"], strict=True):
        if first:
            begin, end = window.offsets[first, 0], window.offsets[last, 1]
            assert data["text_pair"][window.row][begin:end] == data["label"][window.row]["text"][0]


@pytest.mark.parametrize(("max_length", "stride"), [(5, None), (6, 1), (10, 5), (10, 9)])
def test_a_question_that_leaves_no_room_is_named(max_length: int, stride: int | None) -> None:
    with pytest.raises(StageError, match=rf"\b2\b.*max_length={max_length}\b.*data\.max_length"):
        places("plot", max_length=max_length, stride=stride)
    assert places("plot", max_length=max_length + 10, stride=stride)


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(StageError, match=r"ByT5Tokenizer .*model\.base"):
        kind_of(task()).encode(frame("plot"), ByT5Tokenizer(), "train")


# --- spans


def spans(tokens: int, question: int = 1) -> np.ndarray:
    """A context of `tokens` of one character each behind a question, and a special token behind it."""
    inside = np.array([[position, position + 1] for position in range(tokens)])
    outside = np.full((question, 2), -1)
    return np.concatenate([outside, inside, outside[:1]])


def test_the_best_span_ends_where_it_starts_or_later() -> None:
    start, end = np.array([0, 1, 5, 2, 0.0]), np.array([0, 9, 1, 4, 0.0])
    assert best_span(start, end, spans(3)) == (10, (0, 1))  # 5 + 9 would end before it starts
    assert best_span(start, end - [0, 9, 0, 0, 0], spans(3)) == (9, (1, 3))


def test_only_the_context_answers() -> None:
    """Not the question, the special tokens and the padding, however large their logits."""
    start, end = np.full(7, 99.0), np.full(7, 99.0)
    start[1:4], end[1:4] = [1, 2, 0], [0, 0, 1]
    assert best_span(start, end, spans(3)) == (3, (1, 3))


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


def texts(every: list[Window], starts: np.ndarray, ends: np.ndarray, contexts: list[str]) -> list[str]:
    return [answer.text for answer in best_answers(every, starts, ends, contexts)]


@pytest.mark.parametrize(("first", "second", "answer"), [(3.0, 2.0, "plot"), (2.0, 3.0, "music")])
def test_the_better_window_answers(first: float, second: float, answer: str) -> None:
    logits = np.zeros((2, 12))  # of a batch with longer windows
    logits[0, 5], logits[1, 7] = first, second
    every = kind_of(task()).windows(frame("plot"), tiny_tokenizer())
    assert texts(every, logits, logits, [CONTEXT]) == [answer]


def test_a_model_that_knows_all_is_always_right() -> None:
    data, few = asked(50), task(12)
    every, encoded = kind_of(few).windows(data, tiny_tokenizer()), kind_of(few).encode(data, tiny_tokenizer(), "test")
    starts, ends = (np.eye(12)[encoded[f"{which}_positions"]] for which in ("start", "end"))
    golds = [label["text"] for label in data["label"]]
    assert question_metrics(each_question(texts(every, starts, ends, data["text_pair"].tolist()), golds)) == {
        "exact_match": 1,
        "f1": 1,
    }


# --- metrics


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("The Plot", "plot"),
        ("an  apple,\n a day", "apple day"),
        ("U.S.A.", "usa"),
        ("thermal theatre", "thermal theatre"),
        ("a-b", "ab"),  # the script removes punctuation before articles
        ("the", ""),
    ],
)
def test_answers_are_compared_without_what_does_not_matter(answer: str, plain: str) -> None:
    assert normal(answer) == plain


@pytest.mark.parametrize(
    ("guess", "golds", "exact", "f1"),
    [
        ("The cat.", ["cat"], 1, 1),
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
    assert question_metrics(each_question([guess], [golds])) == {"exact_match": exact, "f1": pytest.approx(f1)}


def test_metrics_are_means_over_questions() -> None:
    found = question_metrics(each_question(["cat", "cat sat"], [["cat"], ["sat"]]))
    assert found == {"exact_match": 0.5, "f1": pytest.approx((1 + 2 / 3) / 2)}


# --- scores and statistics


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


def test_a_score_is_that_of_all_windows_one_by_one() -> None:
    model, data = bert(), asked(60)
    encoded, losses = kind_of(task()).encode(data, tiny_tokenizer(), "test"), []
    with torch.no_grad():
        for row in encoded:
            batch = {name: torch.tensor([value]) for name, value in row.items()}
            losses.append(float(model(**batch).loss))  # without padding it is the model's own
    result = kind_of(task()).score(model, tiny_tokenizer(), data, 8, "test").score
    assert result.rows == 60 < len(encoded)
    assert result.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert 0 < result.metric == result.metrics["f1"] < 1


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_a_score_does_not_depend_on_the_batches(batch_size: int) -> None:
    one, other = (
        kind_of(task()).score(bert(), tiny_tokenizer(), asked(60), size, "test").score for size in (16, batch_size)
    )
    assert one.metrics == other.metrics
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


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


def padded(row: dict[str, torch.Tensor], more: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.nn.functional.pad(values, (0, more)) if values.dim() == 2 else values
        for name, values in row.items()
    }


@pytest.mark.parametrize(("size", "more"), [(1, 0), (5, 0), (5, 9)])
def test_statistics_does_not_depend_on_the_batches_and_the_padding(size: int, more: int) -> None:
    model, data = bert().double(), kind_of(task()).encode(asked(30), tiny_tokenizer(), "calibration")
    targets = find_targets(model, next(batches(data.select(range(1)), collate(), 1, "cpu"))).targets
    one = collect(model, batches(data, collate(), 100, "cpu"), targets, loss=span_loss)
    some = (padded(batch, more) for batch in batches(data, collate(), size, "cpu"))
    other = collect(model, some, targets, loss=span_loss)
    for kind, tensors in one.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, other[kind][key], rtol=1e-9, atol=1e-12, msg=f"{kind} of {key}")


def test_the_loss_is_the_mean_of_start_and_end_summed_over_samples() -> None:
    data = kind_of(task()).encode(asked(4), tiny_tokenizer(), "train")
    batch = next(batches(data, collate(), 4, "cpu"))
    with torch.no_grad():
        outputs, found = bert()(**batch), span_loss(bert(), batch)
    expected = 0.0
    for row, length in enumerate(batch["attention_mask"].sum(1)):
        for which in ("start", "end"):
            logits = outputs[f"{which}_logits"][row, :length]
            expected += float(cross_entropy(logits, batch[f"{which}_positions"][row])) / 2
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_padding_teaches_nothing(temperature: float) -> None:
    some, other = torch.randn(2, 2, 3, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 3)

    def error(tokens: int) -> torch.Tensor:
        pair = (
            span_logits(
                ModelOutput(start_logits=start[:, :tokens], end_logits=end[:, :tokens]),
                {"attention_mask": mask[:, :tokens]},
            )
            for start, end in (some, other)
        )
        return logits_error(*pair, temperature)

    assert error(4) > 0
    torch.testing.assert_close(error(6), error(4))


# --- files


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace with a cache of its own and no hub."""
    (tmp_path / "workspace" / "data" / "raw").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "workspace")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "workspace"


def squad() -> list[dict[str, Any]]:
    """Which word stands behind `and`, of a text that is told twice."""
    rows = []
    for text in reviews()["text"]:
        answer, context = text.split()[-1], f"{text} {text}"
        found = {"text": [answer, answer], "answer_start": [context.index(answer), context.rindex(answer)]}
        rows.append({"question": f"is the {text.split()[1]}", "context": context, "answers": found})
    return rows


def write(rows: list[dict[str, Any]], name: str = "rows") -> str:
    file = Path(f"data/raw/{name}.jsonl")
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


def params(source: str, **changes: Any) -> dict[str, Any]:
    data = {"source": source, "columns": COLUMNS, "task": "question_answering", "metric": "exact_match", "stride": 3}
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


def as_list(label: dict[str, list[Any]]) -> list[dict[str, Any]]:
    pairs = zip(label["text"], label["answer_start"], strict=True)
    return [{"text": text, "answer_start": start} for text, start in pairs]


def check(splits: dict[str, pd.DataFrame]) -> None:
    truth = {(row["question"], row["context"]): row["answers"] for row in squad()}
    assert sum(len(splits[name]) for name in ("train", "validation", "test")) == 60
    assert (load_task().labels, load_task().stride) == ((), 3)
    for rows in splits.values():
        for question, context, label in zip(rows["text"], rows["text_pair"], rows["label"], strict=True):
            assert {key: values.tolist() for key, values in label.items()} == truth[question, context]


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("change", [lambda label: label, as_list, lambda label: [label]], ids=["hub", "list", "one"])
def test_every_question_keeps_its_context_and_its_answers(change: Any) -> None:
    check(run(write([{**row, "answers": change(row["answers"])} for row in squad()])))


@pytest.mark.usefixtures("workspace")
def test_a_typed_file_is_as_the_hub_has_it() -> None:
    features = datasets.Features(
        question=datasets.Value("string"),
        context=datasets.Value("string"),
        answers=datasets.Sequence({"text": datasets.Value("string"), "answer_start": datasets.Value("int32")}),
    )
    content = {key: [row[key] for row in squad()] for key in ("question", "context", "answers")}
    datasets.Dataset.from_dict(content, features=features).to_parquet("data/raw/rows.parquet")
    check(run("data/raw/rows.parquet"))


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"text": [], "answer_start": []}, r"\b1\b"),
        ({"text": ["plot"], "answer_start": [5]}, r"\b1\b.*\banswer_start\b.*\bcontext\b"),
        ({"text": ["plot"], "answer_start": [-36]}, r"\b1\b.*\banswer_start\b.*\bcontext\b"),
        ({"text": ["plot"], "answer_start": [4000]}, r"\b1\b.*\banswer_start\b.*\bcontext\b"),
        ({"text": ["plot", "the"], "answer_start": [4]}, '"text": .*"answer_start": '),
        ({"text": [" "], "answer_start": [3]}, '"text": .*"answer_start": '),
    ],
)
def test_an_answer_that_is_none_is_named(answer: dict[str, Any], named: str) -> None:
    row = {**squad()[0], "question": "is it the plot", "context": "the plot is dull", "answers": answer}
    Path("data/raw/folder").mkdir()
    write(squad(), "folder/train")
    write([row], "folder/test")
    assert re.search(rf"\banswers\b.*\btest\b.*{named}", error("data/raw/folder", splits={"test": "test"}))


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize("label", ["plot", 3, {"text": ["plot"]}])
def test_a_column_that_is_no_answers_is_named(label: Any) -> None:
    said = error(write([{**row, "answers": label} for row in squad()]))
    assert re.search(r'\banswers\b.*\btrain\b.*"answer_start": ', said)


def test_a_study_goes_from_files_to_scores(workspace: Path) -> None:
    source = write(squad())
    write_base(workspace / "models/base/tiny")
    changed = params(source)
    changed["study"]["recipes"] = ["kfac"]
    changed["check"]["fewest_rows"] = 7
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
        assert set(evaluation[step]["metrics"]) == {"exact_match", "f1"}
        assert 0 <= evaluation[step]["metric"] == evaluation[step]["metrics"]["exact_match"] <= 1
    model = BertForQuestionAnswering.from_pretrained("models/finetuned/kfac-0.5")
    assert (
        model(**tiny_tokenizer()("is the plot", "the plot is dull", return_tensors="pt")).start_logits.isfinite().all()
    )
