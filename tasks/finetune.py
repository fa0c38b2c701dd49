"""Finetune: heal a factorized model, and store it as its recipe says → models/finetuned/RECIPE-KEEP and its curve."""

from __future__ import annotations

from eckart.model.targets import Storage
from eckart.recipe_parts import Source, train_together
from eckart.recovery import Recovery
from eckart.residual import Residual
from tasks.artifacts.importance_files import load_targets
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import CURVES, FACTORIZED, FINETUNED, source_model
from tasks.config.schema import section
from tasks.models.model_io import DENSE
from tasks.runtime.stage_runner import run_candidate
from tasks.training.recovery import recover


def finetune(recipe: str, keep: str) -> None:
    """Train the factors on the task as the recipe's recovery and residual say; then bring them into its storage."""
    name, part = candidate_name(recipe, keep), f"recipes.{recipe}"
    recover(
        FACTORIZED / name,
        FINETUNED / name,
        CURVES / f"{name}.jsonl",
        section(f"{part}.recovery", Recovery),
        residual=section(f"{part}.residual", Residual | None),
        targets=load_targets().targets,
        keep=float(keep),
        storage=section(f"{part}.storage", Storage),
        source=source_model(name, DENSE[section(f"{part}.source", Source)]),
    )


def _is_shared(recipe: str) -> bool:
    """Whether it trains, and several processes can do so together."""
    return train_together([section(f"recipes.{recipe}.recovery", Recovery)])


if __name__ == "__main__":
    run_candidate("finetune", finetune, trains=_is_shared)
