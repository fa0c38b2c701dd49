"""The base class of tasks with one answer per text, or per pair of texts."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split
from tasks.nlp_tasks._encoding import encode_texts
from tasks.nlp_tasks._prediction import Columns, predict
from tasks.nlp_tasks.nlp_task import Answers, NlpTask, Scored, Tokenizer


class SequenceTask(NlpTask):
    """Task with one answer per text. A subclass computes metrics, loss and answers from the model's outputs.

    In all methods, `outputs` are the model's logits for all examples, `(rows, num_labels)`, and `labels` is the result
    of `targets` as an array.
    """

    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        texts = [frame[column].tolist() for column in ("text", "text_pair") if column in frame]
        inputs = encode_texts(tokenizer, *texts, max_length=self.spec.max_length)
        return {**inputs, "labels": self.targets(frame["label"])} if "label" in frame else inputs

    def targets(self, labels: pd.Series) -> list[object]:
        """Return labels in the form that the model's loss expects."""
        return list(labels.tolist())

    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        outputs = self._outputs(model, tokenizer, frame, batch)
        labels = torch.tensor(self.targets(frame["label"])).numpy()
        loss, predictions = self.mean_loss(outputs, labels), self.prediction_table(outputs, labels)
        return self.scored(self.all_metrics(outputs, labels), loss, predictions)

    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        return self.answers_of(self._outputs(model, tokenizer, frame, batch))

    def _outputs(self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int) -> np.ndarray:
        data = self.columns(frame.drop(columns="label", errors="ignore"), tokenizer, "test")
        return predict(model, data, self.collate(tokenizer, model), batch, lambda outputs, _: (outputs["logits"],))[0]

    @abstractmethod
    def all_metrics(self, outputs: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]: ...

    @abstractmethod
    def mean_loss(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """Return the mean loss over examples. The mean over batches would differ, as the last batch may be smaller."""

    @abstractmethod
    def prediction_table(self, outputs: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
        """Return the data frame for `Scored.predictions`, from which `on_draws` computes the metric."""

    @abstractmethod
    def answers_of(self, outputs: np.ndarray) -> list[Answers]: ...
