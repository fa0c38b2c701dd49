"""The base class of an NLP task: all that Eckart knows of a kind of task is in one subclass, in a file of its own.

A version in the registry carries this package and answers by the same code that scores: modules here import at their
top only what such a version requires (torch, transformers, pandas and numpy, scikit-learn and scipy by way of mlflow).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pandas as pd
import transformers
from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import (
    IGNORED,
    Batch,
    Loss,
    Objective,
    Predictions,
    drawn_loss,
    expected_losses,
    logits_of,
    mean_loss_times_batch,
)
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
"""Column → the model's answer to one example."""
STRING, NUMBER = {"type": "string"}, {"type": "double"}
STRINGS, NUMBERS = ({"type": "array", "items": item} for item in (STRING, NUMBER))
"""Types of a served version's columns, as MLflow's signatures write them."""


@dataclass(frozen=True)
class Scored:
    """A model's score on some examples, and what each of them contributed."""

    score: Score
    rows: pd.DataFrame
    """A line for each example, in their order: `NlpTask.on_draws` computes every metric from it."""


class NlpTask(ABC):
    """One kind of task, from data.task in params.yaml to the answers of a served version.

    A task must give `metrics`, `trivial_answer`, `answer_columns` and the abstract methods `columns`, `score`,
    `answers` and `trivial`. All else has a default. A model that answers once for a text is a `SequenceTask`.

    Class attributes say what can be said without data; an instance also knows the study's labels and lengths (`spec`).
    """

    # What a task must give.

    metrics: ClassVar[tuple[MetricName, ...]]
    """The metrics that the task is scored by; `eckart init` writes the first."""
    trivial_answer: ClassVar[str]
    """What the trivial baseline answers, as it stands in a sentence."""
    answer_columns: ClassVar[Mapping[str, Mapping[str, Any]]]
    """The columns of a served version's answers, each with its type."""

    @abstractmethod
    def columns(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Columns:
        """Return a split as model inputs; with labels where `frame` has them."""

    @abstractmethod
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model on all rows of a split, `batch` at a time."""

    @abstractmethod
    def answers(
        self, model: PreTrainedModel, tokenizer: Tokenizer, frame: pd.DataFrame, batch: int, continuation: int = 0
    ) -> list[Answers]:
        """Return the model's answer to each row, with the columns of `answer_columns`; no label is read.

        Args:
            continuation: tokens that a language model writes after a text.
        """

    @abstractmethod
    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: Tokenizer) -> pd.DataFrame:
        """Return what each row of `frame` contributes to the score of the trivial baseline, learned from `train`."""

    # Data: by default the column label is kept as it is, and text and text_pair are strings.

    running_text: ClassVar[bool] = False
    """Whether the rows are lines of one text without labels, which is cut into blocks: a language model's data."""
    text_pair: ClassVar[Literal["optional", "required", "refused"]] = "optional"
    """Whether data.columns.text_pair may, must or must not be named."""
    text_is_words: ClassVar[bool] = False
    """Whether data.columns.text has a list of words for each example."""
    text_columns: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    """The columns that must be strings."""
    may_be_empty: ClassVar[tuple[str, ...]] = ()
    """The columns whose cells may be empty."""
    split_by: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    """The columns that decide which split an example goes into: rows that are equal there stay together."""
    options: ClassVar[tuple[str, ...]] = ()
    """The keys of data that this task reads and others do not."""
    required_options: ClassVar[Mapping[str, str]] = {}
    """Those of them that may not be null, each with what to write."""

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether `eckart init` takes these columns for this task. At most one task may say so."""
        return False

    @classmethod
    def prepare(cls, frame: pd.DataFrame, names: Mapping[str, str], source: str) -> pd.DataFrame:
        """Return rows with columns text, text_pair and label as the stage extract writes them, labels unconverted.

        Args:
            names: column → its name in data.columns.

        Raises:
            StageError: a cell is empty, or a text is no string.
        """
        filled = frame.drop(columns=[name for name in cls.may_be_empty if name in frame])
        if holes := (filled.isna() | filled.isin([""])).any(axis=1).sum():
            columns = " or ".join(names[str(name)] for name in filled)
            raise StageError(f"{source} has {holes} rows with an empty {columns}: remove them")
        for name in cls.text_columns:
            if name in frame and not pd.api.types.is_string_dtype(frame[name]):
                raise StageError(f"column {names[name]} of {source} is not text: data.columns must name strings")
        return frame

    @classmethod
    def convert_labels(cls, splits: Mapping[Split, pd.DataFrame], params: Data) -> tuple[str, ...]:
        """Turn the column label of each split, in place, into what `columns` reads; return the names of the classes.

        Raises:
            StageError: nothing can be learned from these labels.
        """
        return ()

    # Model: by default a sequence classifier that computes its own loss.

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """The transformers class whose `from_pretrained` gives a model with the head."""
    head_class: ClassVar[str] = "ForSequenceClassification"
    """The end of the name of a model class with this head; by default that of `auto_class`."""
    problem_type: ClassVar[str | None] = None
    """The head's loss as config.json names it, where each output of the head stands for a label or a number."""
    own_loss: ClassVar[bool] = True
    """Whether the model returns the mean of `loss` itself; if not, training computes that mean instead."""
    one_graph: ClassVar[bool] = True
    """Whether the model is one ONNX graph, so that export.recipes may name recipes."""
    calibration_labels: ClassVar[tuple[Labels, ...]] = ("given",)
    """Values of importance.labels. `drawn` needs as many predictions for each example, and `expected` one."""

    def __init__(self, spec: Task) -> None:
        self.spec = spec

    def __init_subclass__(cls) -> None:
        if "auto_class" in cls.__dict__ and "head_class" not in cls.__dict__:
            cls.head_class = cls.auto_class.removeprefix("AutoModel")

    @property
    def auto(self) -> Any:
        """The transformers class that loads a model of this task."""
        return getattr(transformers, self.auto_class)

    def head(self) -> dict[str, Any]:
        """Return the head's shape as arguments of `from_pretrained`: an output for each label, where it has labels."""
        if self.problem_type is None:
            return {}
        names = dict(enumerate(self.spec.labels))
        ids = {name: label for label, name in names.items()}
        return {"problem_type": self.problem_type, "num_labels": len(names), "id2label": names, "label2id": ids}

    def encode(self, frame: pd.DataFrame, tokenizer: Tokenizer, split: Split) -> Dataset:
        """Return `columns` as a data set, from which a model trains."""
        from datasets import Dataset  # a served version does without

        return Dataset.from_dict(dict(self.columns(frame, tokenizer, split)))

    def collate(self, tokenizer: Tokenizer, model: PreTrainedModel) -> Collate:
        """Return the function that pads examples to a batch."""
        return DataCollatorWithPadding(tokenizer)

    @property
    def loss(self) -> Loss:
        """The sum over examples of the loss by the given labels."""
        return mean_loss_times_batch

    @property
    def predictions(self) -> Predictions:
        """The logits that a teacher teaches; padding is no prediction."""
        return logits_of

    @property
    def training_loss(self) -> Loss | None:
        """The loss whose mean training minimises; None: the model's own loss."""
        return None if self.own_loss else self.loss

    def objective(self, labels: Labels = "given") -> Objective:
        """Return the losses and predictions that methods need; gradients of calibration statistics are by `labels`."""
        drawn = drawn_loss(self.predictions, self.spec.seed)
        return Objective(
            loss=self.loss,
            calibration_loss={"given": self.loss, "expected": expected_losses, "drawn": drawn}[labels],
            training_loss=self.training_loss,
            predictions=self.predictions,
            classes=self.problem_type != "regression",
        )

    # Scores and answers: by default the metric is the mean of a column of that name.

    own_metrics: ClassVar[Mapping[MetricName, Metric]] = {}
    """Those of `metrics` that tasks/artifacts/metrics.py does not list."""
    mean_metrics: ClassVar[tuple[MetricName, ...]] = ()
    """Those of `metrics` that are means over examples."""
    perfect_is_far: ClassVar[bool] = False
    """Whether even good models are far from a perfect score, so that the distance to it says nothing."""
    pipeline: ClassVar[str] = "text-classification"
    """The task's name on the Hugging Face hub."""

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        """Return the study's metric on bootstrap draws of `Scored.rows`."""
        return mean_of(rows[self.spec.metric])

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        """Return the model's one answer to all rows of `Scored.rows`; None where answers differ, or are texts."""
        return None

    def check_room(self, model: PreTrainedModel, continuation: int) -> None:  # noqa: B027
        """
        Raises:
            ValueError: a served version of the model has no room for what it is to write.
        """

    # For subclasses.

    def scored(self, metrics: dict[MetricName, float], loss: float, rows: pd.DataFrame) -> Scored:
        return Scored(Score(metric=metrics[self.spec.metric], loss=loss, rows=len(rows), metrics=metrics), rows)

    def check_offsets(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            StageError: the tokenizer does not say which characters of a text its tokens cover.
        """
        if not tokenizer.is_fast:
            raise StageError(
                f"{type(tokenizer).__name__} does not say where its tokens stand in a text, which {self.spec.kind} "
                "needs: name a model.base with a fast tokenizer (a tokenizer.json)"
            )


def labelled(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits `(labelled tokens, classes)` of a head that labels each token."""
    return outputs["logits"][batch["labels"] != IGNORED]
