"""The kinds of task: what each does between rows of text and a score."""

from __future__ import annotations

from collections.abc import Mapping

from eckart.losses import Loss, Objective, drawn_loss, expected_losses
from tasks.dataset import Task
from tasks.kinds.answers import ANSWERS
from tasks.kinds.kind import TaskKind, loss_of_training
from tasks.kinds.language import LANGUAGE
from tasks.kinds.sequence import SEQUENCE
from tasks.kinds.summaries import SUMMARIES
from tasks.kinds.tokens import TOKENS
from tasks.metrics import TaskKindName
from tasks.params import Labels

_KINDS: Mapping[TaskKindName, TaskKind] = {
    "classification": SEQUENCE,
    "regression": SEQUENCE,
    "token_classification": TOKENS,
    "question_answering": ANSWERS,
    "summarization": SUMMARIES,
    "language_modeling": LANGUAGE,
}


def kind_of(task: Task) -> TaskKind:
    return _KINDS[task.kind]


def evidence_loss(task: Task, labels: Labels) -> Loss:
    """The loss whose gradient is the evidence. tasks/check_params.py lists the labels that each kind allows."""
    kind = kind_of(task)
    return {"given": kind.loss, "expected": expected_losses, "drawn": drawn_loss(kind.logits, task.seed)}[labels]


def objective_of(task: Task, labels: Labels = "given") -> Objective:
    """What methods are told of it.

    Args:
        labels: of the evidence that a method gathers.
    """
    kind = kind_of(task)
    return Objective(
        loss=kind.loss,
        evidence_loss=evidence_loss(task, labels),
        training_loss=loss_of_training(kind),
        predictions=kind.logits,
        classes=task.kind != "regression",
    )
