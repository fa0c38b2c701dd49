"""How far a study is: what runs, how long it has run, how long the rest may take."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush

from flows.engine.stages import Outcome, Planned
from tasks.artifacts.names import candidate_of, recipe_and_keep

_STEPS = re.compile(r"(?<!\S)(\d+)/([1-9]\d*)(?!\S)")
_TRACEBACK = "Traceback (most recent call last):"
_LONGEST = 200  # lines of a traceback

Steps = tuple[int, int]
"""Done, and in all."""


@dataclass
class Running:
    """A stage that runs, and what it has said."""

    name: str
    since: float
    steps: Steps | None = None
    heard: list[tuple[int, float]] = field(default_factory=list)
    """Steps done, and when it said so: first and last of its present training."""
    said: str = ""
    """Its last line, without the steps."""
    at: float | None = None
    """When it said it."""
    trace: list[str] = field(default_factory=list)
    """The lines of a traceback."""
    shown: int = -1
    """Quarter of its steps that a plain line has told."""


@dataclass(frozen=True)
class TimeLeft:
    """Of the whole study: `seconds` at least; about so many where all stages were timed before."""

    seconds: float
    known: bool


class Progress:
    """How far a study is. Its methods are called from many threads, one for each stage.

    Args:
        order: the stages in the order in which they are begun.
        workers: stages side by side.
        before: stage → seconds that it took in an earlier run, maybe with other parameters.
        note: takes a line about what has just happened, such as the end of a stage.
    """

    def __init__(
        self,
        order: Sequence[Planned],
        workers: int,
        before: Mapping[str, float],
        note: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order, self.note = order, note
        self.start = clock()
        self._workers, self._before, self._clock = workers, before, clock
        self._took: dict[str, float] = {}
        self._last: dict[str, str] = {}
        """What stages said last."""
        self._running: dict[str, Running] = {}
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._guard = threading.Lock()

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """While a stage's command runs."""
        with self._guard:
            one = self._running[name] = Running(name, self._clock())
        try:
            yield
        finally:
            with self._guard:
                del self._running[name]
                self._last[name] = one.said
            for line in one.trace:
                self.note(line)

    def heard(self, name: str, line: str) -> bool:
        """Note a line that a stage prints; whether it is worth one in a log: of a training each quarter is."""
        with self._guard:
            one = self._running[name]
            one.at = self._clock()
            if (line == _TRACEBACK or one.trace) and len(one.trace) < _LONGEST:
                one.trace.append(line)
            steps = steps_of(line)
            if not steps:
                one.said = line
                return True
            again = bool(one.steps) and steps[0] <= one.heard[-1][0]  # a second training begins
            one.heard = [*([] if again else one.heard[:1]), (steps[0], one.at)]
            one.steps = steps
            one.said = line.removeprefix(f"step {steps[0]}/{steps[1]}").strip()
            quarter, last = 4 * steps[0] // steps[1], one.shown
            one.shown = quarter
            return quarter != last

    def done(self, outcome: Outcome) -> None:
        """A stage is up to date."""
        with self._guard:
            self._done.add(outcome.stage)
            if outcome.seconds is not None:
                self._took[outcome.stage] = outcome.seconds
        if outcome.status == "Executed":
            place = f" in {outcome.place}" if outcome.place else ""
            took, last = duration(outcome.seconds or 0), self._last.get(outcome.stage)
            self.note(f"{outcome.stage} took {took}{place}{f': {last}' if last else ''}")

    def failed(self, name: str, cause: str) -> None:
        """A stage failed, and none that follows from it will run."""
        with self._guard:
            self._failed.add(name)
            for one in self.order:
                if self._failed.intersection(one.upstream):
                    self._failed.add(one.name)
        self.note(f"{name} failed: {cause.removeprefix(f'{name}: ')}")

    def now(self) -> tuple[list[Running], int, int, float]:
        """What runs, how many stages are done, how many failed or wait for one that did, and the seconds so far."""
        with self._guard:
            return list(self._running.values()), len(self._done), len(self._failed), self._clock() - self.start

    def time_left(self) -> TimeLeft:
        """An estimate: by a stage's own steps, else by the times of this run and an earlier one."""
        with self._guard:
            over = self._done | self._failed
            waiting = sorted((one for one in self.order if one.name not in over), key=self._waits)
            guesses = {one.name: self._left(one) for one in waiting}
        seconds = finish(waiting, {name: guess or 0.0 for name, guess in guesses.items()}, self._workers)
        return TimeLeft(seconds, None not in guesses.values())

    def _waits(self, one: Planned) -> bool:
        return one.name not in self._running

    def _left(self, one: Planned) -> float | None:
        """Seconds that a stage still takes; None where nothing is known of its like."""
        running = self._running.get(one.name)
        elapsed = self._clock() - running.since if running else 0.0
        if running and running.steps and len(running.heard) > 1:
            (first, begin), (last, end) = running.heard
            return max(0.0, end + (end - begin) / (last - first) * (running.steps[1] - last) - self._clock())
        if (one.twin or one.cached) and not running:  # the result of another is taken
            return 0.0
        expected = expectation(one.name, self._took, self._before)
        return None if expected is None else max(0.0, expected - elapsed)


