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
    from eckart.calibration.losses import Loss, Objective
    from tasks.artifacts.task_spec import Task
    from tasks.config.schema import Labels
    from tasks.nlp_tasks.nlp_task import NlpTask

_BASE = "nlp_task"  # the module of the base class

TASK_NAMES: tuple[str, ...] = tuple(
    sorted(
        file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_") and file.stem != _BASE
    )
)
"""All that data.task may be."""

if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[TASK_NAMES]


def task_class(name: TaskName) -> type[NlpTask]:
    """Return the class of a task, importing its module."""
    module = import_module(f"tasks.nlp_tasks.{name}")
    found: type[NlpTask] = getattr(module, "".join(part.capitalize() for part in name.split("_")))
    return found


def kind_of(task: Task) -> NlpTask:
    """Return the task of a study, with the labels and lengths that the stage extract wrote down."""
    return task_class(task.kind)(task)


def calibration_loss(task: Task, labels: Labels) -> Loss:
    """Return the loss whose gradients the calibration statistics are of."""
    return kind_of(task).calibration_loss(labels)


def objective_of(task: Task, labels: Labels = "given") -> Objective:
    """Return what methods are told of the task; `labels` are those of the statistics that a method gathers."""
    return kind_of(task).objective(labels)
