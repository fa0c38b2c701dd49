"""What a candidate and its stages are called, here and in dvc.yaml: `kfac-0.33` and `finetune@kfac-0.33`.

Apart from what else candidates share: every stage names itself so, also those that know no candidate.
"""

from __future__ import annotations


def candidate_name(recipe: str, keep: str) -> str:
    """The name of a candidate, such as `kfac-0.33`."""
    return f"{recipe}-{keep}"


def recipe_and_keep(candidate: str) -> tuple[str, str]:
    """`kfac` and `0.33` of `kfac-0.33`; the first dash divides, since a keep may have one (`1e-05`) and no recipe."""
    recipe, _, keep = candidate.partition("-")
    return recipe, keep


def stage_name(stage: str, candidate: str) -> str:
    """The name of a candidate's stage, such as `finetune@kfac-0.33`."""
    return f"{stage}@{candidate}"


def candidate_of(stage: str) -> str:
    """`kfac-0.33` of `finetune@kfac-0.33`; empty for a stage that all candidates share."""
    return stage.partition("@")[2]
