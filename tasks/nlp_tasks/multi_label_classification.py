"""Multi-label classification: any number of labels for each text, or for each pair of texts.

The head has a logit z for each label. The label's probability is σ(z), and the label is predicted if σ(z) ≥ 1/2. The
loss is the mean over labels of the binary cross-entropy. Calibration statistics and distillation treat each label as a
two-class softmax over the logits (z, 0), which has the same probabilities (`binary_logits`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import accuracy_score, f1_score
from torch.nn.functional import binary_cross_entropy_with_logits

from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.task_spec import Split
from tasks.data.label_encoding import class_ids, has_structures, names_in_source
from tasks.nlp_tasks._sequence_task import SequenceTask
from tasks.nlp_tasks.classification import has_sets
from tasks.nlp_tasks.nlp_task import NUMBERS, STRINGS, Answers, Tokenizer
from tasks.scoring import metrics_on_draws as on_draws
from tasks.scoring.metrics_on_draws import OnDraws

if TYPE_CHECKING:
    from tasks.config.schema import Data

SEPARATOR = "|"
_LIST = re.compile(r"\[.*['\",].*\]", re.DOTALL)  # [C] may be a name
_THRESHOLD = 0.5


class MultiLabelClassification(SequenceTask):
    metrics: ClassVar = ("f1_micro", "f1_macro", "exact_match")
    calibration_labels: ClassVar = ("given", "drawn")  # an expectation would be over 2^labels sets of labels
    may_be_empty: ClassVar = ("label",)
    problem_type: ClassVar = "multi_label_classification"
    trivial_answer: ClassVar = "the most frequent set of labels of the training examples"
    answer_columns: ClassVar = {"labels": STRINGS, "scores": NUMBERS}

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether cells are sets of labels (lists, or strings with |) that repeat, and texts are not lists of words."""
        if (
            labels is None
            or not has_sets(labels)
            or has_structures(labels)
            or texts.map(pd.api.types.is_list_like).any()
        ):
            return False
        return labels.map(_labels_of).explode().nunique() <= len(labels) / 2

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        if wrong := _no_names(pd.concat([frame["label"] for frame in splits.values()], ignore_index=True)):
            raise StageError(
                f"column {params.columns.label} has {wrong}: write the names of each example's labels, "
                'in a list (["a", "b"] in .jsonl or .parquet) or separated by | (a|b)'
            )
        sets = {name: frame["label"].map(_labels_of) for name, frame in splits.items()}
        for name, labels in sets.items():
            if not labels.map(len).any():
                raise StageError(
                    f"no example of the {name} split has a label: name another split in data.splits, or null to take a "
                    "part of train"
                )
        if len(distinct := {frozenset(labels) for labels in sets["train"]}) == 1:
            raise StageError(
                f"all training examples have the same labels, {', '.join(sorted(map(str, *distinct)))}, so there is "
                "nothing to learn; if the column has vectors of 0 and 1, write the names of labels instead"
            )
        names = names_in_source(splits["train"]["label"])
        ids = class_ids({name: labels.explode().dropna() for name, labels in sets.items()}, params, names)
        for name, frame in splits.items():
            frame["label"] = [sorted(ids[label] for label in labels) for labels in sets[name]]
        return tuple(map(str, ids))

    @classmethod
    def meaning(cls, labels: Sequence[object]) -> str:
        return f"any of {super().meaning(labels)}"

    def targets(self, labels: pd.Series) -> list[object]:
        """Return a multi-hot vector per row, `(rows, labels)`: 1.0 for each label that the row has, else 0.0."""
        hot = np.zeros((len(labels), len(self.spec.labels)), np.float32)
        for row, ids in enumerate(labels):
            hot[row, np.asarray(ids, int)] = 1
        return list(hot.tolist())

    def mean_loss(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        predicted, true = (torch.from_numpy(values).double() for values in (outputs, labels))
        return float(binary_cross_entropy_with_logits(predicted, true))

    def all_metrics(self, outputs: np.ndarray, labels: np.ndarray) -> dict[MetricName, float]:
        """Return micro F1 (over all labels of all rows), macro F1 (the mean over labels), and exact match.

        In macro F1, a label that is neither wanted nor predicted has F1 0. Exact match is the share of rows with all
        labels right.
        """
        true, guesses = labels.astype(int), _predicted(outputs)
        return {
            "f1_micro": float(f1_score(true, guesses, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(true, guesses, average="macro", zero_division=0)),
            "exact_match": float(accuracy_score(true, guesses)),
        }

    def prediction_table(self, outputs: np.ndarray, labels: np.ndarray) -> pd.DataFrame:
        return pd.DataFrame({"label": list(labels.astype(int)), "guess": list(_predicted(outputs))})

    def answers_of(self, outputs: np.ndarray) -> list[Answers]:
        """Return for each row the predicted labels and their probabilities."""
        probabilities = torch.from_numpy(outputs).double().sigmoid().numpy()
        return [
            {"labels": [self.spec.labels[label] for label in np.flatnonzero(chosen)], "scores": row[chosen].tolist()}
            for row, chosen in zip(probabilities, _predicted(outputs).astype(bool), strict=True)
        ]

    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Predict for every example the set of labels that is most frequent in train; in a tie, the first of them."""
        most = Counter(tuple(labels) for labels in train["label"]).most_common(1)[0][0]
        true, guess = self.targets(frame["label"]), self.targets(pd.Series([most] * len(frame)))
        return pd.DataFrame({"label": list(np.array(true, int)), "guess": list(np.array(guess, int))})

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        guesses = {tuple(guess) for guess in rows["guess"]}
        if len(guesses) != 1:
            return None
        return ", ".join(self.spec.labels[label] for label in np.flatnonzero(guesses.pop())) or "no label"

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        true, guess = (np.array(rows[name].tolist(), float) for name in ("label", "guess"))
        if self.spec.metric == "exact_match":
            return on_draws.mean_of(pd.Series((true == guess).all(1)))
        counts = np.concatenate([true * guess, guess, true], axis=1)
        if self.spec.metric == "f1_micro":
            return on_draws.of_classes(counts, on_draws.micro_f1)
        return on_draws.of_classes(counts, lambda *sums: on_draws.f1(*sums).mean(1))


def _labels_of(cell: Any) -> list[Any]:
    """Return the distinct labels of a cell, which is a list or a string separated by |; an empty cell has none."""
    if isinstance(cell, str):
        cell = [label.strip() for label in cell.split(SEPARATOR)]
    elif isinstance(cell, float) and cell.is_integer():  # in a column of whole numbers that has empty cells
        cell = int(cell)
    labels: Iterable[Any] = cell if pd.api.types.is_list_like(cell) else [cell]
    return list(dict.fromkeys(label for label in labels if not pd.isna(label) and label != ""))


def _no_names(cells: pd.Series) -> str | None:
    """Return what the cells hold in place of the names of labels; None if they may be names."""
    if has_structures(cells):
        return "mappings or lists of lists"
    filled = cells[cells.map(lambda cell: len(_labels_of(cell)) > 0)]
    texts = filled.map(lambda cell: isinstance(cell, str) and bool(_LIST.fullmatch(cell)))
    if len(filled) and texts.all() and not filled.str.contains(SEPARATOR, regex=False).any():
        return f"lists written as text, such as {filled.iloc[0]}"
    return "vectors of 0 and 1" if _are_vectors(filled) else None


def _are_vectors(cells: pd.Series) -> bool:
    """Whether all cells are lists of one length with only 0 and 1, and one of them repeats a number, as no set does."""
    if not len(cells) or not cells.map(pd.api.types.is_list_like).all():
        return False
    rows = [list(cell) for cell in cells]
    numbers = all(isinstance(value, int | float | np.generic) and value in (0, 1) for row in rows for value in row)
    return numbers and len(set(map(len, rows))) == 1 and any(len(set(row)) < len(row) for row in rows)


def _predicted(outputs: np.ndarray) -> np.ndarray:
    """Return the predicted labels `(rows, labels)`: 1 if the probability is at least the threshold, else 0."""
    return (torch.from_numpy(outputs).double().sigmoid() >= _THRESHOLD).numpy().astype(int)
