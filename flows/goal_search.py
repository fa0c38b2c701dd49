"""The keeps that meet study.goals, found by running the study with more of them, each a keep like any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tasks.config import schema, validation, yaml_edit
from tasks.config.schema import PARAMS
from tasks.report.goals import Asked, asked, words
from tasks.report.results import load_results


def pursue(run: Callable[[], None], say: Callable[[str], None]) -> None:
    """Run the study, and again with a keep more for each goal and recipe, until none meets a goal more closely.

    Each keep is run for all recipes, so that they can be compared there. The keeps are written into params.yaml: what
    was broken off goes on from there.

    Raises:
        ParamsError: study.goals is empty.
        StudyFailed: as a run does.
    """
    if not validation.typed_section("study").goals:
        raise schema.ParamsError(
            f"{PARAMS}: study.goals is empty; write what you ask for, such as [{{largest_drop: 0.01}}], "
            "or run without --goals"
        )
    run()
    while wanted := [one for one in asked(load_results()) if one.closer]:
        keeps = list(dict.fromkeys(one.closer for one in wanted if one.closer))
        say(f"Looking closer at keep {', '.join(keeps)}, now in {PARAMS}, for {_enumerated(wanted)}.")
        more = {*schema.section("study.keeps", list), *map(float, keeps)}
        yaml_edit.update({"study": {"keeps": sorted(more, reverse=True)}})
        run()


def _enumerated(wanted: Sequence[Asked]) -> str:
    return "; ".join(f"{one.recipe}, {words(one.goal)}" for one in wanted)
