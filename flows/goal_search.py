"""Search for the values of keep that meet study.goals: run the study again and again with further values."""

from __future__ import annotations

import re
from collections.abc import Callable

from tasks.config import validation, yaml_edit
from tasks.config.params_file import PARAMS, ParamsError, parse, read
from tasks.report.goals import goal_results, goal_text
from tasks.report.numbers import score, size, times
from tasks.report.result_files import load_results
from tasks.report.results import Results

_TOO_SMALL = re.compile(r"^\s*\w+@\S+-([\d.e-]+): .*\bkeep=\S+ is too small for\b", re.MULTILINE)
"""A line on a failed stage of a candidate: NoRank of eckart/ranks/budget.py. Its keep may be that of a part."""


def pursue(run: Callable[[], None], log: Callable[[str], None]) -> None:
    """Run the study with further values of keep until no other value can meet a goal more closely.

    Each round adds one value for each recipe and goal, unless no value can bring the recipe closer to the goal. All
    recipes are run at every value, so that they can be compared. The values are written into params.yaml, so that an
    interrupted search can continue; those whose round did not finish are taken out again, since they may be too small.
    A line about each value is logged. After a value that is too small for the ranks of a recipe, no smaller one is
    tried.

    Raises:
        ParamsError: study.goals is empty.
        StudyFailed: some stages failed, and not because of a value that was added here.
    """
    if not validation.typed_section("study").goals:
        raise ParamsError(
            f"{PARAMS}: study.goals is empty: write goals, such as [{{largest_drop: 0.01}}], or run without --goals"
        )
    logged: set[str] = set()
    added: set[float] = set()
    too_small = 0.0
    while True:
        try:
            run()
        except BaseException as error:  # such as Ctrl-C
            failed = {float(keep) for keep in _TOO_SMALL.findall(str(error))} & added
            if out := failed or added:
                _set_keeps(_keeps() - out)
                why = "Too small for a recipe's ranks" if failed else "Not finished"
                log(f"{why}, so taken out of {PARAMS} again: keep {', '.join(map(str, sorted(out)))}.")
            if not failed:
                raise
            added -= failed
            too_small = max(too_small, *failed)
            continue
        results = load_results()
        for keep in (keep for keep in results.keeps if keep not in logged):
            log(_line(results, keep))
            logged.add(keep)
        open_goals = [goal for goal in goal_results(results, too_small) if goal.closer]
        if not open_goals:
            return
        tried = list(dict.fromkeys(goal.closer for goal in open_goals if goal.closer))
        reasons = "; ".join(f"{goal.recipe}, {goal_text(goal.goal)}" for goal in open_goals)
        log(f"Trying keep {', '.join(tried)}, now in {PARAMS}, for {reasons}.")
        added = {*map(float, tried)}
        validation.typed_section("study")  # raises if the user's edits have mistakes
        _set_keeps(_keeps() | added)


def _keeps() -> set[float]:
    """Return the values as params.yaml writes them (1, not 1.0); the user may have edited them during the run."""
    return {*parse(read()["study"]["keeps"], tuple[int | float, ...], PARAMS, "study.keeps")}


def _set_keeps(keeps: set[float]) -> None:
    yaml_edit.update({"study": {"keeps": sorted(keeps, reverse=True)}})


def _line(results: Results, keep: str) -> str:
    """Return a line about the best candidate at `keep`, chosen on validation examples."""
    best = results.best(results.at(keep))
    assert best is not None  # each recipe has a candidate at each keep
    return (
        f"keep {keep}: {best.name} has {results.metric.title} {score(best.recovered)} on test examples (original "
        f"model: {score(results.dense.score.metric)}), {size(best.evaluation.size.bytes)}, "
        f"{times(best.benchmark.speedup.median)} as fast"
    )
