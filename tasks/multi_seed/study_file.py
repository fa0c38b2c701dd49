"""Load the file of a study: changes to params.yaml, seeds, tasks, trials and published numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from eckart.recipe import merge
from tasks.artifacts.metrics import MetricName
from tasks.config import params_file, validation
from tasks.config.mistakes import report
from tasks.config.params_file import PARAMS, ParamsError
from tasks.config.resolved import resolve
from tasks.config.schema import Section, Seed
from tasks.multi_seed import published_numbers as published
from tasks.multi_seed import trials
from tasks.multi_seed.published_numbers import Published
from tasks.multi_seed.trials import Trial, Trials

# Names of files and tasks, which become part of the names of folders and MLflow experiments.
_NAME = re.compile(r"[\w-]{1,50}")


@dataclass(frozen=True)
class StudyFile:
    """A study of one task, ready to run: all parameters except the seed."""

    path: Path
    """Path of the file, relative to the main workspace."""
    params: dict[str, Any]
    """All parameters, including defaults."""
    seeds: tuple[int, ...]
    task: str | None = None
    """Name of the task in the file; None if the file has no tasks."""
    published: tuple[Published, ...] = ()
    """Published numbers that the file cites for all tasks."""
    trials: Trials | None = None
    """The trials to run before the study; None if the file asks for none, or they have finished."""
    tried: tuple[Trial, ...] = ()
    """Results of finished trials. The best trial of each recipe is already in `params`."""
    suffix: str = ""
    """Suffix of the study's name; only the study that runs trials has one."""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.path.stem, self.task, self.suffix)))

    @property
    def metric(self) -> MetricName:
        metric: MetricName = self.params["data"]["metric"]
        return metric

    def content(self, seed: int) -> dict[str, Any]:
        """Return the content of params.yaml for a run with `seed`."""
        return {**self.params, "seed": seed}

    def of_trials(self, asked: Trials) -> StudyFile:
        """Return the study that runs the trials, with each trial as a recipe."""
        content = trials.study(self.params, asked)
        return replace(self, params=content, seeds=(asked.seed,), trials=None, suffix=trials.SUFFIX)

    def at_its_best(self, tried: Sequence[Trial]) -> StudyFile:
        """Return this study after its trials, with the best trial of each recipe as that recipe."""
        return replace(self, params=trials.best(self.params, tried), trials=None, tried=tuple(tried))


class _Own(Section):
    """The keys that a study's file may have in addition to the sections of params.yaml."""

    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)] | None = None
    tasks: Annotated[dict[str, dict[str, Any]], Field(min_length=1)] | None = None
    published: tuple[Published, ...] = ()
    trials: Trials | None = None


def load(file: Path, seeds: Sequence[int] = (), tasks: Sequence[str] = ()) -> tuple[StudyFile, ...]:
    """Load and check the file of a study, and return the study of each task.

    Args:
        seeds: the seeds to use instead of those in the file; empty: those in the file.
        tasks: names of the tasks to return; all tasks if empty.

    Raises:
        ParamsError: `file` is outside the repository, its name is unfit for a folder, it cannot be read, or it has
            mistakes, which the message lists.
    """
    path = _path(file)
    stated = params_file.read(file)
    own = params_file.parse({key: stated.pop(key) for key in _Own.model_fields if key in stated}, _Own, file)
    if lines := list(_own_mistakes(own, stated, tasks)):
        raise ParamsError(report(file, lines))
    exports_nothing = merge(params_file.read(), {"export": {"recipes": []}})
    common = merge(exports_nothing, stated)
    chosen = tuple(dict.fromkeys(seeds)) or own.seeds or ()
    if chosen:
        common["seed"] = chosen[0]
    parts: dict[str | None, dict[str, Any]] = dict(own.tasks.items()) if own.tasks else {None: {}}
    merged = {task: merge(common, part) for task, part in parts.items()}
    _check(common, merged, own, file)
    too_long: list[str] = []
    for task, content in merged.items():
        if task and "name" not in parts[task].get("study", {}):  # an MLflow experiment of its own
            name = f"{content['study']['name']}-{task}"
            if not _NAME.fullmatch(longest := f"{name}-{trials.SUFFIX}" if own.trials else name):
                too_long.append(f"tasks.{task}.study.name: would be {longest}, over 50 characters; write a shorter one")
            content["study"] = {**content["study"], "name": name}
    if too_long:
        raise ParamsError(report(file, too_long))
    return tuple(
        StudyFile(path, resolve(content), chosen or (content.get("seed", 0),), task, own.published, own.trials)
        for task, content in merged.items()
        if not tasks or task in tasks
    )


def _path(file: Path) -> Path:
    """Return the path of a study's file relative to the workspace."""
    path = file.resolve()
    if not path.is_relative_to(Path.cwd()):
        raise ParamsError(f"{file} is outside the repository: put it into studies/")
    if not path.is_file():
        raise ParamsError(f"{file} does not exist: name a file of studies/")
    if not _NAME.fullmatch(path.stem):
        raise ParamsError(f"{file}: its name becomes that of a folder: write letters, digits, _ and -, at most 50")
    return path.relative_to(Path.cwd())


def _own_mistakes(own: _Own, stated: Mapping[str, Any], wanted: Sequence[str]) -> Iterator[str]:
    if own.seeds and "seed" in stated:
        yield "seed: stands beside seeds; remove one of them"
    for seed, count in Counter(own.seeds or ()).items():
        if count > 1:
            yield f"seeds: has {seed} {count} times; remove the repetition"
    tasks = own.tasks or {}
    for task, part in tasks.items():
        if not _NAME.fullmatch(task):
            yield f"tasks.{task}: becomes the name of a folder; write letters, digits, _ and -, at most 50"
        if "seed" in part:
            yield f"tasks.{task}.seed: all tasks have the same seeds; write it beside tasks"
    for task in dict.fromkeys(wanted):
        if task not in tasks:
            choice = f"choose from {', '.join(tasks)}" if tasks else "leave out --task"
            yield f"tasks: there is no {task}; {choice}"


def _check(common: Mapping[str, Any], merged: Mapping[str | None, dict[str, Any]], own: _Own, file: Path) -> None:
    """Check the parameters of all tasks, then published numbers and trials, which need correct parameters.

    Args:
        common: the parameters that all tasks share.
        merged: task → all its parameters.
        own: the other keys of the file.

    Raises:
        ParamsError: there are mistakes. The message names the file, and the place of each mistake in it.
    """
    shared = validation.mistakes(common)
    lines = [
        line if task is None or line in shared else f"tasks.{task}.{line}"
        for task, content in merged.items()
        for line in (validation.mistakes(content) if task else shared)
    ]
    if not lines:
        resolved = {task: resolve(content) for task, content in merged.items()}
        metrics = {task: content["data"]["metric"] for task, content in resolved.items()}
        lines += published.mistakes(own.published, metrics)
        if own.trials:
            lines += [line for content in resolved.values() for line in trials.mistakes(content, own.trials)]
    if lines:
        raise ParamsError(report(Path(f"{file} on top of {PARAMS}"), dict.fromkeys(lines)))
