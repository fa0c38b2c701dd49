"""The console of a run: on a terminal a live display of the running stages, elsewhere plain log lines.

On a terminal, lines above the display name only what ended, failed or needs a look. Prefect's page of the run always
has every line of every stage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import rich.progress
from rich.console import Console
from rich.text import Text

from flows.display.progress import Progress, new_bars
from flows.engine.stages import Planned

QUIET = {"eckart_quiet": True}
"""`extra` of a log record that Prefect's page shows and the console does not."""

_DOUBLED = ("dvc", "dvc_data", "dvc_objects")  # loggers with a console of their own, whose lines the root prints, too
_BARS = ("dvc.progress", "dvc_data.callbacks")  # loggers whose level decides whether DVC draws bars of its own

_bars: rich.progress.Progress | None = None


@contextmanager
def terminal() -> Iterator[None]:
    """Draw a live display while the block runs, if standard error is a terminal; it is erased at the end."""
    console = Console(stderr=True, highlight=False)
    if not (sys.stderr.isatty() and console.is_interactive):
        yield
        return
    global _bars
    for name in _BARS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with new_bars(console) as bars:
        _bars = bars
        try:
            yield
        finally:
            _bars = None


def doing(words: str) -> None:
    """Show what a run does before its stages, on a terminal only."""
    if _bars:
        _clear(_bars)
        _bars.add_task(words, total=None, line="", begun=_bars.get_time())


def _clear(bars: rich.progress.Progress) -> None:
    for row in bars.task_ids:  # hidden and not removed: a stage that is being killed still writes to its row
        bars.update(row, visible=False)


def log_above() -> None:
    """Log above the live display, if there is one, until the process ends.

    Call it after Prefect and DVC are imported, which set up consoles of their own.
    """
    if _bars:
        logging.getLogger().handlers = [_Above(_bars.console)]
        for name in _DOUBLED:
            logging.getLogger(name).handlers = []


@contextmanager
def shown(stages: Sequence[Planned], workers: int, before: Mapping[str, float]) -> Iterator[Progress]:
    """Show the progress of a study: in the live display if there is one, else by log lines, each printed once.

    Args:
        stages, workers, before: as `Progress` takes them.
    """
    if bars := _bars:
        _clear(bars)
        progress = Progress(
            stages, workers, before, bars, lambda line: bars.console.print(Text.from_ansi(line), soft_wrap=True)
        )
        try:
            yield progress
        finally:
            progress.note = _ignore  # what stages that are killed now still say
            doing("finishing")
        return
    with _quiet_console():
        yield Progress(stages, workers, before)


def _ignore(line: str) -> None:
    pass


@contextmanager
def _quiet_console() -> Iterator[None]:
    """Keep quiet records off the console, and lines that two loggers would print."""
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


class _Above(logging.Handler):
    """Print warnings and errors above the live display."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.console = console
        self.addFilter(_is_news)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stage = getattr(record, "task_run_name", None)
            style = "red" if record.levelno >= logging.ERROR else "yellow"
            text = f"{stage}: {self.format(record)}" if stage else self.format(record)
            self.console.print(Text.from_ansi(text, style=style), soft_wrap=True)
        except Exception:  # as every handler does
            self.handleError(record)


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out what Prefect says of a run's end, which `Progress` and the command say better; keep tracebacks."""
    of_a_state = record.name in ("prefect.flow_runs", "prefect.task_runs") and record.levelno >= logging.ERROR
    return not of_a_state or bool(record.exc_info and record.exc_info[0])


def _is_worth_it(record: logging.LogRecord) -> bool:
    return not any(hasattr(record, name) for name in QUIET)
