"""The progress of a study: time left by hand, what is heard of stages, and the display in terminals of any width."""

from __future__ import annotations

import io
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from rich.console import Console
from rich.text import Text

from flows.display.progress import Progress, expected_seconds, new_bars, steps_of
from flows.engine import hang_detection
from flows.engine.stages import Outcome, Planned
from tests.flows.servers import until


def planned(name: str, *upstream: str, alone: bool = False, twin: str | None = None) -> Planned:
    return Planned(name, upstream, alone, (), (), definition="", twin=twin, cached=None)


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
SECONDS = {"data": 5.0, "train@a-1": 10.0, "train@b-1": 20.0, "train@c-1": 30.0, "time": 7.0, "table": 1.0}


@pytest.mark.parametrize(("workers", "seconds"), [(1, 73), (2, 40), (9, 37)])
def test_workers_share_the_work_but_for_the_stages_that_run_alone(workers: int, seconds: float) -> None:
    """Beside each other: 66 s, and no less than the longest stage's 30. Alone: 7 s."""
    assert Progress(PLAN, workers, SECONDS).time_left() == (seconds, True)


def test_a_stage_is_expected_to_take_as_long_as_before_or_as_its_like() -> None:
    took = {"search@svd-0.5": 2.0, "search@ars-0.5": 400.0, "finetune@svd-0.5": 60.0}
    assert expected_seconds("search@svd-0.5", {}, took) == 2
    assert expected_seconds("search@kfac-0.5", took, {}) == 201
    assert expected_seconds("search@kfac-0.5", {}, took) == 201
    assert expected_seconds("table", took, took) is None


def test_time_left_is_known_as_soon_as_every_stage_has_a_like() -> None:
    progress = Progress(PLAN, 2, {name: SECONDS[name] for name in ("data", "time", "table")})
    assert progress.time_left() == (7 + 5, False)
    progress.done(executed("data", 5))
    progress.done(executed("train@a-1", 10))
    assert progress.time_left() == (7 + (10 + 10 + 1) / 2, True)


def test_a_training_says_by_its_steps_how_long_it_still_takes() -> None:
    """After 30 s of loading, 10 steps a second."""
    clock = Clock()
    progress = Progress([planned("train")], 1, {"train": 500.0}, new_bars(Console(quiet=True), clock))
    with progress.running("train"):
        for clock.now, step in ((30, 0), (31, 10), (34, 40)):
            progress.show_line("train", f"step {step}/100  loss 0.5")
        assert progress.time_left()[0] == pytest.approx(6)
        clock.now = 35
        progress.show_line("train", "step 1/50  loss 0.5")  # a second training
        assert progress.time_left()[0] == 500 - 35


def test_stages_that_need_a_failed_one_are_not_waited_for() -> None:
    progress = Progress(PLAN, 2, SECONDS)
    progress.done(executed("data", 5))
    progress.failed("train@b-1", "a cause")
    assert progress.time_left()[0] == 30  # a and c


def test_each_quarter_of_a_training_is_worth_a_line() -> None:
    progress = Progress([planned("train")], 1, {})
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
    progress = Progress([planned("a")], 1, {}, note=notes.append)
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
    progress = Progress(PLAN, 3, SECONDS, bars)
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
