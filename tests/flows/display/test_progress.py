"""The progress of a study: the time left, the lines that stages print, and the display in terminals of any width."""

from __future__ import annotations

import io
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
from rich.console import Console
from rich.progress import Progress as Progress_
from rich.text import Text

from flows.display.progress import Progress, new_bars, steps_of
from flows.engine import hang_detection
from flows.engine.stages import Outcome, Planned
from tests.flows.servers import until


def planned(name: str, *upstream: str, alone: bool = False) -> Planned:
    return Planned(name, upstream, alone, (), (), definition="")


def executed(name: str, seconds: float) -> Outcome:
    return Outcome(name, "Executed", seconds, key="")


@dataclass
class Clock:
    """A clock that stands until it is set."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


PLAN = (
    planned("data"),
    planned("train@a-1", "data"),
    planned("train@b-1", "data"),
    planned("train@c-1", "data"),
    planned("time", "train@a-1", "train@b-1", "train@c-1", alone=True),
    planned("table", "time"),
)


def drawn(bars: Progress_, width: int = 140) -> list[str]:
    """The lines of the live display."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(bars.get_renderable())
    return captured.get().splitlines()


def test_stages_that_are_done_say_nothing_about_the_time_that_others_take() -> None:
    clock = Clock()
    bars = new_bars(Console(quiet=True, get_time=clock))
    progress = Progress([replace(PLAN[0], cached=executed("data", 500)), *PLAN[1:]], bars)
    progress.done(executed("data", 500))
    for clock.now, name in ((10, "train@a-1"), (20, "train@b-1")):
        progress.done(executed(name, 10))
    (line,) = drawn(bars)
    assert "3/6" in line
    assert line.rstrip().endswith(" 20 s")


def test_a_training_says_by_its_steps_how_long_it_still_takes() -> None:
    """After 30 s of loading, 1 step a second; the time of the first steps is no estimate."""
    clock = Clock()
    bars = new_bars(Console(quiet=True, get_time=clock))
    progress = Progress([planned("train")], bars)
    with progress.running("train"):
        for clock.now, step in ((30, 0), (34, 4)):
            progress.show_line("train", f"step {step}/100  loss 0.5")
        assert " left" not in drawn(bars)[1]
        clock.now = 70
        progress.show_line("train", "step 40/100  loss 0.5")
        assert drawn(bars)[1].rstrip().endswith(" 1 min left")
        clock.now = 75
        progress.show_line("train", "step 1/50  loss 0.5")  # a second training
        assert " left" not in drawn(bars)[1]


def test_stages_that_need_a_failed_one_are_counted() -> None:
    bars = new_bars(Console(quiet=True))
    progress = Progress(PLAN, bars)
    progress.failed("train@b-1", "a cause")
    assert bars.tasks[0].fields["line"].startswith("3 ")  # with time and table


def test_each_quarter_of_a_training_is_worth_a_line() -> None:
    progress = Progress([planned("train")])
    with progress.running("train"):
        for _ in range(2):
            worth = [step for step in range(1, 41) if progress.show_line("train", f"step {step}/40  loss 1.0")]
            assert worth == [1, 10, 20, 30, 40]
        assert progress.show_line("train", "svd: 2/x rows")


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("step 114/375  loss 0.4210  task_loss 0.4", (114, 375)),
        ("statistics from 8/16 rows, pass 1/1", (8, 16)),
        ("loading data/raw/2024/12/reviews.csv", None),
        ("0/0 rows", None),
    ],
)
def test_steps_are_read_from_lines(line: str, steps: tuple[int, int] | None) -> None:
    assert steps_of(line) == steps


def test_the_traceback_of_a_stage_that_failed_is_noted() -> None:
    notes: list[str] = []
    progress = Progress([planned("a")], note=notes.append)
    traceback = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 'lost'"]
    with progress.running("a"):
        for line in ("begins", *traceback):
            progress.show_line("a", line)
    progress.failed("a", "a: KeyError: 'lost'")
    assert notes == [*traceback, "a failed: KeyError: 'lost'"]


@pytest.mark.parametrize("width", [80, 200])
def test_the_display_fits_any_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=8, force_terminal=True)
    bars = new_bars(console)
    progress = Progress(PLAN, bars)
    with ExitStack() as stack:
        for number in range(3):
            name = f"finetune@a_recipe_with_a_long_name-{number}"
            stack.enter_context(progress.running(name))
            progress.show_line(
                name, "step 114/375  loss 0.4210  \x1b[31mtask_loss\x1b[0m 0.4 [/red] and so on and so on"
            )
        with console.capture() as captured:
            console.print(bars.get_renderable())
    lines = [Text.from_ansi(line).plain for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= width
    assert "0/6" in lines[0]  # first, since a terminal that is too low cuts the last rows
    assert sum("114/375" in line for line in lines) == 3


def test_a_silence_is_told_when_it_is_long_and_whenever_it_has_doubled() -> None:
    patience = 0.05
    silences: list[float] = []
    with hang_detection.noticed(silences.append, patience) as noted:
        until(lambda: len(silences) >= 3)
        first = silences[:3]
        noted()
        until(lambda: silences.count(patience) > 1)
    assert first == [patience, 2 * patience, 4 * patience]
