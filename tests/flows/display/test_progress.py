"""How far a study is: time left by hand, what is heard of stages, and the table in terminals of any width."""

from __future__ import annotations

import io
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from rich.console import Console
from rich.text import Text

from flows.display import terminal
from flows.display.progress import Progress, duration, expectation, finish, roughly, steps_of
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


@pytest.mark.parametrize(("workers", "seconds"), [(1, 73), (2, 53), (3, 43), (9, 43)])
def test_a_study_ends_when_its_workers_are_done(workers: int, seconds: float) -> None:
    """Two: 5 for data, a until 15 and then c until 45, b until 25; time until 52, table until 53."""
    assert finish(PLAN, SECONDS, workers) == seconds


def test_what_measures_begins_when_nothing_else_runs() -> None:
    other = planned("other")
    plan = (other, planned("quick"), planned("time", "quick", alone=True), planned("late"))
    assert finish(plan, {"other": 9, "quick": 1, "time": 2, "late": 4}, 4) == 9 + 2 + 4


def test_a_twin_waits_for_the_one_whose_result_it_takes() -> None:
    plan = (planned("a"), planned("b", twin="a"), planned("c", "b"))
    assert finish(plan, {"a": 6, "b": 0, "c": 3}, 2) == 9


def test_a_stage_takes_as_long_as_its_like() -> None:
    took = {"search@svd-0.5": 2.0, "search@ars-0.5": 400.0, "finetune@svd-0.5": 60.0}
    assert expectation("search@ars-0.3", took, {}) == 400  # of its recipe
    assert expectation("search@kfac-0.5", took, {}) == 201  # of any
    assert expectation("search@ars-0.3", {}, took) == 400
    assert expectation("table", took, took) is None


def test_an_earlier_run_is_scaled_by_what_its_like_takes_now() -> None:
    before = {"finetune@a-0.5": 10.0, "finetune@b-0.5": 20.0, "search@a-0.5": 3.0}
    assert expectation("finetune@b-0.5", {"finetune@a-0.5": 15.0}, before) == 30
    assert expectation("finetune@b-0.5", {"search@a-0.5": 30.0}, before) == 20


def test_time_left_is_known_as_soon_as_every_stage_has_a_like() -> None:
    clock = Clock()
    progress = Progress(PLAN, 2, {name: SECONDS[name] for name in ("data", "time", "table")}, clock=clock)
    assert (progress.time_left().seconds, progress.time_left().known) == (13, False)
    progress.done(executed("data", 5))
    with progress.running("train@a-1"):
        clock.now = 10
    progress.done(executed("train@a-1", 10))
    assert (progress.time_left().seconds, progress.time_left().known) == (10 + 7 + 1, True)


def test_a_training_says_by_its_steps_how_long_it_still_takes() -> None:
    """After 30 s of loading, 10 steps a second."""
    clock, one = Clock(), planned("train")
    progress = Progress([one], 1, {"train": 500.0}, clock=clock)
    with progress.running("train"):
        for clock.now, step in ((30, 0), (31, 10), (34, 40)):
            progress.heard("train", f"step {step}/100  loss 0.5")
        clock.now = 35
        assert progress.time_left().seconds == pytest.approx(5)
        progress.heard("train", "step 1/50  loss 0.5")  # a second training
        assert progress.time_left().seconds == 500 - 35


def test_what_follows_from_a_failure_is_not_waited_for() -> None:
    progress = Progress(PLAN, 2, SECONDS)
    progress.done(executed("data", 5))
    progress.failed("train@b-1", "a cause")
    assert progress.now()[2] == 3  # with time and table
    assert progress.time_left().seconds == 30  # a and c


def test_of_a_training_each_quarter_is_worth_a_line() -> None:
    progress = Progress([planned("train")], 1, {})
    with progress.running("train"):
        for _ in range(2):
            worth = [step for step in range(1, 41) if progress.heard("train", f"step {step}/40  loss 1.0")]
            assert worth == [1, 10, 20, 30, 40]
        assert progress.heard("train", "svd: 2/x rows")


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("step 114/375  loss 0.4210  task_loss 0.4", (114, 375)),
        ("statistics from 8/16 rows, pass 1/1", (8, 16)),
        ("loading data/raw/2024/12/reviews.csv", None),
        ("1.5 times as fast", None),
        ("0/0 rows", None),
    ],
)
def test_steps_are_read_from_lines(line: str, steps: tuple[int, int] | None) -> None:
    assert steps_of(line) == steps


def test_the_lines_of_a_traceback_are_noted_and_no_others() -> None:
    noted: list[str] = []
    progress = Progress([planned("a")], 1, {}, noted.append)
    trace = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 'lost'"]
    with progress.running("a"):
        for line in ("begins", *trace):
            progress.heard("a", line)
    assert noted == trace


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_any_terminal(width: int) -> None:
    progress = Progress(PLAN, 3, SECONDS)
    names = [f"finetune@a_recipe_with_a_long_name-{number}" for number in range(9)]
    console = Console(file=io.StringIO(), width=width, height=8, force_terminal=True)
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(progress.running(name))
            progress.heard(name, "step 114/375  loss 0.4210  \x1b[31mtask_loss\x1b[0m 0.4 [/red] and so on and so on")
        with console.capture() as captured:
            console.print(terminal.table(progress, console.height))
    lines = [Text.from_ansi(line).plain for line in captured.get().splitlines()]
    assert len(lines) <= console.height
    assert max(map(len, lines)) <= width
    assert sum("114/375" in line for line in lines) == 4
    assert any("5 more" in line for line in lines)


def drawn(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=120, height=24, force_terminal=True)
    with console.capture() as captured:
        console.print(terminal.table(progress, console.height))
    return Text.from_ansi(captured.get()).plain


def test_a_row_says_for_how_long_its_stage_has_been_silent() -> None:
    clock = Clock()
    progress = Progress([planned("train")], 1, {}, clock=clock)
    with progress.running("train"):
        clock.now = 300
        assert "no output for 5 min" in drawn(progress)
        progress.heard("train", "step 1/4  loss 0.5")
        clock.now = 301
        assert "no output" not in drawn(progress)
        clock.now = 900
        assert "no output for 10 min loss 0.5" in drawn(progress)


def test_a_silence_is_told_when_it_is_long_and_whenever_it_has_doubled() -> None:
    patience = 0.05
    told: list[float] = []
    with hang_detection.noticed(told.append, patience) as noted:
        until(lambda: len(told) >= 3)
        first = told[:3]
        noted()
        until(lambda: told.count(patience) > 1)
    assert first == [patience, 2 * patience, 4 * patience]


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 252, 3600, 7500)] == [
        "0 s",
        "59 s",
        "4 min 12 s",
        "1 h 0 min",
        "2 h 5 min",
    ]
    assert [roughly(seconds) for seconds in (1, 44, 57, 250, 3590, 4000)] == [
        "10 s",
        "40 s",
        "1 min",
        "4 min",
        "1 h",
        "1 h 10 min",
    ]
