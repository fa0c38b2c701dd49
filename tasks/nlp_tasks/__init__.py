"""The registry of NLP tasks: a task's name in params.yaml is the name of its module.

`data.task: token_classification` is the class TokenClassification in `tasks/nlp_tasks/token_classification.py`; a file
put beside it is one more task. A module is imported only when its task is asked for, so a stage runs the code of its
own task alone: the module `tasks.nlp_tasks.<data.task>` and what that imports. Names are known without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tasks.artifacts.task_spec import Task
    from tasks.nlp_tasks.nlp_task import NlpTask

TASK_NAMES: tuple[str, ...] = tuple(
    sorted({file.stem for file in Path(__file__).parent.glob("[!_]*.py")} - {"nlp_task"})  # the base class
)
"""All that data.task may be."""

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[TASK_NAMES]


def task_class(name: TaskName) -> type[NlpTask]:
    """Return the class of a task, importing its module."""
    task: type[NlpTask] = getattr(import_module(f"tasks.nlp_tasks.{name}"), name.title().replace("_", ""))
    return task


def kind_of(task: Task) -> NlpTask:
    """Return the task of a study, with the labels and lengths that the stage extract wrote down."""
    return task_class(task.kind)(task)
