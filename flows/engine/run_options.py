"""The options of a run: how many stages at a time, for how long, and where."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from tasks.artifacts.errors import EckartError
from tasks.runtime.hardware import cores

if TYPE_CHECKING:
    from flows.engine.stages import Planned


_SCHEDULER = "ECKART_SCHEDULER"
"""Variable of the environment: the address of Dask's scheduler, which is no parameter of a flow."""


class OptionsError(EckartError):
    """The options contradict each other; the message says what to write."""


@dataclass(frozen=True)
class Options:
    """The options of a run, passed from the command line or a deployment to the executor."""

    workers: int | None = None
    """Stages side by side; by default as many as the cores have room for."""
    timeout: float | None = None
    """Seconds that a stage may take."""
    task_runner: Literal["threads", "dask"] = "threads"
    """Where stages run: in threads of this workspace, or on Dask's workers, each with a workspace of its own."""
    scheduler: str | None = None
    """Address of Dask's."""

    def __post_init__(self) -> None:
        if bool(self.scheduler) != (self.task_runner == "dask"):
            raise OptionsError("the task runner dask and the address of its scheduler belong together: write both")

    def side_by_side(self, planned: Sequence[Planned], threads: int) -> int:
        """Return the number of stages at a time: as asked for, as the cores allow, or one if they share a GPU."""
        if self.workers or all(stage.cached for stage in planned):
            return self.workers or 1
        from flows.engine import torch_questions  # a slow import

        return 1 if torch_questions.gpus() else max(1, cores() // threads)

    @classmethod
    def of_flow(cls, workers: int | None, timeout: float | None, task_runner: Literal["threads", "dask"]) -> Options:
        """Return the options of a flow, from its parameters and the environment."""
        scheduler = os.environ.get(_SCHEDULER) if task_runner == "dask" else None
        return cls(workers, timeout, task_runner, scheduler or None)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a flow; the scheduler goes into the environment, where the flow finds it."""
        if self.scheduler:
            os.environ[_SCHEDULER] = self.scheduler
        return {name: value for name, value in asdict(self).items() if name != "scheduler"}

    def words(self) -> list[str]:
        """Return the arguments of `eckart run` for the options that differ from their defaults."""
        pairs = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return [f"--{name.replace('_', '-')}={value}" for name, (value, default) in pairs.items() if value != default]
