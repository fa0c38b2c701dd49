"""Extractive question answering: the answer is a part of the context, as in SQuAD 1.1.

A context that is too long for `max_length` is cut into overlapping windows: neighbors share `stride` tokens
(eckart/text/qa_windows.py). Each window is one example for the model, with the first and last token of the answer as
labels. If a window does not contain the whole answer, both labels are the CLS token (or the first token if there is no
CLS token).

Source: Rajpurkar et al., EMNLP 2016, and the evaluation script of SQuAD 1.1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from eckart.calibration.losses import Loss, span_loss
from eckart.text import qa_windows
from eckart.text.qa_windows import Answer, Window, best_answers
from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Split
from tasks.data.label_encoding import has_mappings
from tasks.nlp_tasks._prediction import Collate, Columns, predict
from tasks.nlp_tasks.nlp_task import NUMBER, STRING, Answers, NlpTask, Scored, Tokenizer

if TYPE_CHECKING:
    from tasks.config.schema import Data


class QuestionAnswering(NlpTask):
    metrics: ClassVar = ("exact_match", "f1")
    text_pair: ClassVar = "required"
    split_by: ClassVar = ("text_pair",)  # questions on the same context must be in the same split
    options: ClassVar = ("stride",)
    auto_class: ClassVar = "AutoModelForQuestionAnswering"
    own_loss: ClassVar = False
    pipeline: ClassVar = "question-answering"
    trivial_answer: ClassVar = "the most frequent answer of the training examples"
    answer_columns: ClassVar = {"answer": STRING, "score": NUMBER}

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether labels are mappings or lists of them, as the answers of SQuAD are."""
        return labels is not None and has_mappings(labels)

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        for name, frame in splits.items():
            frame["label"] = _answers(frame, name, params)
        return ()

    def head(self) -> dict[str, Any]:
        return {"num_labels": 2}  # start and end, whatever head the base model had

    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return the windows as model inputs; if `frame` has labels, add start and end position of the first answer.

        Raises:
            StageError: the tokenizer is not a fast one, or a question leaves no room for its context.
        """
        return _columns(frame, self.windows(frame, tokenizer), tokenizer)

    def windows(self, frame: pd.DataFrame, tokenizer: Tokenizer) -> list[Window]:
        """Return the windows of all questions, in the order of the questions."""
        self.check_offsets(tokenizer)
        questions, contexts = frame["text"].tolist(), frame["text_pair"].tolist()
        try:
            return list(qa_windows.windows(questions, contexts, tokenizer, self.spec.max_length, self.spec.stride or 0))
        except qa_windows.NoRoom as error:
            raise StageError(f"{error} (data.max_length, data.stride)") from error

    @property
    def loss(self) -> Loss:
        return span_loss

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        """Return the function that makes a batch. It pads on the right, to keep start and end positions valid."""
        return partial(pad_without_fast_tokenizer_warning, tokenizer, padding_side="right", return_tensors="pt")

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model. Metrics are means over questions; the loss is a mean over windows."""
        windows = self.windows(frame, tokenizer)
        data = _columns(frame, windows, tokenizer)
        logits, best = self._best(model, tokenizer, frame, windows, batch)
        rows = question_scores([answer.text for answer in best], [list(cell["text"]) for cell in frame["label"]])
        positions = np.array(data["start_positions"]), np.array(data["end_positions"])
        metrics = {name: float(rows[name].mean()) for name in self.metrics}
        return self.scored(metrics, mean_loss(windows, logits, positions), rows)

    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        _, best = self._best(model, tokenizer, frame, self.windows(frame, tokenizer), batch)
        return [{"answer": answer.text, "score": answer.probability} for answer in best]

    def _best(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, windows: Sequence[Window], batch: int
    ) -> tuple[tuple[np.ndarray, ...], list[Answer]]:
        """Return the start and end logits, `(windows, tokens)` each, and the best answer to each question."""
        data = _columns(frame.drop(columns="label", errors="ignore"), windows, tokenizer)
        starts, ends = predict(
            model,
            data,
            self.collate(tokenizer, model),
            batch,
            lambda outputs, _: (outputs["start_logits"], outputs["end_logits"]),
        )
        return (starts, ends), best_answers(windows, starts, ends, frame["text_pair"].tolist())

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Answer every question with the most frequent training answer; in a tie, with the first of them."""
        counts = Counter(normal(cell["text"][0]) for cell in train["label"])
        most = counts.most_common(1)[0][0]
        return question_scores([most] * len(frame), [list(cell["text"]) for cell in frame["label"]])


def _columns(frame: pd.DataFrame, windows: Sequence[Window], tokenizer: Tokenizer) -> dict[str, list[Any]]:
    rows: list[dict[str, Any]] = [dict(window.inputs) for window in windows]
    if "label" in frame:
        cells = frame["label"].tolist()
        for row, window in zip(rows, windows, strict=True):
            answer, start = cells[window.row]["text"][0], cells[window.row]["answer_start"][0]
            start += len(answer) - len(answer.lstrip())
            row |= _positions(window, start, start + len(answer.strip()), tokenizer)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _positions(window: Window, start: int, end: int, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the labels of a window: the positions of the first and last token of the answer.

    Args:
        start, end: where the answer begins and ends in the context, in characters.
    """
    begins, ends = window.offsets.T
    context = begins != qa_windows.NOT_CONTEXT
    tokens = np.flatnonzero(context & (ends > start) & (begins < end))
    if len(tokens) and begins[context][0] <= start and end <= ends[context][-1]:
        return {"start_positions": int(tokens[0]), "end_positions": int(tokens[-1])}
    special = np.flatnonzero(window.inputs["input_ids"] == tokenizer.cls_token_id)
    nowhere = int(special[0]) if len(special) else 0
    return {"start_positions": nowhere, "end_positions": nowhere}


