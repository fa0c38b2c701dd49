"""The options of a run: the number of stages at a time, their time limit, and the place where they run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from tasks.artifacts.errors import EckartError
from tasks.runtime.hardware import cores

if TYPE_CHECKING:
    from flows.engine.stages import Planned


SEED_FOLDER = "ECKART_SEED_FOLDER"
"""Environment variable with the folder of a seed's workspace, if a study over several seeds runs it."""
_SCHEDULER = "ECKART_SCHEDULER"  # environment variable for the address, which must not be a parameter of the flow


class OptionsError(EckartError):
    """The options contradict each other. The message says what to write."""


@dataclass(frozen=True)
class Options:
    """Options of a run, from the command line or a deployment."""

    workers: int | None = None
    """Largest number of stages that run at the same time; by default it follows from the number of cores."""
    timeout: float | None = None
    """Seconds that a stage may take; None for no limit."""
    task_runner: Literal["threads", "dask"] = "threads"
    """Place where stages run: in this workspace, or on Dask's workers, each in its own workspace."""
    scheduler: str | None = None
    """Address of Dask's scheduler; only with task_runner "dask"."""

    def __post_init__(self) -> None:
        if bool(self.scheduler) != (self.task_runner == "dask"):
            raise OptionsError("the task runner dask and the address of its scheduler belong together: write both")

    def side_by_side(self, planned: Sequence[Planned], threads: int) -> int:
        """Return the number of stages that may run at the same time, if each uses `threads` CPU threads.

        It is `workers` if given. Otherwise it is 1 if there is a GPU, which stages would share, else as many as the
        cores allow.
        """
        if self.workers or all(stage.cached for stage in planned):
            return self.workers or 1
        from flows.engine import torch_questions  # a slow import

        return 1 if torch_questions.gpus() else max(1, cores() // threads)

    @classmethod
    def of_flow(cls, workers: int | None, timeout: float | None, task_runner: Literal["threads", "dask"]) -> Options:
        """Return the options from a flow's parameters; the scheduler's address comes from the environment."""
        scheduler = os.environ.get(_SCHEDULER) if task_runner == "dask" else None
        return cls(workers, timeout, task_runner, scheduler or None)

    def parameters(self) -> dict[str, Any]:
        """Return the options as a flow's parameters, and put the scheduler's address where `of_flow` looks for it."""
        if self.scheduler:
            os.environ[_SCHEDULER] = self.scheduler
        return {name: value for name, value in asdict(self).items() if name != "scheduler"}

    def words(self) -> list[str]:
        """Return the options that differ from their defaults, as arguments of `eckart run`."""
        pairs = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return [f"--{name.replace('_', '-')}={value}" for name, (value, default) in pairs.items() if value != default]
