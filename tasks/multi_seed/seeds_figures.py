"""Figures of a study over several seeds and tasks: the means of the figures that each of its workspaces drew."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pandas as pd

from tasks.artifacts.metrics import METRICS
from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.figures import FIGURES, write
from tasks.report.figures.plot import Line, Plot, mean_over_seeds

_NUMBERED = re.compile(r"(.+?)-?(\d+)")  # a task such as `mrpc-block-3` or `squad-40`
_FEWEST = 3  # tasks whose numbers are an axis


def write_means(workspaces: Sequence[Path], parts: Iterable[str], folder: Path) -> None:
    """Draw into `folder` the mean over seeds of every plot that all `workspaces` have, one for each seed.

    Pictures of one model's weights have no mean: those of the first seed are copied.

    Args:
        parts: the study's `figures`; a workspace may also have those of an earlier study.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first, *others = workspaces
    for file in chain.from_iterable(sorted((first / FIGURES / part).glob("*")) for part in parts):
        files = [file, *(other / file.relative_to(first) for other in others)]
        if file.suffix != ".json":
            if not file.with_suffix(".json").exists():
                shutil.copy(file, folder)
        elif all(one.exists() for one in files):
            write(mean_over_seeds([Plot.model_validate_json(one.read_text()) for one in files]), folder)


def over_tasks(rows: Mapping[str | None, pd.DataFrame]) -> list[Plot]:
    """Return a plot of the scores over the numbers of tasks that differ in a last number (SoftLM, figure 1a).

    Args:
        rows: task → the rows of `seeds_table.collect`.
    """
    series: dict[str, dict[float, pd.DataFrame]] = {}
    for task, own in rows.items():
        if found := _NUMBERED.fullmatch(task or ""):
            series.setdefault(found[1], {})[float(found[2])] = own
    return [_over_numbers(name, tasks) for name, tasks in series.items() if len(tasks) >= _FEWEST]


def _over_numbers(name: str, tasks: Mapping[float, pd.DataFrame]) -> Plot:
    all_rows = pd.concat([own.assign(number=number) for number, own in sorted(tasks.items())])
    metric = METRICS[all_rows.metric.iloc[0]]
    candidates = all_rows[all_rows.recipe != CONTROL_NAME]
    steps = {"before fine-tuning": "factorized", "after fine-tuning": "recovered"}
    steps = {title: step for title, step in steps.items() if candidates[step].notna().any()}
    return Plot(
        name=f"score-over-{name}",
        title=f"{name}: {metric.title} of each task",
        x=f"number after {name}",
        y=f"{metric.with_direction}, test",
        panels={title: _lines(candidates.dropna(subset=step), step) for title, step in steps.items()},
        levels={title: {"original": float(all_rows.dense.mean())} for title in steps},
        order=tuple(dict.fromkeys(candidates.recipe)),
    )


def _lines(rows: pd.DataFrame, step: str) -> dict[str, Line]:
    """Return recipe → mean over seeds of a metric over the tasks' numbers; several keeps of a task are averaged."""
    means = rows.groupby(["recipe", "number"], sort=False)[step].mean()
    return {
        str(recipe): Line.through(own.index.get_level_values("number"), own)
        for recipe, own in means.groupby("recipe", sort=False)
    }