def steps_of(line: str) -> Steps | None:
    """The steps that a line tells: 114 of 375 in `step 114/375  loss 0.42`."""
    found = _STEPS.search(line)
    return (int(found[1]), int(found[2])) if found and int(found[1]) <= int(found[2]) else None


def expectation(name: str, took: Mapping[str, float], before: Mapping[str, float]) -> float | None:
    """Seconds that a stage may take: as before, times what its like took now ÷ before; else as long as its like.

    Its like is the same stage of the same recipe at another keep; where none of those is timed, of any recipe.

    Args:
        took: stage → seconds, in this run.
        before: the same of an earlier run.

    Returns:
        None where none of its like was ever timed.
    """
    if name in before:
        both = _like(name, {one: took[one] for one in took.keys() & before.keys()})
        then = sum(before[one] for one in both)
        return before[name] * (sum(both.values()) / then if then else 1.0)
    times = _like(name, took) or _like(name, before)
    return sum(times.values()) / len(times) if times else None


def _like(name: str, times: Mapping[str, float]) -> dict[str, float]:
    stage, recipe = _stage_and_recipe(name)
    of_stage = {one: seconds for one, seconds in times.items() if _stage_and_recipe(one)[0] == stage}
    return {one: seconds for one, seconds in of_stage.items() if _stage_and_recipe(one)[1] == recipe} or of_stage


def _stage_and_recipe(name: str) -> tuple[str, str]:
    return name.partition("@")[0], recipe_and_keep(candidate_of(name))[0]


def finish(order: Sequence[Planned], left: Mapping[str, float], workers: int) -> float:
    """Seconds until all stages are done, if each begins as soon as it can, in this order.

    Args:
        order: the stages that are not over; a stage's upstream stages before it.
        left: stage → seconds that it still takes.
        workers: stages side by side.
    """
    free = [0.0] * workers  # when each of them can begin another stage
    ends: dict[str, float] = {}
    for one in order:
        ready = max((ends[name] for name in (*one.upstream, one.twin) if name in ends), default=0.0)
        begin = max(ready, *ends.values()) if one.alone and ends else max(ready, heappop(free))
        ends[one.name] = begin + left[one.name]
        if one.alone:
            free = [ends[one.name]] * workers
        else:
            heappush(free, ends[one.name])
    return max(ends.values(), default=0.0)


def duration(seconds: float) -> str:
    """As a person says it: 8 s, 4 min 12 s, 2 h 5 min."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def roughly(seconds: float) -> str:
    """The same of an estimate: to ten seconds below a minute, to a minute below an hour, else to ten minutes."""
    unit = 10 if seconds < 55 else 60 if seconds < 3570 else 600
    return duration(unit * max(1, round(seconds / unit))).removesuffix(" 0 s").removesuffix(" 0 min")
