"""How good a model is on a split: its task metric and its loss."""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch.nn.functional import cross_entropy, mse_loss
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from tasks.dataset import Task
from tasks.records import Score
from tasks.stage import StageError


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Dataset, task: Task, batch_size: int
) -> Score:
    """Score `model` on all rows of `data`.

    Raises:
        StageError: an output is not finite.
    """
    by_length = np.argsort([len(ids) for ids in data["input_ids"]], kind="stable")  # little padding
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_eval_batch_size=batch_size,
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, data_collator=DataCollatorWithPadding(tokenizer))
        result = trainer.predict(data.select(by_length))
    outputs = np.asarray(result.predictions[0] if isinstance(result.predictions, tuple) else result.predictions)
    if not np.isfinite(outputs).all():
        raise StageError("the model's outputs are not finite: lower the learning rate, or raise keep")
    labels = np.asarray(result.label_ids)
    return Score(metric=metric(task, outputs, labels), loss=loss(task, outputs, labels), rows=len(data))


def loss(task: Task, outputs: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross-entropy or squared error. (The Trainer's own is a mean of batch means, with uneven batches.)"""
    predicted, wanted = torch.from_numpy(outputs).double(), torch.from_numpy(labels)
    if task.kind == "classification":
        return float(cross_entropy(predicted, wanted))
    return float(mse_loss(predicted.squeeze(-1), wanted.double()))


def metric(task: Task, outputs: np.ndarray, labels: np.ndarray) -> float:
    """The task's metric of `outputs` `(rows, classes)` or `(rows, 1)` against `labels` `(rows,)`.

    A correlation with a constant is 0 by definition here: such outputs tell nothing.
    """
    predictions = outputs.argmax(-1) if task.kind == "classification" else outputs.squeeze(-1)
    match task.metric:
        case "accuracy":
            return float(accuracy_score(labels, predictions))
        case "f1":
            return float(f1_score(labels, predictions, average="binary" if len(task.labels) == 2 else "macro"))
        case "matthews":
            return float(matthews_corrcoef(labels, predictions))
        case "pearson" | "spearman":
            if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
                return 0.0
            correlate = pearsonr if task.metric == "pearson" else spearmanr
            return float(correlate(labels, predictions).statistic)
