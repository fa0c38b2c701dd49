"""The teacher's saved logits: for each prediction, the k most probable classes and the probability of all others.

Plain distillation runs the teacher beside the model: a third to half of a step's time, and its weights in memory. But
its answers are the same for all candidates and steps, so they can be computed once. With a vocabulary of 10⁴ or 10⁵
classes they take little space if only the k largest are kept.

The loss is the KL divergence of distillation over k + 1 classes, the k largest and all others as one, at temperature T:

    T² Σ_i p_i (log p_i − log q_i) + T² P (log P − log Q),    P = 1 − Σ p_i,  Q = 1 − Σ q_i,

with p the teacher's softmax(z′/T) and q the model's softmax(z/T). To join classes never raises a divergence, so this is
at most the full one; at k = classes it is equal. Without the last term, the model would learn to give the k classes all
of the probability.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import PreTrainedModel

from eckart.calibration.predictions import Predictions
from eckart.model.batches import Batch, real_tokens, without_labels

_NEVER = -1e4  # log-probability without mass; finite, so that 0 times it is 0


def largest(logits: Tensor, count: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes with the largest logits, the logs of their probabilities, and that of all others together.

    Args:
        logits: `(predictions, classes)`.
        count: number of classes k; all of them if there are fewer.

    Returns:
        Classes `(predictions, k)`, and logs in float32, `(predictions, k)` and `(predictions,)`.
    """
    logs = log_softmax(logits.float() / temperature, dim=-1)
    top, classes = logs.topk(min(count, logs.shape[-1]), dim=-1)
    return classes, top.clamp(min=_NEVER), _rest(logs, classes)


def top_error(student: Tensor, classes: Tensor, logs: Tensor, rest: Tensor, temperature: float) -> Tensor:
    """Return temperature² · KL(teacher ‖ student) over the classes of the teacher's `largest` and one for the rest.

    It is a mean over predictions. The teacher's probabilities are scaled to a sum of 1, which rounding has changed.

    Args:
        student: logits `(predictions, classes)`.
        classes, logs, rest: of the teacher, as `largest` returns them.

    Raises:
        ValueError: the numbers of predictions differ.
    """
    if len(student) != len(classes):
        raise ValueError(
            f"the model makes {len(student)} predictions and the teacher {len(classes)}: set distillation.top to null"
        )
    scaled = student.float() / temperature
    chosen, remaining = scaled.gather(-1, classes), _rest(scaled, classes)
    of_student = torch.cat([chosen, remaining[:, None]], -1).log_softmax(-1)
    of_teacher = torch.cat([logs.float(), rest.float()[:, None]], -1).log_softmax(-1)
    return temperature**2 * kl_div(of_student, of_teacher, reduction="batchmean", log_target=True)


def _rest(values: Tensor, classes: Tensor) -> Tensor:
    """Return the logarithm of Σ exp(values) over all other classes than `classes`, `(predictions,)`."""
    if classes.shape[-1] == values.shape[-1]:
        return values.new_full(values.shape[:1], _NEVER)
    return values.scatter(-1, classes, -torch.inf).logsumexp(-1).clamp(min=_NEVER)


@dataclass(frozen=True)
class TeacherLogits:
    """The teacher's `largest` for every prediction of some examples, which are known by their tokens.

    Attributes:
        rows: key of an example → its row in the arrays.
        classes: `(examples, predictions, k)`, unsigned integers.
        logs: `(examples, predictions, k)`, float16.
        rest: `(examples, predictions)`, float32.
    """

    rows: Mapping[bytes, int]
    classes: np.ndarray
    logs: np.ndarray
    rest: np.ndarray

    def of(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `largest` of all predictions of a batch, on its device.

        Raises:
            KeyError: an example is not among those that the teacher has seen.
        """
        rows = [self.rows[key] for key in keys(batch)]
        device = batch["input_ids"].device
        classes = torch.from_numpy(self.classes[rows].astype(np.int64)).flatten(0, 1)
        logs = torch.from_numpy(self.logs[rows]).flatten(0, 1)
        return classes.to(device), logs.to(device), torch.from_numpy(self.rest[rows]).flatten().to(device)


def keys(batch: Batch) -> Iterator[bytes]:
    """Yield a digest of the tokens of each example in `batch`, without padding."""
    real = real_tokens(batch, batch["input_ids"])
    for ids, kept in zip(batch["input_ids"].cpu().numpy(), real.cpu().numpy(), strict=True):
        yield hashlib.blake2b(ids[kept].astype(np.int64).tobytes(), digest_size=16).digest()


@torch.no_grad()
def teach(
    teacher: PreTrainedModel, batch: Batch, predictions: Predictions, count: int, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the teacher's `largest` for a batch as arrays of TeacherLogits, with a row for each example.

    Raises:
        ValueError: examples differ in their number of predictions.
    """
    outputs = teacher(**without_labels(batch))
    examples = len(batch["input_ids"])
    classes, logs, rest = largest(predictions(outputs, batch), count, temperature)
    if len(rest) % examples:
        raise ValueError(
            f"{examples} examples have {len(rest)} predictions together, so their numbers differ: set distillation.top "
            "to null"
        )
    small = np.uint16 if outputs["logits"].shape[-1] <= 2**16 else np.uint32
    arrays: Sequence[np.ndarray] = (
        classes.cpu().numpy().astype(small),
        logs.half().cpu().numpy(),
        rest.cpu().numpy(),
    )
    first, second, third = (array.reshape(examples, -1, *array.shape[1:]) for array in arrays)
    return first, second, third
