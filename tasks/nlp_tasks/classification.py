"""Classification: the class of each text, or of each pair of texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch.nn.functional import cross_entropy

from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split
from tasks.data.label_encoding import class_ids, few_values
from tasks.nlp_tasks._sequence_task import SequenceTask
from tasks.nlp_tasks.nlp_task import NUMBER, STRING, Answers, Tokenizer
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws

if TYPE_CHECKING:
    from tasks.config.schema import Data


class Classification(SequenceTask):
    metrics: ClassVar = ("accuracy", "f1", "matthews")
    calibration_labels: ClassVar = ("given", "expected", "drawn")
    problem_type: ClassVar = "single_label_classification"
    trivial_answer: ClassVar = "the most frequent class of the training examples"
    answer_columns: ClassVar = {"label": STRING, "score": NUMBER}

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether labels look like classes: a few whole numbers, or strings that repeat, but no sets of labels."""
        return labels is not None and few_values(labels) and not has_sets(labels)

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        ids = class_ids({name: frame["label"] for name, frame in splits.items()}, params)
        for frame in splits.values():
            frame["label"] = [ids[label] for label in frame["label"]]  # Series.map does not find True among 0 and 1
        return tuple(map(str, ids))

    def mean_loss(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        return float(cross_entropy(torch.from_numpy(outputs).double(), torch.from_numpy(labels)))

    def all_metrics(self, outputs: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]:
        """Return all metrics. With two classes, F1 is that of the second class; with more, the mean over classes."""
        guesses = outputs.argmax(-1)
        return {
            "accuracy": float(accuracy_score(labels, guesses)),
            "f1": float(f1_score(labels, guesses, average="binary" if len(self.spec.labels) == 2 else "macro")),
            "matthews": float(matthews_corrcoef(labels, guesses)),
        }

    def prediction_table(self, outputs: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
        return pd.DataFrame({"label": labels, "guess": outputs.argmax(-1)})

    def answers_of(self, outputs: np.ndarray) -> list[Answers]:
        """Return for each row the most likely class and its probability."""
        scores, labels = torch.from_numpy(outputs).double().softmax(-1).max(-1)
        pairs = zip(labels.tolist(), scores.tolist(), strict=True)
        return [{"label": self.spec.labels[label], "score": score} for label, score in pairs]

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Predict the most frequent class of the training examples for every example."""
        return pd.DataFrame({"label": frame["label"], "guess": int(train["label"].mode()[0])})

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        return self.spec.labels[rows["guess"].iloc[0]] if rows["guess"].nunique() == 1 else None

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        counts = on_draws.class_counts(rows, len(self.spec.labels))
        if self.spec.metric == "f1" and len(self.spec.labels) == 2:
            return on_draws.of_classes(counts, lambda *sums: on_draws.f1(*sums)[:, 1])
        metrics = {"accuracy": on_draws.accuracy, "f1": on_draws.macro_f1, "matthews": on_draws.matthews}
        return on_draws.of_classes(counts, metrics[self.spec.metric])


def has_sets(labels: pd.Series) -> bool:
    """Whether any cell holds a set of labels: a list, or a string with labels separated by |."""
    return bool(
        labels.map(lambda cell: pd.api.types.is_list_like(cell) or (isinstance(cell, str) and "|" in cell)).any()
    )
