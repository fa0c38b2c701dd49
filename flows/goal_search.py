"""Search for the keeps that meet study.goals by running the study with more keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasks.config import schema, yaml_edit
from tasks.config.schema import PARAMS
from tasks.report.goals import GoalResult, goal_results, goal_text
from tasks.report.results import load_results


def pursue(run: Callable[[], None], say: Callable[[str], None]) -> None:
    """Run the study, and again with one more keep for each goal and recipe, until none meets a goal more closely.

    Each keep is run for all recipes, so that they can be compared. The keeps are written into params.yaml, from which
    an interrupted search continues.

    Raises:
        ParamsError: study.goals is empty.
        StudyFailed: a run failed.
    """
    if not schema.section("study", schema.Study).goals:
        raise schema.ParamsError(
            f"{PARAMS}: study.goals is empty; write a goal such as [{{largest_drop: 0.01}}], or run without --goals"
        )
    run()
    while wanted := [goal for goal in goal_results(load_results()) if goal.closer]:
        keeps = list(dict.fromkeys(goal.closer for goal in wanted if goal.closer))
        say(f"Looking closer at keep {', '.join(keeps)}, now in {PARAMS}, for {_enumerated(wanted)}.")
        more = {*schema.section("study.keeps", list), *map(float, keeps)}
        yaml_edit.update({"study": {"keeps": sorted(more, reverse=True)}})
        run()


def _enumerated(wanted: Sequence[GoalResult]) -> str:
    return "; ".join(f"{goal.recipe}, {goal_text(goal.goal)}" for goal in wanted)
