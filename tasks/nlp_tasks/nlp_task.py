"""The base class of NLP tasks. A subclass, in a file of its own, holds all that Eckart knows about one kind of task.

A model version in the MLflow registry contains this package and answers with the same code that computes scores. The
top-level imports of these modules are therefore limited to the packages that such a version requires: torch,
transformers, pandas, numpy, and (through mlflow) scikit-learn and scipy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pandas as pd
import transformers
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from eckart.calibration.losses import (
    DrawnLoss,
    Loss,
    Objective,
    expected_losses,
    mean_loss_times_batch,
    predictions_of,
)
from eckart.calibration.predictions import Predictions
from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import Metric, MetricName
from tasks.artifacts.results_schema import Score
from tasks.artifacts.task_spec import Split, Task
from tasks.nlp_tasks._prediction import Collate, Columns
from tasks.scoring.metrics_on_draws import OnDraws, mean_of

if TYPE_CHECKING:
    from datasets import Dataset

    from tasks.config.schema import Data, Labels

Tokenizer = PreTrainedTokenizerBase
Answers = Mapping[str, Any]
"""The model's answer to one example: column of `answer_columns` → value."""
STRING, NUMBER = {"type": "string"}, {"type": "double"}
STRINGS, NUMBERS = ({"type": "array", "items": item} for item in (STRING, NUMBER))
"""Types of columns in the answers of a served model version, in the format of MLflow signatures."""


@dataclass(frozen=True)
class Scored:
    """Score of a model on some examples, with per-example results."""

    score: Score
    predictions: pd.DataFrame
    """One row for each example, in order; `NlpTask.on_draws` computes the metric from these rows."""


