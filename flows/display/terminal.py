"""Console output of a run: a live display of the running stages on a terminal, else plain log lines.

The lines above the live display only report ended stages, failures and warnings. The run's page in Prefect always has
all lines of all stages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import rich.progress
from rich.console import Console
from rich.text import Text

from flows.display.progress import Progress, new_bars
from flows.engine.stages import Planned

QUIET = {"eckart_quiet": True}
"""Argument `extra` of a log call whose record is shown on Prefect's page but not on the console."""

# Loggers with handlers of their own, so that the root logger prints their lines a second time.
_DOUBLED = ("dvc", "dvc_data", "dvc_objects")
_BARS = ("dvc.progress", "dvc_data.callbacks")  # the levels of these loggers decide whether DVC draws progress bars

_FLOWS = Path(__file__).parents[1]

_bars: rich.progress.Progress | None = None
_console: Console | None = None
"""The console that shows only warnings and errors of the log; None if the log is printed as Prefect and DVC do."""


@contextmanager
def terminal(quiet: bool) -> Iterator[None]:
    """Draw a live display while the block runs, if standard error is a terminal; erase the display at the end.

    Args:
        quiet: whether to draw nothing, and to print only warnings and errors.
    """
    console = Console(stderr=True, highlight=False)
    if not (quiet or (sys.stderr.isatty() and console.is_interactive)):
        yield
        return
    global _bars, _console
    for name in _BARS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _console = console
    try:
        if quiet:
            yield
            return
        with new_bars(console) as bars:
            _bars = bars
            yield
    finally:
        _bars = _console = None


def doing(words: str) -> None:
    """Show in the live display, if there is one, what the run does before or after its stages."""
    if _bars:
        _clear(_bars)
        _bars.add_task(words, total=None, line="", begun=_bars.get_time(), whole=True)


def _clear(bars: rich.progress.Progress) -> None:
    for row in bars.task_ids:  # hidden, not removed: a stage that is being killed still updates its row
        bars.update(row, visible=False)


def log_above() -> None:
    """Print only warnings and errors of the log until the process ends, if there is a live display or a quiet run.

    Call this function after Prefect and DVC are imported, because they set up log handlers when imported.
    """
    if _console:
        logging.getLogger().handlers = [_Above(_console)]
        for name in _DOUBLED:
            logging.getLogger(name).handlers = []


@contextmanager
def show_progress(stages: Sequence[Planned]) -> Iterator[Progress]:
    """Show a study's `Progress` while the block runs: in the live display if there is one, else as log lines."""
    if bars := _bars:
        _clear(bars)
        progress = Progress(stages, bars, lambda line: bars.console.print(Text.from_ansi(line), soft_wrap=True))
        try:
            yield progress
        finally:
            progress.note = lambda line: None  # drops the last lines of stages that are being killed
            doing("finishing")
        return
    with _quiet_console():
        yield Progress(stages)


@contextmanager
def _quiet_console() -> Iterator[None]:
    """While the block runs, do not print `QUIET` log records and second copies of log lines on the console."""
    handlers = logging.getLogger().handlers
    own = {name: logging.getLogger(name).handlers for name in _DOUBLED}
    for handler in handlers:
        handler.addFilter(_is_worth_it)
    for name in own if handlers else ():
        logging.getLogger(name).handlers = []
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_worth_it)
        for name, before in own.items():
            logging.getLogger(name).handlers = before


@contextmanager
def own_lines() -> Iterator[None]:
    """While the block runs, print only our own log lines, and warnings and errors. Prefect's server still gets all."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, [_Above(Console(stderr=True, highlight=False), logging.INFO)]
    root.handlers[0].addFilter(_is_ours)
    try:
        yield
    finally:
        root.handlers = before


def _is_ours(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or Path(record.pathname).is_relative_to(_FLOWS)


class _Above(logging.Handler):
    """A log handler that prints warnings and errors, or lines of another level, above the live display."""

    def __init__(self, console: Console, level: int = logging.WARNING) -> None:
        super().__init__(level)
        self.console = console
        self.addFilter(_is_news)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stage = getattr(record, "task_run_name", None)
            style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
            text = f"{stage}: {self.format(record)}" if stage else self.format(record)
            self.console.print(Text.from_ansi(text, style=style), soft_wrap=True)
        except Exception:  # as every handler does
            self.handleError(record)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether to keep a log record: drop Prefect's messages about failed runs, which are shown in another form.

    Records with a traceback are kept.
    """
    of_a_state = record.name in ("prefect.flow_runs", "prefect.task_runs") and record.levelno >= logging.ERROR
    return not of_a_state or bool(record.exc_info and record.exc_info[0])


def _is_worth_it(record: logging.LogRecord) -> bool:
    return not any(hasattr(record, name) for name in QUIET)
