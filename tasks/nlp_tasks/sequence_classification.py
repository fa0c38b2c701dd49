"""Classification and regression of a text, or of a pair of texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch.nn.functional import cross_entropy, mse_loss
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from eckart.calibration.losses import logits_of, mean_loss_times_batch
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split, Task
from tasks.nlp_tasks.nlp_task import Answers, Scored, TaskKind, outputs_of, scored


def head(task: Task) -> dict[str, Any]:
    if task.kind == "regression":
        return {"num_labels": 1, "problem_type": "regression"}
    names = dict(enumerate(task.labels))
    kind = {"problem_type": "single_label_classification"}
    return {
        **kind,
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: label for label, name in names.items()},
    }


def encode(frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
    texts = [frame[column].tolist() for column in ("text", "text_pair") if column in frame]
    columns = tokenizer(*texts, truncation=True, max_length=task.max_length)
    return Dataset.from_dict({**columns, "labels": frame["label"].tolist()})


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    frame: pd.DataFrame,
    task: Task,
    batch_size: int,
    split: Split,
) -> Scored:
    data = encode(frame, task, tokenizer, split)
    outputs, labels = outputs_of(model, data, _collate(tokenizer, model), batch_size)
    guesses = {"value": outputs.squeeze(-1)} if task.kind == "regression" else {"guess": outputs.argmax(-1)}
    rows = pd.DataFrame({"label": labels, **guesses})
    return scored(task, metrics(task, outputs, labels), loss(task, outputs, labels), rows)


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, task: Task, batch_size: int
) -> list[Answers]:
    data = encode(frame, task, tokenizer, "test")
    outputs, _ = outputs_of(model, data, _collate(tokenizer, model), batch_size)
    if task.kind == "regression":
        return [{"value": value} for value in outputs.squeeze(-1).tolist()]
    return [{"label": task.labels[label]} for label in outputs.argmax(-1)]


def trivial(train: pd.DataFrame, frame: pd.DataFrame, task: Task, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """The most frequent class of the training rows, or the mean of their labels."""
    if task.kind == "regression":
        return pd.DataFrame({"label": frame["label"], "value": float(train["label"].mean())})
    return pd.DataFrame({"label": frame["label"], "guess": int(train["label"].mode()[0])})


def loss(task: Task, outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross-entropy or squared error. (The Trainer's own is a mean of batch means, with uneven batches.)"""
    predicted, wanted = torch.from_numpy(outputs).double(), torch.from_numpy(labels)
    if task.kind == "classification":
        return float(cross_entropy(predicted, wanted))
    return float(mse_loss(predicted.squeeze(-1), wanted.double()))


def metrics(task: Task, outputs: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]:
    """All metrics of outputs `(rows, classes)` or `(rows, 1)` against labels `(rows,)`."""
    if task.kind == "regression":
        values = outputs.squeeze(-1)
        return {"pearson": _correlation(pearsonr, labels, values), "spearman": _correlation(spearmanr, labels, values)}
    guesses = outputs.argmax(-1)
    return {
        "accuracy": float(accuracy_score(labels, guesses)),
        "f1": float(f1_score(labels, guesses, average="binary" if len(task.labels) == 2 else "macro")),
        "matthews": float(matthews_corrcoef(labels, guesses)),
    }


def _correlation(correlate: Any, labels: np.ndarray, values: np.ndarray) -> float:
    """A correlation with a constant is 0 by definition here: such outputs tell nothing."""
    if np.ptp(values) == 0 or np.ptp(labels) == 0:
        return 0.0
    return float(correlate(labels, values).statistic)


def _collate(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Any:
    return DataCollatorWithPadding(tokenizer)


SEQUENCE = TaskKind(
    auto=AutoModelForSequenceClassification,
    head=head,
    encode=encode,
    collate=_collate,
    loss=mean_loss_times_batch,
    own_loss=True,
    logits=logits_of,
    score=score,
    answers=answers,
    trivial=trivial,
)
