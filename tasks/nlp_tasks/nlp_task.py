"""The base class of an NLP task: everything that Eckart knows of one kind of task, in one file for each.

A version in the registry carries this package and answers by the same code that scores: modules here import at their
top only what such a version requires (torch, transformers, pandas and numpy, scikit-learn and scipy by way of mlflow).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
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
from tasks.scoring.metrics_on_draws import OnDraws, mean_of

if TYPE_CHECKING:
    from datasets import Dataset

    from tasks.config.schema import Data, Labels

Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]
"""Examples of a data set → a batch of tensors."""
Columns = Mapping[str, Any]
"""Model inputs, unpadded: name → the value of each example."""
Answers = Mapping[str, Any]
"""Column → what a model answers there to one example."""
STRING, NUMBER = {"type": "string"}, {"type": "double"}
STRINGS, NUMBERS = ({"type": "array", "items": item} for item in (STRING, NUMBER))
"""Types of a served version's columns, as MLflow's signatures write them."""


@dataclass(frozen=True)
class Scored:
    """How good a model is on some examples, and what each of them contributed."""

    score: Score
    rows: pd.DataFrame
    """A line for each example, in their order: `NlpTask.on_draws` computes every metric from it."""


@dataclass(frozen=True)
class CellRule:
    """How the cells of a column of data/splits must be.

    Attributes:
        dtype: the column's type, as pandera takes it.
        checks: name → test of one cell.
    """

    dtype: Any = str
    checks: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)


FILLED_TEXT = CellRule(str, {"is not empty": lambda cell: len(cell) > 0})


class NlpTask(ABC):
    """One kind of task, from data.task in params.yaml to what a served version answers.

    The class attributes say what can be said without data; an instance knows the labels and lengths of a study.
    """

    # What params.yaml may say.
    metrics: ClassVar[tuple[MetricName, ...]]
    """The metrics that the task is scored by; the first one is what `eckart init` writes."""
    own_metrics: ClassVar[Mapping[MetricName, Metric]] = {}
    """Those of them that tasks/artifacts/metrics.py does not list."""
    mean_metrics: ClassVar[tuple[MetricName, ...]] = ()
    """Those of them that are means over examples."""
    text_pair: ClassVar[Literal["optional", "required", "refused"]] = "optional"
    """Whether data.columns.text_pair may, must or must not be named."""
    has_labels: ClassVar[bool] = True
    """Whether it learns from data.columns.label; otherwise from the text alone."""
    options: ClassVar[tuple[str, ...]] = ()
    """The keys of data that this task reads and others do not."""
    required_options: ClassVar[Mapping[str, str]] = {}
    """Those of them that may not be null, each with what to write."""
    calibration_labels: ClassVar[tuple[Labels, ...]] = ("given",)
    """What importance.labels may be. `drawn` needs as many predictions for each example, and `expected` one."""
    zero_shot: ClassVar[bool] = False
    """Whether evaluate.zero_shot may name tasks of lm-evaluation-harness."""
    one_graph: ClassVar[bool] = True
    """Whether the model is one ONNX graph, so that export.recipes may name recipes."""

    # What the data are.
    running_text: ClassVar[bool] = False
    """Whether the rows are lines of one text, which is cut into blocks, and not independent examples."""
    split_by: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    """The columns that decide which split an example goes into: rows that are equal there stay together."""
    text_is_words: ClassVar[bool] = False
    """Whether data.columns.text has a list of words for each example."""
    text_columns: ClassVar[tuple[str, ...]] = ("text", "text_pair")
    """The columns that must be strings."""
    may_be_empty: ClassVar[tuple[str, ...]] = ()
    """The columns whose cells may be empty."""
    labels_are_numbers: ClassVar[bool] = False

    # The model.
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    """The transformers class whose `from_pretrained` gives a model with the head."""
    head_class: ClassVar[str]
    """How the name of a model's own class with this head ends."""
    outputs_are_labels: ClassVar[bool] = False
    """Whether each output of the head stands for a label, so that a head may fit or not."""
    problem_type: ClassVar[str | None] = None
    """What config.json calls the head's loss, where a sequence classifier may have several."""
    own_loss: ClassVar[bool] = True
    """Whether the mean of `loss` is what the model itself returns; if not, training takes that mean instead."""

    # What reports and a served version say.
    pipeline: ClassVar[str] = "text-classification"
    """What the Hugging Face hub calls the task."""
    trivial_answer: ClassVar[str]
    """What the trivial baseline answers, as it stands in a sentence."""
    perfect_is_far: ClassVar[bool] = False
    """Whether even good models are far from a perfect score, so that the distance to it says nothing."""
    answer_columns: ClassVar[Mapping[str, Mapping[str, Any]]]
    """The columns of a served version's answers, each with its type."""

    def __init__(self, spec: Task) -> None:
        self.spec = spec

    def __init_subclass__(cls) -> None:
        if "auto_class" in cls.__dict__ and "head_class" not in cls.__dict__:
            cls.head_class = cls.auto_class.removeprefix("AutoModel")

    @property
    def auto(self) -> Any:
        """The transformers class that loads a model of this task."""
        return getattr(transformers, self.auto_class)

    # From rows to data/splits.

    @classmethod
    def looks_like(cls, texts: pd.Series, labels: pd.Series | None) -> bool:
        """Whether `eckart init` takes these columns for this task. At most one task may say so."""
        return False

    @classmethod
    def prepare(cls, frame: pd.DataFrame, names: Mapping[str, str], source: str) -> pd.DataFrame:
        """Return rows with columns text, text_pair and label as the stage extract writes them, labels unconverted.

        Args:
            names: column → what data.columns calls it.

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
            StageError: labels from which nothing can be learned.
        """
        return ()

    @abstractmethod
    def cell_rules(self, label_range: tuple[float, float] | None) -> dict[str, CellRule]:
        """Return column → how its cells must be, for the stage check; text_pair, where there is one, is a text."""

    def row_checks(self) -> Mapping[str, Callable[[pd.DataFrame], pd.Series]]:
        """Return name → test of whole rows, true where they are good."""
        return {}

    # The model.

    def head(self) -> dict[str, Any]:
        """Return the head's shape as arguments of `from_pretrained`."""
        return {}

    @abstractmethod
    def columns(self, frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase, split: Split) -> Columns:
        """Return a split as model inputs; with labels where `frame` has them."""

    def encode(self, frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase, split: Split) -> Dataset:
        """Return `columns` as a data set, from which a model trains."""
        from datasets import Dataset  # a served version does without

        return Dataset.from_dict(dict(self.columns(frame, tokenizer, split)))

    def collate(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Collate:
        """Return what pads examples to a batch."""
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
        """What training minimises the mean of; None: the model's own loss."""
        return None if self.own_loss else self.loss

    def calibration_loss(self, labels: Labels) -> Loss:
        """Return the loss whose gradients the calibration statistics are of."""
        drawn = drawn_loss(self.predictions, self.spec.seed)
        return {"given": self.loss, "expected": expected_losses, "drawn": drawn}[labels]

    def objective(self, labels: Labels = "given") -> Objective:
        """Return what methods are told of the task; `labels` are those of the statistics that a method gathers."""
        return Objective(
            loss=self.loss,
            calibration_loss=self.calibration_loss(labels),
            training_loss=self.training_loss,
            predictions=self.predictions,
            classes=not self.labels_are_numbers,
        )

    # Scores and answers.

    @abstractmethod
    def score(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, frame: pd.DataFrame, batch: int, split: Split
    ) -> Scored:
        """Score a model on all rows of a split, `batch` at a time."""

    @abstractmethod
    def answers(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        frame: pd.DataFrame,
        batch: int,
        continuation: int = 0,
    ) -> list[Answers]:
        """Return what a model answers to each row, with the columns of `answer_columns`; no label is read.

        Args:
            continuation: tokens that a language model writes after a text.
        """

    def check_room(self, model: PreTrainedModel, continuation: int) -> None:  # noqa: B027
        """
        Raises:
            ValueError: a served version of the model has no room for what it is to write.
        """

    @abstractmethod
    def trivial(self, train: pd.DataFrame, frame: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
        """Return what each row of `frame` contributes to the score of the trivial baseline, learned from `train`."""

    def only_answer(self, rows: pd.DataFrame) -> str | None:
        """Return what a model answers to all rows of `Scored.rows`; None where answers differ, or are texts."""
        return None

    def on_draws(self, rows: pd.DataFrame) -> OnDraws:
        """Return the study's metric on bootstrap draws of `Scored.rows`; here the mean of its column."""
        return mean_of(rows[self.spec.metric])

    def scored(self, metrics: dict[MetricName, float], loss: float, rows: pd.DataFrame) -> Scored:
        return Scored(Score(metric=metrics[self.spec.metric], loss=loss, rows=len(rows), metrics=metrics), rows)

    def check_offsets(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """
        Raises:
            StageError: the tokenizer does not say which characters of a text its tokens cover.
        """
        if not tokenizer.is_fast:
            raise StageError(
                f"{type(tokenizer).__name__} does not say where its tokens stand in a text, which {self.spec.kind} "
                "needs: name a model.base with a fast tokenizer (a tokenizer.json)"
            )


def by_length(data: Mapping[str, Any] | Dataset) -> np.ndarray:
    """Return the order of examples in which batches hold the least padding."""
    return np.argsort([len(ids) for ids in data["input_ids"]], kind="stable")


@torch.no_grad()
def predict(
    model: PreTrainedModel,
    data: Columns,
    collate: Collate,
    batch_size: int,
    read: Callable[[Any, Batch], tuple[Tensor, ...]],
    **generation: Any,
) -> tuple[np.ndarray, ...]:
    """Run a model over all examples of `data`, those of similar length together.

    Args:
        read: outputs and labels of a batch → what is kept of them, `(batch, …)` each.
        generation: arguments of `generate`; with them, `outputs` are the ids `(batch, tokens)` that an encoder-decoder
            writes, the one that it starts from first.

    Returns:
        What `read` gives, of all examples in their order; where batches differ in length the rest is -100.

    Raises:
        StageError: an output is not finite.
    """
    order, device = by_length(data), place(model.eval())
    known = inspect.signature(model.forward).parameters
    parts: list[tuple[np.ndarray, ...]] = []
    for start in range(0, len(order), batch_size):
        batch = collate(
            [{name: values[row] for name, values in data.items()} for row in order[start : start + batch_size]]
        )
        batch = {name: values.to(device) for name, values in batch.items()}
        if generation:
            outputs = model.generate(  # type: ignore[operator]
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **generation
            )
        else:
            outputs = model(**{name: values for name, values in batch.items() if name in known and name not in _LABELS})
        parts.append(tuple(_array(values) for values in read(outputs, batch)))
    back = np.argsort(order, kind="stable")
    found = tuple(_joined(values)[back] for values in zip(*parts, strict=True))
    if not all(np.isfinite(values).all() for values in found):
        raise StageError("the model's outputs are not finite: lower the learning rate, or raise keep")
    return found


_LABELS = ("labels", "start_positions", "end_positions")


def place(model: PreTrainedModel) -> str:
    """Bring the model to the GPU, where there is one and no device map placed it; return where its inputs belong."""
    if torch.cuda.is_available() and getattr(model, "hf_device_map", None) is None:
        model.to("cuda")  # type: ignore[arg-type]
    return "cpu" if model.device.type == "meta" else str(model.device)


def _array(values: Tensor) -> np.ndarray:
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate batches, padded with -100 to the longest."""
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    rest = [(0, 0)] * (parts[0].ndim - 2)
    return np.concatenate(
        [np.pad(part, [(0, 0), (0, width - part.shape[1]), *rest], constant_values=IGNORED) for part in parts]
    )


def read_logits(outputs: ModelOutput, batch: Batch) -> tuple[Tensor, ...]:
    return (outputs["logits"],)


def labelled(outputs: ModelOutput, batch: Batch) -> Tensor:
    """Return the logits `(labelled tokens, classes)` of a head that labels each token."""
    return outputs["logits"][batch["labels"] != IGNORED]
