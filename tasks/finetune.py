"""Stage finetune: train a factorized model and convert its factors to the recipe's storage →
models/finetuned/RECIPE-KEEP and a training curve."""

from __future__ import annotations

from pydantic import BaseModel

from eckart.model.targets import Storage, Targets
from eckart.recipe_parts import Source, train_together
from eckart.recovery import Recovery
from eckart.residual import Residual
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import CURVES, FACTORIZED, FINETUNED, TARGETS, source_model
from tasks.config.schema import section
from tasks.models.model_io import DENSE
from tasks.runtime.stage_runner import run_candidate
from tasks.training.recovery import recover


class RecoveryParts(BaseModel):
    """Parts of a recipe on which the recovery, the fine-tuning after the factorization, depends."""

    source: Source
    residual: Residual | None
    storage: Storage
    recovery: Recovery


def finetune(recipe: str, keep: str) -> None:
    """Fine-tune the factorized model as the recipe says. Then convert the factors to the recipe's storage."""
    name, parts = candidate_name(recipe, keep), section(f"recipes.{recipe}", RecoveryParts)
    recover(
        FACTORIZED / name,
        FINETUNED / name,
        CURVES / f"{name}.jsonl",
        parts.recovery,
        residual=parts.residual,
        targets=Targets.model_validate_json(TARGETS.read_text()).targets,
        keep=float(keep),
        storage=parts.storage,
        source=source_model(name, DENSE[parts.source]),
    )


if __name__ == "__main__":
    run_candidate(
        "finetune", finetune, lambda recipe: train_together([section(f"recipes.{recipe}.recovery", Recovery)])
    )
