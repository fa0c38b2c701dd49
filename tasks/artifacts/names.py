"""Names of candidates and of stages, as in dvc.yaml: `kfac-0.33`, `finetune@kfac-0.33`, `importance_shard@a`."""

from __future__ import annotations

SHARD_STAGE = "importance_shard"
"""The stage of each of `importance.shards`, which all candidates share."""
FIGURES_STAGE = "figures"
"""The stage of each of `study.figures`, which shows all candidates."""


def candidate_name(recipe: str, keep: str) -> str:
    """Return the name of a candidate, such as `kfac-0.33`."""
    return f"{recipe}-{keep}"


def recipe_and_keep(candidate: str) -> tuple[str, str]:
    """Split `kfac-0.33` into `kfac` and `0.33` at the first dash: only the keep may contain a dash (`1e-05`)."""
    recipe, _, keep = candidate.partition("-")
    return recipe, keep


def stage_name(stage: str, item: str) -> str:
    """Return the name of the stage of an item: `finetune@kfac-0.33`, `importance_shard@a`, `figures@results`."""
    return f"{stage}@{item}"


def candidate_of(stage: str) -> str:
    """Return the candidate of a stage: `kfac-0.33` for `finetune@kfac-0.33`; "" if all candidates share the stage."""
    name, _, item = stage.partition("@")
    return "" if name in (SHARD_STAGE, FIGURES_STAGE) else item
