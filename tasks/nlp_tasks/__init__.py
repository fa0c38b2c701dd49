"""The registry of NLP tasks. The name of a task in params.yaml is the name of its module in this folder.

`data.task: token_classification` selects the class TokenClassification in `tasks/nlp_tasks/token_classification.py`. To
add a task, add such a file. A task's module is imported only when that task is used, so a stage depends on the code of
its own task only. The names are read from the file names, without importing torch.
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
"""The values that data.task may have."""

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[TASK_NAMES]


def task_class(name: TaskName) -> type[NlpTask]:
    """Import the module of a task and return its class."""
    task: type[NlpTask] = getattr(import_module(f"tasks.nlp_tasks.{name}"), name.title().replace("_", ""))
    return task


def kind_of(task: Task) -> NlpTask:
    """Return the NLP task of a study, initialized with the labels and lengths that the stage extract saved."""
    return task_class(task.kind)(task)
