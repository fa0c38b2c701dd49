"""The plan of a study, and the shortcut if it is up to date: only record results that MLflow lacks, without Prefect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flows.engine import stage_results, stages
from flows.engine.locks import WorkspaceUnusable
from flows.engine.stages import Outcome, Planned
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import stage_name
from tasks.artifacts.paths import COMPARISON_TEXT
from tasks.config import validation


def plan(clear: bool = False) -> list[Planned]:
    """Return the stages of the study; `clear` as in `stages.plan`.

    Raises:
        WorkspaceUnusable: dvc.yaml lacks the stage of the final table. It was cut off, and may lack other stages, too.
    """
    planned = stages.plan(clear)
    if not any(Path(path).match(str(COMPARISON_TEXT)) for stage in planned for path in stage.writes):
        raise WorkspaceUnusable(f"dvc.yaml lacks the stage that writes {COMPARISON_TEXT}: `git checkout dvc.yaml`")
    return planned


def plan_with(candidate: str, *others: str) -> dict[str, Planned]:
    """Return the stages of the study by name, if `candidate` belongs to it and is up to date.

    Args:
        others: stages that must be up to date, too, if the study has them.

    Raises:
        EckartError: there is no such candidate, or a stage is not up to date.
    """
    planned, finetuned = {stage.name: stage for stage in plan()}, stage_name("finetune", candidate)
    if finetuned not in planned:
        candidates = [name.partition("@")[2] for name in planned if name.startswith(stage_name("finetune", ""))]
        raise EckartError(f"there is no candidate {candidate}; the candidates are {', '.join(candidates)}")
    if stale := [name for name in (finetuned, *others) if name in planned and not planned[name].cached]:
        raise EckartError(f"{', '.join(stale)} is not up to date: run `eckart run` first")
    return planned


def outcomes() -> list[Outcome] | None:
    """Return the outcomes of all stages after recording them in MLflow; None if a stage has to run."""
    planned = plan(clear=True)
    cached = [stage.cached for stage in planned if stage.cached]
    if len(cached) < len(planned):
        return None
    stage_results.write_seconds(cached)
    from flows.tracking.mirror import Mirror  # a slow import, not needed if a stage has to run

    typed = validation.check()
    mirror = Mirror(typed["study"].name, planned, {})
    mirror.start(typed)
    for outcome in cached:
        mirror.record(outcome)
    mirror.finish(complete=True)
    return cached


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return a text that says how many stages were executed, restored and cached."""
    if all(outcome.status == "Cached" for outcome in outcomes):
        return "Nothing was recomputed: everything is up to date."
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{count} {status.lower()}" for status, count in counts.items())
