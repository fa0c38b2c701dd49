"""The kinds of task: what each does between rows of text and a score."""

from __future__ import annotations

from collections.abc import Mapping

from eckart.losses import Objective
from tasks.dataset import Task
from tasks.kinds.answers import ANSWERS
from tasks.kinds.kind import TaskKind, loss_of_training
from tasks.kinds.language import LANGUAGE
from tasks.kinds.sequence import SEQUENCE
from tasks.kinds.summaries import SUMMARIES
from tasks.kinds.tokens import TOKENS
from tasks.metrics import TaskKindName

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


def objective_of(task: Task) -> Objective:
    """What methods are told of it."""
    kind = kind_of(task)
    return Objective(kind.loss, loss_of_training(kind), kind.logits, classes=task.kind != "regression")
