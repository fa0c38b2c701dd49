"""Extractive question answering: the answer is a part of the context, as in SQuAD 1.1.

A context that is too long for `max_length` is cut into windows, of which neighbours share `stride` tokens
(eckart/text/qa_windows.py). Each is a row for the model: it points at the tokens where the answer starts and ends, or
at the CLS token (at the first, where there is none) if the answer is not wholly in the window.

Source: Rajpurkar et al., EMNLP 2016, and the evaluation script of SQuAD 1.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForQuestionAnswering, PreTrainedModel, PreTrainedTokenizerBase
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from eckart.calibration.losses import span_logits, span_loss
from eckart.text import qa_windows
from eckart.text.qa_windows import Window, best_answers
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split, Task
from tasks.nlp_tasks.nlp_task import Answers, Collate, Scored, TaskKind, check_offsets, predict, scored
from tasks.runtime.stage_runner import StageError


def encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
    """Windows, and between which tokens of each the first answer stands.

    Raises:
        StageError: the tokenizer does not say where its tokens stand, or a question leaves no room for its context.
    """
    return _encode(frame, windows(frame, task, tokenizer), tokenizer)


def _encode(frame: pd.DataFrame, every: Sequence[Window], tokenizer: PreTrainedTokenizerBase) -> Dataset:
    places = [_span(cell["text"][0], cell["answer_start"][0]) for cell in frame["label"]]
    return Dataset.from_list([{**one.inputs, **_positions(one, *places[one.row], tokenizer)} for one in every])


def _span(answer: str, start: int) -> tuple[int, int]:
    """The characters from the first to behind the last that is no white space, which tokens may not cover."""
    start += len(answer) - len(answer.lstrip())
    return start, start + len(answer.strip())


def windows(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> list[Window]:
    """All windows of all questions, in their order."""
    check_offsets(tokenizer, task)
    questions, contexts = frame["text"].tolist(), frame["text_pair"].tolist()
    try:
        return list(qa_windows.windows(questions, contexts, tokenizer, task.max_length, task.stride or 0))
    except qa_windows.NoRoom as error:
        raise StageError(f"{error} (data.max_length, data.stride)") from error


def _positions(window: Window, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The first and the last token of the answer at the characters `start` to `end`."""
    begins, ends = window.offsets.T
    context = begins != qa_windows.NOT_CONTEXT
    tokens = np.flatnonzero(context & (ends > start) & (begins < end))
    if len(tokens) and begins[context][0] <= start and end <= ends[context][-1]:
        return {"start_positions": int(tokens[0]), "end_positions": int(tokens[-1])}
    special = np.flatnonzero(window.inputs["input_ids"] == tokenizer.cls_token_id)
    nowhere = int(special[0]) if len(special) else 0
    return {"start_positions": nowhere, "end_positions": nowhere}


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    frame: pd.DataFrame,
    task: Task,
    batch_size: int,
    split: Split,
) -> Scored:
    """Metrics are means over questions, the loss is one over windows."""
    every, logits, positions = _predicted(model, tokenizer, frame, task, batch_size)
    guesses = [answer.text for answer in best_answers(every, *logits, frame["text_pair"].tolist())]
    each = each_question(guesses, [list(cell["text"]) for cell in frame["label"]])
    return scored(task, metrics(each), loss(every, logits, positions), each)


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> list[Answers]:
    every, logits, _ = _predicted(model, tokenizer, frame, task, batch_size)
    return [{"answer": answer.text} for answer in best_answers(every, *logits, frame["text_pair"].tolist())]


def trivial(train: pd.DataFrame, frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """The most frequent answer of the training rows; of equally frequent ones the first."""
    counts = Counter(normal(cell["text"][0]) for cell in train["label"])
    most = counts.most_common(1)[0][0]
    return each_question([most] * len(frame), [list(cell["text"]) for cell in frame["label"]])


def _predicted(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> tuple[list[Window], tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Windows, and of each the logits of starts and ends `(windows, tokens)`, and where they are."""
    every = windows(frame, task, tokenizer)
    predictions, positions = predict(model, _encode(frame, every, tokenizer), _collate(tokenizer, model), batch_size)
    return every, predictions[:2], positions


def loss(every: Sequence[Window], logits: tuple[np.ndarray, ...], positions: tuple[np.ndarray, ...]) -> float:
    """Mean over windows of the mean cross-entropy of start and end, as `eckart.calibration.losses.span_loss` has it."""
    lengths = torch.tensor([len(window.offsets) for window in every])
    total = 0.0
    for predicted, wanted in zip(logits, positions, strict=True):
        padding = torch.arange(predicted.shape[1]) >= lengths[:, None]
        values = torch.from_numpy(predicted).double().masked_fill(padding, -torch.inf)
        total += float(cross_entropy(values, torch.from_numpy(wanted)))
    return total / len(logits)


def each_question(guesses: Sequence[str], golds: Sequence[Sequence[str]]) -> pd.DataFrame:
    """Of each question the best over its gold answers: of equality, and of the F1 of words."""
    pairs = list(zip(guesses, golds, strict=True))
    return pd.DataFrame(
        {
            "exact_match": [float(max(normal(guess) == normal(gold) for gold in some)) for guess, some in pairs],
            "f1": [max(_f1(normal(guess), normal(gold)) for gold in some) for guess, some in pairs],
        }
    )


def metrics(each: pd.DataFrame) -> dict[MetricName, float]:
    """Means over questions."""
    return {"exact_match": float(each["exact_match"].mean()), "f1": float(each["f1"].mean())}


def normal(answer: str) -> str:
    """Lower case, without punctuation and articles, words one space apart."""
    answer = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def _f1(guess: str, gold: str) -> float:
    guessed, wanted = guess.split(), gold.split()
    common = (Counter(guessed) & Counter(wanted)).total()
    return 2 * common / (len(guessed) + len(wanted)) if common else 0.0


def _head(task: Task) -> dict[str, Any]:
    return {"num_labels": 2}  # a start and an end, whatever head the base model had


def _collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Collate:
    """Padded on the right, whatever the tokenizer does: positions count from the left."""
    return partial(pad_without_fast_tokenizer_warning, tokenizer, padding_side="right", return_tensors="pt")


ANSWERS = TaskKind(
    auto=AutoModelForQuestionAnswering,
    head=_head,
    encode=encode,
    collate=_collate,
    loss=span_loss,
    own_loss=False,
    logits=span_logits,
    score=score,
    answers=answers,
    trivial=trivial,
)
