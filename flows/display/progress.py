"""The progress of a study: the number of finished stages, and the running ones with their steps and the time left."""

from __future__ import annotations

import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import rich.progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from flows.engine.stages import Outcome, Planned

_STEPS = re.compile(r"(?<!\S)(\d+)/([1-9]\d*)(?!\S)")
_TRACEBACK = "Traceback (most recent call last):"
_LINES = 20  # last lines of output that are kept for each stage
_PER_SECOND = 2  # how often the display is redrawn
_PERIOD = 24 * 3600  # the time left is estimated from the steps that were done in these last seconds
_ENOUGH = 0.05  # share of the steps after which the time left is shown; the first steps are slower than the others


class _Elapsed(rich.progress.ProgressColumn):
    """A column with the time since the row was added. A reset of the row's steps does not change it."""

    def render(self, task: rich.progress.Task) -> Text:
        return Text(duration(task.get_time() - task.fields["begun"]))


class _Left(rich.progress.ProgressColumn):
    """A column with the time that a stage's steps will still take.

    It is empty for the study: the times of its stages differ too much to tell the time of those that did not run yet.
    """

    def render(self, task: rich.progress.Task) -> Text:
        known = task.total and task.completed >= _ENOUGH * task.total and not task.fields["whole"]
        seconds = task.time_remaining if known else None
        return Text(f"{roughly(seconds)} left" if seconds else "")


def new_bars(console: Console) -> rich.progress.Progress:
    """Return a live display that is not started yet. Its rows will be the study and each running stage."""
    text = Column(no_wrap=True)
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False, table_column=text),
        rich.progress.BarColumn(12),
        rich.progress.MofNCompleteColumn(table_column=text),
        rich.progress.TextColumn(
            "{task.fields[line]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1)
        ),
        _Elapsed(table_column=text),
        _Left(table_column=text),
        console=console,
        transient=True,
        expand=True,
        speed_estimate_period=_PERIOD,
        refresh_per_second=_PER_SECOND,
    )


class Progress:
    """The progress of a study, drawn in a live display. All methods are thread-safe.

    Args:
        stages: all stages of the study.
        bars: the live display; None: draw nothing.
        note: a function that prints a line about an event, such as the end of a stage.
    """

    def __init__(
        self,
        stages: Sequence[Planned],
        bars: rich.progress.Progress | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.note = note
        self._stages = stages
        self._bars = bars or new_bars(Console(quiet=True))
        self._rows: dict[str, rich.progress.TaskID] = {}
        self.lines: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=_LINES))
        """Stage → the last lines that it printed."""
        self._last_lines: dict[str, str] = {}
        self._tracebacks: dict[str, list[str]] = defaultdict(list)
        self._quarters: dict[str, int] = {}  # quarter of a training's steps that was logged last
        self._done = {stage.name for stage in stages if stage.cached}
        self._failed: set[str] = set()
        self._guard = threading.RLock()
        self._study = self._add("stages", len(stages), len(self._done), whole=True)

    def _add(self, name: str, total: int | None, completed: int = 0, whole: bool = False) -> rich.progress.TaskID:
        begun = self._bars.get_time()
        return self._bars.add_task(name, total=total, completed=completed, line="", begun=begun, whole=whole)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Show a row for a stage while its command runs."""
        with self._guard:
            row = self._rows[name] = self._add(name, None)
        try:
            yield
        finally:
            with self._guard:
                del self._rows[name]
                self._bars.remove_task(row)

    def show_line(self, name: str, line: str) -> bool:
        """Show a line that a stage printed, and return whether it should also be logged.

        A line that reports a step of a training is logged only if it is the first one of a quarter of the steps.
        """
        with self._guard:
            self.lines[name].append(line)
            if line == _TRACEBACK or name in self._tracebacks:
                self._tracebacks[name].append(line)
            row, steps = self._rows[name], steps_of(line)
            if steps:
                done, total = steps
                if done < self._task(name).completed:  # a second training begins
                    self._bars.reset(row)
                self._bars.update(row, completed=done, total=total)
                line = line.removeprefix(f"step {done}/{total}").strip()
            self._last_lines[name] = Text.from_ansi(line).plain
            self._bars.update(row, line=self._last_lines[name])
            before, now = self._quarters.get(name), 4 * steps[0] // steps[1] if steps else -1
            self._quarters[name] = now if steps else -1
            return not steps or now != before

    def done(self, outcome: Outcome) -> None:
        """Count a stage as done, and print how long its command took if it was executed."""
        with self._guard:
            self._done.add(outcome.stage)
            self._bars.update(self._study, completed=len(self._done))
        if outcome.status == "Executed":
            place = f" in {outcome.place}" if outcome.place else ""
            line = self._last_lines.get(outcome.stage)
            self.note(f"{outcome.stage} took {duration(outcome.seconds or 0)}{place}{f': {line}' if line else ''}")

    def failed(self, name: str, cause: str) -> None:
        """Count a stage as failed, together with all stages that depend on it and will not run; print the cause."""
        with self._guard:
            self._failed.add(name)
            for stage in self._stages:
                if self._failed.intersection(stage.upstream):
                    self._failed.add(stage.name)
            self._bars.update(self._study, line=f"{len(self._failed)} failed or wait for one that did")
        for line in (*self._tracebacks[name], f"{name} failed: {cause.removeprefix(f'{name}: ')}"):
            self.note(line)

    def _task(self, name: str) -> rich.progress.Task:
        return next(task for task in self._bars.tasks if task.id == self._rows[name])


def steps_of(line: str) -> tuple[int, int] | None:
    """Return the number of finished steps and of all steps in a line, 114 and 375 for `step 114/375  loss 0.42`."""
    match = _STEPS.search(line)
    return (int(match[1]), int(match[2])) if match and int(match[1]) <= int(match[2]) else None


def duration(seconds: float) -> str:
    """Return a duration as text, such as 8 s, 4 min 12 s or 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def roughly(seconds: float) -> str:
    """Return a rounded duration as text: in tens of seconds, from 1 min in minutes, from 1 h in tens of minutes."""
    unit = 10 if seconds < 55 else 60 if seconds < 3570 else 600
    return duration(unit * max(1, round(seconds / unit))).removesuffix(" 0 s").removesuffix(" 0 min")
