"""What one sees while a study runs: in a terminal one live table, elsewhere plain lines.

In a terminal a line stands above the table only for what has ended, failed or needs a look; Prefect's page of the run
has every line of every stage in either case.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from flows.display.progress import Progress, duration, roughly

QUIET = {"eckart_quiet": True}
"""`extra` of a log record that the console is spared, and Prefect's page is not."""

_DOUBLED = ("dvc", "dvc_data", "dvc_objects")  # loggers with a console of their own, whose lines the root says, too
_BARS = ("dvc.progress", "dvc_data.callbacks")  # loggers whose level decides whether DVC draws bars of its own
_OTHER_LINES = 4  # of the terminal: around the rows of the stages
_PER_SECOND = 2.0  # drawings
_SILENT = 60.0  # seconds after which a row says that its stage prints nothing


@contextmanager
def terminal() -> Iterator[None]:
    """Show a live table for as long as this lasts, where standard error is a terminal; it then leaves no trace."""
    console = Console(stderr=True, highlight=False)
    if not (sys.stderr.isatty() and console.is_interactive):
        yield
        return
    global _screen
    for name in _BARS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    screen = _Screen(console)
    with Live(console=console, get_renderable=screen.drawn, refresh_per_second=_PER_SECOND, transient=True):
        _screen = screen
        try:
            yield
        finally:
            _screen = None


def doing(words: str) -> None:
    """Say what a run does before its stages, in a terminal alone."""
    if _screen:
        _screen.spinner.update(text=words)


def log_above() -> None:
    """Log above the live table, where there is one, to the end of the process.

    Prefect and DVC must have been imported, which then set up consoles of their own.
    """
    if _screen:
        logging.getLogger().handlers = [_Above(_screen)]
        for name in _DOUBLED:
            logging.getLogger(name).handlers = []


@contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Show how far a study is in the live table, where there is one; else the log's plain lines do, each once."""
    if screen := _screen:
        progress.note, screen.progress = screen.say, progress
        try:
            yield
        finally:
            screen.progress, progress.note = None, _ignore
            doing("finishing")
        return
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


def _ignore(line: str) -> None:
    """What stages say that were killed at the end is of no use."""


class _Screen:
    """What stands in the terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress: Progress | None = None
        self.spinner = Spinner("line")
        self._guard = Lock()

    def say(self, line: str, style: str = "") -> None:
        """Write a line above the table."""
        with self._guard:
            self.console.print(Text.from_ansi(line, style=style), soft_wrap=True)

    def drawn(self) -> RenderableType:
        """The table as it is to be now."""
        return table(self.progress, self.console.height) if self.progress else self.spinner


_screen: _Screen | None = None


class _Above(logging.Handler):
    """Writes warnings and errors above the live table."""

    def __init__(self, screen: _Screen) -> None:
        super().__init__(logging.WARNING)
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not _is_of_a_state(record):
                stage = getattr(record, "task_run_name", None)
                told = f"{stage}: " if stage else ""
                style = "red" if record.levelno >= logging.ERROR else "yellow"
                self.screen.say(f"{told}{self.format(record)}", style)
        except Exception:  # as every handler does
            self.handleError(record)


def _is_of_a_state(record: logging.LogRecord) -> bool:
    """Prefect says how a run ended, which `Progress` and the command say better; a traceback is worth its lines."""
    exception = record.exc_info and record.exc_info[0]
    by_prefect = record.name in ("prefect.flow_runs", "prefect.task_runs") and record.levelno >= logging.ERROR
    return by_prefect and not exception


def _is_worth_it(record: logging.LogRecord) -> bool:
    return not any(hasattr(record, name) for name in QUIET)


def table(progress: Progress, height: int) -> RenderableType:
    """A row for each running stage, as far as `height` lines hold them, and a line about the whole study."""
    running, done, failed, seconds = progress.now()
    rows = Table.grid(
        Column(no_wrap=True),
        Column(width=12),
        Column(no_wrap=True, justify="right"),
        Column(no_wrap=True, ratio=1, style="dim"),
        Column(no_wrap=True, justify="right"),
        padding=(0, 1, 0, 0),
        expand=True,
    )
    room = max(1, height - _OTHER_LINES)
    for one in running[:room]:
        done_steps, steps = one.steps or (0, 0)
        bar = ProgressBar(steps, done_steps, width=12) if steps else ""
        now = progress.start + seconds
        silent = now - (one.since if one.at is None else one.at)
        said = f"no output for {roughly(silent)} {one.said}" if silent > _SILENT else one.said
        elapsed = duration(now - one.since)
        rows.add_row(one.name, bar, f"{done_steps}/{steps}" if steps else "", Text.from_ansi(said), elapsed)
    more = [f"and {len(running) - room} more"] if len(running) > room else []
    left = progress.time_left()
    told = [f"{done} of {len(progress.order)} stages done", duration(seconds)]
    told += [f"{failed} failed or wait for one that did"] if failed else []
    told += [f"{'about' if left.known else 'at least'} {roughly(left.seconds)} left"] if left.seconds else []
    return Group("", rows, *more, Text(", ".join(told), style="bold"))