class NlpTask(ABC):
    """Base class of a kind of task: how its data are prepared, its model is loaded and scored, and how it answers.

    A subclass must define `metrics`, `trivial_answer` and `answer_columns`, and the methods `columns`, `score`,
    `answers` and `trivial`. The rest has defaults. For tasks with one answer per text, subclass `SequenceTask`.

    Class attributes do not depend on data. An instance also has the labels and lengths of the study, in `spec`.
    """

    # A subclass must define these.

    metrics: ClassVar[tuple[MetricName, ...]]
    """The metrics that data.metric may name; `eckart init` writes the first."""
    trivial_answer: ClassVar[str]
    """The answer of the trivial baseline in words, such as "the most frequent class of the training examples"."""
    answer_columns: ClassVar[Mapping[str, Mapping[str, Any]]]
    """Columns of the answers of a served model version: name → type."""

    @abstractmethod
    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return the tokenized rows of a split as model inputs, with labels if `frame` has labels."""

    @abstractmethod
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model on all rows of a split, in batches of `batch` examples."""

    @abstractmethod
    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        """Return the model's answer to each row, with the columns of `answer_columns`. Labels are ignored.

        Args:
            continuation: number of tokens that a language model generates after each text.
        """

    @abstractmethod
    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Fit the trivial baseline to `train`. Return its results on `frame`, as in `Scored.predictions`."""

    # Data: by default text and text_pair are strings, and labels are not converted.

    running_text: ClassVar[bool] = False
    """Whether the rows are parts of one text without labels, which is cut into blocks (for language models)."""
    text_pair: ClassVar[Literal["optional", "required", "refused"]] = "optional"
    """Whether data.columns.text_pair may be set, must be set, or must not be set."""
    label: ClassVar[Literal["optional", "required", "refused"]] = "required"
    """Whether data.columns.label may be set, must be set, or must not be set."""
    text_is_words: ClassVar[bool] = False
    """Whether the column data.columns.text holds a list of words for each example."""
    text_columns: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    """Columns that must hold strings."""
    may_be_empty: ClassVar[tuple[str, ...]] = ()
    """Columns that may have empty cells."""
    split_by: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    """Columns that are hashed to choose the split of a row: rows with equal cells there go into the same split."""
    options: ClassVar[tuple[str, ...]] = ()
    """Keys of the section data that only this task reads."""
    required_options: ClassVar[Mapping[str, str]] = {}
    """Those of `options` that must not be null: key → its meaning, for the error message."""

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether `eckart init` chooses this task for data with these columns. At most one task may return True."""
        return False

    @classmethod
    def prepare(cls, frame: pd.DataFrame, names: Mapping[str, str], source: str) -> pd.DataFrame:
        """Check and clean the columns text, text_pair and label. Labels are converted later, in `convert_labels`.

        Args:
            names: column → its name in the source, from data.columns; for error messages.
            source: name of the data set, for error messages.

        Raises:
            StageError: a cell is empty, or a text is not a string.
        """
        filled = frame.drop(columns=[name for name in cls.may_be_empty if name in frame])
        if holes := (filled.isna() | filled.isin([""])).any(axis=1).sum():
            columns = " or ".join(names[str(name)] for name in filled)
            raise StageError(f"{source} has {holes} examples with an empty {columns}: remove them")
        for name in cls.text_columns:
            if name in frame and not pd.api.types.is_string_dtype(frame[name]):
                raise StageError(f"column {names[name]} of {source} is not text: data.columns must name strings")
        return frame

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        """Convert the labels of each split in place, for example to class ids. Return the class names, () if none.

        Raises:
            StageError: the labels do not fit the task.
        """
        return ()

    # Model: by default a sequence classifier that computes its own loss.

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """The transformers auto class that loads a model with the head of this task."""
    head_class: ClassVar[str] = "ForSequenceClassification"
    """Suffix of the names of model classes with this head; by default the suffix of `auto_class`."""
    problem_type: ClassVar[str | None] = None
    """The problem_type in config.json, which selects the loss; None if labels are neither classes nor numbers."""
    numeric_labels: ClassVar[bool] = False
    """Whether labels are numbers, and not classes."""
    from_original: ClassVar[bool] = False
    """Whether the labels are the original model's answers, so that teacher.epochs must be 0; see `with_originals`."""
    own_loss: ClassVar[bool] = True
    """Whether the loss that the model returns is the mean of `loss` over examples. If not, training computes it."""
    one_graph: ClassVar[bool] = True
    """Whether the model can be exported as a single ONNX graph. If not, export.recipes must be empty."""
    calibration_labels: ClassVar[tuple[Labels, ...]] = ("given",)
    """Allowed values of importance.labels.

    `drawn` requires that all examples have the same number of predictions, and `expected` that each has exactly one.
    """

    def __init__(self, spec: Task) -> None:
        self.spec = spec

    def __init_subclass__(cls) -> None:
        if "auto_class" in cls.__dict__ and "head_class" not in cls.__dict__:
            cls.head_class = cls.auto_class.removeprefix("AutoModel")

    @classmethod
    def meaning(cls, labels: Sequence[object]) -> str:
        """Return in words what a head with these labels answers."""
        return ", ".join(map(str, labels))

    @property
    def auto(self) -> Any:
        """The transformers auto class named by `auto_class`."""
        return getattr(transformers, self.auto_class)

    @property
    def loader(self) -> str:
        """The class or class method of `library` that loads a model from its folder."""
        return f"{self.auto_class}.from_pretrained"

    def head(self) -> dict[str, Any]:
        """Return the arguments of `from_pretrained` that set the head's size and labels."""
        if self.problem_type is None:
            return {}
        names = dict(enumerate(self.spec.labels))
        ids = {name: label for label, name in names.items()}
        return {"problem_type": self.problem_type, "num_labels": len(names), "id2label": names, "label2id": ids}

    def encode(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Dataset:
        """Return the result of `columns` as a `datasets.Dataset`, for training."""
        from datasets import Dataset  # not required by a served version

        return Dataset.from_dict(dict(self.columns(frame, tokenizer, split)))

    def with_originals(self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame) -> pd.DataFrame:
        """Return `frame` with the answers of the original model as a column, which `columns` and `score` then read."""
        raise NotImplementedError  # only a task with `from_original` has them

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        """Return the function that makes a padded batch of tensors from a list of examples."""
        return DataCollatorWithPadding(tokenizer)

    @property
    def loss(self) -> Loss:
        """The loss for the labels of the data, summed over the examples of a batch."""
        return mean_loss_times_batch

    @property
    def predictions(self) -> Predictions:
        """Function that returns the logits that distillation compares; logits at padding are left out.

        It follows from `loss`. So a class whose `loss` reads `predictions` must override it.
        """
        return predictions_of(self.loss, self.problem_type)

    @property
    def training_loss(self) -> Loss | None:
        """The loss whose mean over examples training minimizes; None to minimize the loss that the model returns."""
        return None if self.own_loss else self.loss

    def objective(self, labels: Labels = "given") -> Objective:
        """Return the losses and predictions that compression methods use.

        Args:
            labels: labels for the gradients in calibration statistics: those of the data (`given`), labels drawn from
                the model's predictions (`drawn`), or the expectation over all labels (`expected`).
        """
        drawn: Loss = DrawnLoss(self.predictions, self.spec.seed, classes=not self.numeric_labels)
        return Objective(
            loss=self.loss,
            calibration_loss={"given": self.loss, "expected": expected_losses, "drawn": drawn}[labels],
            training_loss=self.training_loss,
            predictions=self.predictions,
            classes=not self.numeric_labels,
            dropout=not self.from_original,  # the original answers without, so dropout would only add noise
        )

    # Scores and answers: by default the metric is the mean of the column of `Scored.predictions` with the same name.

    own_metrics: ClassVar[Mapping[MetricName, Metric]] = {}
    """Definitions of those `metrics` that tasks/artifacts/metrics.py does not define."""
    perfect_is_far: ClassVar[bool] = False
    """Whether even good models are far from a perfect score, so that a low score alone causes no warning."""
    answers_pairs: ClassVar[bool] = True
    """Whether a served version answers a pair of texts, if the data have pairs; otherwise it answers a text."""
    answers_may_differ: ClassVar[bool] = False
    """Whether rounding may change an answer altogether: it may decide between two equally likely tokens of a text."""
    library: ClassVar[str] = "transformers"
    """The library's name on the Hugging Face hub (library_name)."""
    pipeline: ClassVar[str] = "text-classification"
    """The task's name on the Hugging Face hub (pipeline_tag)."""

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        """Return a function that computes the study's metric on bootstrap draws of `rows`, of `Scored.predictions`."""
        return mean_of(rows[self.spec.metric])

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        """Return the model's answer if it is the same in all `rows` of a `Scored`; None if they differ or are texts."""
        return None

    def check_room(self, model: PreTrainedModel, continuation: int) -> None:  # noqa: B027
        """Check that the model has enough positions to generate `continuation` tokens when it is served.

        Raises:
            ValueError: it has too few positions.
        """

    # Helpers for subclasses.

    def scored(self, metrics: dict[MetricName, float], loss: float, predictions: pd.DataFrame) -> Scored:
        score = Score(metric=metrics[self.spec.metric], loss=loss, examples=len(predictions), metrics=metrics)
        return Scored(score, predictions)

    def check_offsets(self, tokenizer: Tokenizer) -> None:
        """Check that the tokenizer can return the character offsets of its tokens.

        Raises:
            StageError: it is not a fast tokenizer.
        """
        if not tokenizer.is_fast:
            raise StageError(
                f"{type(tokenizer).__name__} does not give the positions of its tokens in a text, which "
                f"{self.spec.kind} needs: choose a model.base with a fast tokenizer (a tokenizer.json)"
            )
