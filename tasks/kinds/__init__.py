"""The kinds of task: what each does between rows of text and a score."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.dataset import Task
from tasks.kinds.answers import ANSWERS
from tasks.kinds.kind import TaskKind
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
