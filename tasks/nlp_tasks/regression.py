"""Regression: a number for each text, or for each pair of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from scipy.stats import pearsonr, spearmanr
from torch.nn.functional import mse_loss

from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split
from tasks.data.label_encoding import few_values, is_numeric
from tasks.nlp_tasks._sequence_task import SequenceTask
from tasks.nlp_tasks.nlp_task import NUMBER, Answers, Tokenizer
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws

if TYPE_CHECKING:
    from tasks.config.schema import Data

_ROUNDING = 0.01
"""Largest rounding error of a label in float32, as a share of the labels' range (choice)."""

_NOISE = 32 * np.finfo(np.float32).eps
"""Largest relative difference of answers that counts as rounding."""


class Regression(SequenceTask):
    metrics: ClassVar = ("pearson", "spearman")
    problem_type: ClassVar = "regression"
    numeric_labels: ClassVar = True
    trivial_answer: ClassVar = "the mean of the training labels"
    answer_columns: ClassVar = {"value": NUMBER}

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        return labels is not None and is_numeric(labels) and not few_values(labels)

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        column = f"column {params.columns.label}"
        given = pd.concat([frame["label"] for frame in splits.values()], ignore_index=True)
        for frame in splits.values():
            try:
                frame["label"] = frame["label"].astype("float32")
            except (TypeError, ValueError) as error:
                raise StageError(
                    f"{column} is not numeric ({error}): correct it, or set data.task to classification"
                ) from error
            if not np.isfinite(frame["label"]).all():
                raise StageError(f"{column} has labels that are not finite: remove those examples")
        numbers = given.astype("float64")
        if (numbers - numbers.astype("float32")).abs().max() > _ROUNDING * (numbers.max() - numbers.min()) > 0:
            raise StageError(
                f"float32 rounds away the differences between numbers in {column}: subtract their mean, or scale them"
            )
        for split, frame in splits.items():
            if split != "calibration" and frame["label"].nunique() < 2:  # on the hub, -1 marks rows without a label
                raise StageError(
                    f"{column} is {frame['label'].iloc[0]:g} in all rows of the {split} split, from which no model can "
                    "be told from another: name another split in data.splits, or null, or give it more rows"
                )
        return ()

    @classmethod
    def meaning(cls, labels: Sequence[object]) -> str:
        return "a number"

    def head(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": self.problem_type}

    def mean_loss(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        return float(mse_loss(torch.from_numpy(outputs).double().squeeze(-1), torch.from_numpy(labels).double()))

    def all_metrics(self, outputs: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]:
        values = _values(outputs)
        return {"pearson": correlation(pearsonr, labels, values), "spearman": correlation(spearmanr, labels, values)}

    def prediction_table(self, outputs: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
        return pd.DataFrame({"label": labels, "value": _values(outputs)})

    def answers_of(self, outputs: np.ndarray) -> list[Answers]:
        return [{"value": value} for value in outputs.squeeze(-1).tolist()]

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Predict the mean of the training labels for every row."""
        return pd.DataFrame({"label": frame["label"], "value": float(train["label"].mean())})

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        return f"{rows['value'].iloc[0]:.3g}" if np.ptp(rows["value"]) == 0 else None

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        return {"pearson": on_draws.pearson, "spearman": on_draws.spearman}[self.spec.metric](rows)


def _values(outputs: np.ndarray) -> np.ndarray:
    """Return the values `(rows,)`, all equal if they differ by rounding only: their correlation would be noise."""
    values = outputs.squeeze(-1)
    same = len(values) and np.ptp(values) <= _NOISE * np.abs(values).max()
    return np.full_like(values, values[0]) if same else values


def correlation(correlate: Any, labels: np.ndarray, values: np.ndarray) -> float:
    """Return a correlation, or 0 if labels or values are constant."""
    if np.ptp(values) == 0 or np.ptp(labels) == 0:
        return 0.0
    return float(correlate(labels.astype(float), values.astype(float)).statistic)
