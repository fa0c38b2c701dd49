"""A study in which nothing is to be run: it needs no Prefect and no server, and MLflow is told what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flows.engine import stage_results, stages
from flows.engine.locks import WorkspaceUnusable
from flows.engine.stages import Outcome, Planned
from tasks.config import validation

COMPARISON = Path("reports/comparison.txt")


def plan() -> list[Planned]:
    """The stages of the study: a dvc.yaml that was cut off is not taken for a smaller one.

    Raises:
        WorkspaceUnusable: nothing writes a comparison, or as `stages.plan`.
    """
    planned = stages.plan()
    if not any(Path(path).match(str(COMPARISON)) for one in planned for path in one.writes):
        raise WorkspaceUnusable(f"dvc.yaml lacks the stage that writes {COMPARISON}: `git checkout dvc.yaml`")
    return planned


def outcomes() -> list[Outcome] | None:
    """What all stages wrote, told to MLflow; None if one of them is to be run.

    Raises:
        ParamsError: params.yaml has mistakes.
        WorkspaceUnusable: the working directory is no workspace, or cannot be written.
    """
    planned = plan()
    found = [one.cached for one in planned if one.cached]
    if len(found) < len(planned):
        return None
    stage_results.write_seconds(found)
    from flows.tracking.mirror import Mirror  # slow: it is of no use where something is to be run

    typed = validation.check()
    mirror = Mirror(typed["study"].name, planned, {})
    mirror.start(typed)
    for outcome in found:
        mirror.record(outcome)
    mirror.finish(complete=True)
    return found


def summary(outcomes: Sequence[Outcome]) -> str:
    """What became of the stages, in a sentence."""
    if all(outcome.status == "Cached" for outcome in outcomes):
        return "Nothing was recomputed: everything is up to date."
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{count} {status.lower()}" for status, count in counts.items())
