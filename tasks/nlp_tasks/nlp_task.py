"""What the stages ask of a kind of task, and what several kinds share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import IGNORED, Batch, Loss, Predictions
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.results_schema import Score
from tasks.artifacts.task_spec import Split, Task
from tasks.runtime.stage_runner import StageError

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Rows of a data set → a batch of tensors."""
Answers = Mapping[str, Any]
"""Column → what a model answers there to a row of text."""

_MORE_OUTPUTS = ["past_key_values", "cache_params", "hidden_states", "attentions"]  # that no score needs


@dataclass(frozen=True)
class Scored:
    """How good a model is on some rows, and what each of them contributed."""

    score: Score
    rows: pd.DataFrame
    """A line for each row, in their order: of what `tasks/scoring/bootstrap.py` computes every metric."""


@dataclass(frozen=True)
class TaskKind:
    """A kind of task, from rows of text to a score."""

    auto: Any
    """The transformers class whose `from_pretrained` gives a model with the head."""
    head: Callable[[Task], dict[str, Any]]
    """What the head's shape is, as arguments of `from_pretrained`."""
    encode: Callable[[pd.DataFrame, Task, PreTrainedTokenizerBase, Split], Dataset]
    """A split as model inputs with labels, unpadded."""
    collate: Callable[[PreTrainedTokenizerBase, PreTrainedModel], Collate]
    """Rows of `encode` → a batch."""
    loss: Loss
    """By the labels that are given."""
    own_loss: bool
    """Whether its mean over samples is the model's own loss; if not, training takes that mean in place of it."""
    logits: Predictions
    """What a teacher teaches; padding is no prediction."""
    score: Callable[[PreTrainedModel, PreTrainedTokenizerBase, pd.DataFrame, Task, int, Split], Scored]
    """How good a model is on all rows of a split, in batches of so many."""
    answers: Callable[[PreTrainedModel, PreTrainedTokenizerBase, pd.DataFrame, Task, int], list[Answers]]
    """What a model answers to test rows, as `score` takes it; a version that is served answers the same."""
    trivial: Callable[[pd.DataFrame, pd.DataFrame, Task, PreTrainedTokenizerBase], pd.DataFrame]
    """Training rows and test rows → what each test row contributes to the score of the trivial baseline."""


def check_offsets(tokenizer: PreTrainedTokenizerBase, task: Task) -> None:
    """
    Raises:
        StageError: the tokenizer does not say which characters of a text its tokens cover.
    """
    if not tokenizer.is_fast:
        raise StageError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in a text, which {task.kind} needs: "
            "name a model.base with a fast tokenizer (a tokenizer.json)"
        )


def loss_of_training(kind: TaskKind) -> Loss | None:
    """What `train` takes in place of the model's own loss; None: that one."""
    return None if kind.own_loss else kind.loss


def plain_head(task: Task) -> dict[str, Any]:
    """A head whose shape does not depend on the task."""
    return {}


def scored(task: Task, metrics: dict[MetricName, float], loss: float, rows: pd.DataFrame) -> Scored:
    """A score by all metrics of its kind."""
    return Scored(Score(metric=metrics[task.metric], loss=loss, rows=len(rows), metrics=metrics), rows)


def by_length(data: Dataset) -> np.ndarray:
    """The order of rows of model inputs in which batches hold the least padding."""
    return np.argsort([len(ids) for ids in data["input_ids"]], kind="stable")


def predict(
    model: PreTrainedModel,
    data: Dataset,
    collate: Collate,
    batch_size: int,
    reduce: Callable[[Any, Any], Any] | None = None,
    **generation: Any,
) -> tuple[Any, Any]:
    """Outputs and labels of all rows of `data`, in its order; where rows differ in length both are padded with -100.

    Args:
        reduce: outputs and labels of a batch → what is kept of the outputs.
        generation: arguments of `generate`; where there are some, outputs are the ids `(rows, tokens)` that an
            encoder-decoder writes, behind the one that it starts from.

    Raises:
        StageError: an output is not finite.
    """
    order = by_length(data)
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder,
            predict_with_generate=bool(generation),
            per_device_eval_batch_size=batch_size,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            **devices(),
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)
        family = Seq2SeqTrainer if generation else Trainer
        trainer = family(model, arguments, data_collator=collate, preprocess_logits_for_metrics=reduce)
        result = trainer.predict(data.select(order), ignore_keys=_MORE_OUTPUTS, **generation)
    back = np.argsort(order, kind="stable")
    predictions = _ordered(result.predictions, back)
    for part in predictions if isinstance(predictions, tuple) else (predictions,):
        if not np.isfinite(part).all():
            raise StageError("the model's outputs are not finite: lower the learning rate, or raise keep")
    return predictions, _ordered(result.label_ids, back)


def outputs_of(
    model: PreTrainedModel, data: Dataset, collate: Collate, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """`predict` of a head with one output: its logits, and labels."""
    predictions, labels = predict(model, data, collate, batch_size)
    return predictions[0] if isinstance(predictions, tuple) else predictions, labels


def devices() -> dict[str, Any]:
    """Arguments with which the Trainer runs where the stages do: on CUDA or else the CPU, in several processes too."""
    if torch.cuda.is_available():
        return {}
    return {"use_cpu": True, "ddp_backend": "gloo" if "RANK" in os.environ else None}


def _ordered(values: Any, order: np.ndarray) -> Any:
    if isinstance(values, tuple):
        return tuple(_ordered(part, order) for part in values)
    return np.asarray(values)[order]


def labelled(outputs: ModelOutput, batch: Batch) -> Tensor:
    """The logits `(labelled tokens, classes)` of a head that labels each token."""
    return outputs["logits"][batch["labels"] != IGNORED]
