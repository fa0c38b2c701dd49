"""The kinds of task: what each does between rows of text and a score."""

from __future__ import annotations

from collections.abc import Mapping

from eckart.calibration.losses import Loss, Objective, drawn_loss, expected_losses
from tasks.artifacts.metrics import TaskKindName
from tasks.artifacts.task_spec import Task
from tasks.config.schema import Labels
from tasks.nlp_tasks.language_modeling import LANGUAGE
from tasks.nlp_tasks.nlp_task import TaskKind, loss_of_training
from tasks.nlp_tasks.question_answering import ANSWERS
from tasks.nlp_tasks.sequence_classification import SEQUENCE
from tasks.nlp_tasks.summarization import SUMMARIES
from tasks.nlp_tasks.token_classification import TOKENS

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


def calibration_loss(task: Task, labels: Labels) -> Loss:
    """The loss whose gradient is the statistics. tasks/config/validation.py lists the labels that each kind allows."""
    kind = kind_of(task)
    return {"given": kind.loss, "expected": expected_losses, "drawn": drawn_loss(kind.logits, task.seed)}[labels]


def objective_of(task: Task, labels: Labels = "given") -> Objective:
    """What methods are told of it.

    Args:
        labels: of the statistics that a method gathers.
    """
    kind = kind_of(task)
    return Objective(
        loss=kind.loss,
        calibration_loss=calibration_loss(task, labels),
        training_loss=loss_of_training(kind),
        predictions=kind.logits,
        classes=task.kind != "regression",
    )