def mean_loss(windows: Sequence[Window], logits: tuple[np.ndarray, ...], positions: tuple[np.ndarray, ...]) -> float:
    """Return the mean over windows of `eckart.calibration.losses.span_loss`: the mean loss of start and end."""
    lengths = torch.tensor([len(window.offsets) for window in windows])
    total = 0.0
    for predicted, wanted in zip(logits, positions, strict=True):
        padding = torch.arange(predicted.shape[1]) >= lengths[:, None]
        values = torch.from_numpy(predicted).double().masked_fill(padding, -torch.inf)
        total += float(cross_entropy(values, torch.from_numpy(wanted)))
    return total / len(logits)


def question_scores(guesses: Sequence[str], golds: Sequence[Sequence[str]]) -> pd.DataFrame:
    """Return exact match and word F1 of each guess. Each is the maximum over the gold answers of the question."""
    pairs = list(zip(guesses, golds, strict=True))
    return pd.DataFrame(
        {
            "exact_match": [float(max(normal(guess) == normal(gold) for gold in wanted)) for guess, wanted in pairs],
            "f1": [max(_f1(normal(guess), normal(gold)) for gold in wanted) for guess, wanted in pairs],
        }
    )


def normal(answer: str) -> str:
    """Normalize an answer as SQuAD does: lower case, no punctuation, no articles, single spaces."""
    answer = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", answer).split())


def _f1(guess: str, gold: str) -> float:
    guessed, wanted = guess.split(), gold.split()
    common = (Counter(guessed) & Counter(wanted)).total()
    return 2 * common / (len(guessed) + len(wanted)) if common else 0.0


def _answers(frame: pd.DataFrame, split: Split, params: Data) -> pd.Series:
    """Convert labels to the format of SQuAD 1.1, and check them.

    Raises:
        StageError: a label is malformed, a question has no answer, or an answer is not in the context.
    """
    where = f"column {params.columns.label} of the {split} split"
    try:
        answers = [_answer(cell) for cell in frame["label"]]
    except (KeyError, TypeError, ValueError) as error:
        raise StageError(
            f'{where} has cells that are not answers: write {{"text": [...], "answer_start": [...]}} with a start for '
            "each text, or a list of such pairs"
        ) from error
    if without := sum(not answer["text"] for answer in answers):
        raise StageError(f"{where} has {without} questions without an answer: remove them, as SQuAD 1.1 has none")
    astray = sum(
        not all(
            start >= 0 and context.startswith(text, start)
            for text, start in zip(answer["text"], answer["answer_start"], strict=True)
        )
        for answer, context in zip(answers, frame["text_pair"], strict=True)
    )
    if astray:
        raise StageError(
            f"{where} has {astray} examples where an answer is not at the character answer_start of column "
            f"{params.columns.text_pair}: correct or remove them"
        )
    return pd.Series(answers, index=frame.index)


def _answer(cell: Any) -> dict[str, list[Any]]:
    """Convert a cell, possibly a list of answers, to `{"text": [...], "answer_start": [...]}`."""
    parts = [cell] if isinstance(cell, Mapping) else list(cell)
    texts, starts = (
        [value for part in parts for value in np.atleast_1d(part[key]).tolist()] for key in ("text", "answer_start")
    )
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise TypeError("an answer must be text")
    pairs = list(zip(texts, map(int, starts), strict=True))
    return {"text": [text for text, _ in pairs], "answer_start": [start for _, start in pairs]}
