"""Stage finetune: train a factorized model and convert its factors to the recipe's storage →
models/finetuned/RECIPE-KEEP and a training curve."""

from __future__ import annotations

from functools import partial

from pydantic import BaseModel
from transformers import PreTrainedModel, set_seed

from eckart.model.experts import unfuse
from eckart.model.targets import Storage, Targets
from eckart.recipe_parts import Source, train_together
from eckart.recovery import Recovery
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.residual import Residual
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import CURVES, FACTORIZED, FINETUNED, TARGETS, source_model
from tasks.artifacts.task_spec import load_task
from tasks.config.params_file import section
from tasks.config.schema import Seed, Trainer
from tasks.data.loading import encoded
from tasks.models.device import to_device
from tasks.models.model_io import SOURCE_FOLDERS, load, save
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import explained, output, run_candidate
from tasks.training.recovery import load_teacher, recover


class RecoveryParts(BaseModel):
    """Parts of a recipe on which the recovery, the fine-tuning after the factorization, depends."""

    source: Source
    residual: Residual | None
    storage: Storage
    recovery: Recovery


def finetune(recipe: str, keep: str) -> None:
    """Fine-tune the factorized model as the recipe says. Then convert the factors to the recipe's storage."""
    name, parts = candidate_name(recipe, keep), section(f"recipes.{recipe}", RecoveryParts)
    seed, trainer, kind = section("seed", Seed), section("trainer", Trainer), kind_of(load_task())
    set_seed(seed)
    model, tokenizer = load(FACTORIZED / name, kind.auto)
    to_device(model)
    targets = Targets.model_validate_json(TARGETS.read_text()).targets

    def source() -> PreTrainedModel:
        dense, _ = load(source_model(name, SOURCE_FOLDERS[parts.source]), kind.auto)
        unfuse(dense, targets)
        return dense

    problem = RecoveryProblem(
        model=model,
        targets=targets,
        keep=float(keep),
        seed=seed,
        objective=kind.objective(),
        teacher=lambda: load_teacher(kind.auto),
        source=source,
    )
    curve = CURVES / f"{name}.jsonl"
    with explained(), output(FINETUNED / name) as folder:
        data, collate = partial(encoded, "train", tokenizer), kind.collate(tokenizer, model)
        recover(problem, parts.recovery, data, collate, curve, trainer, residual=parts.residual, storage=parts.storage)
        save(model, folder)


if __name__ == "__main__":
    run_candidate(
        "finetune", finetune, lambda recipe: train_together([section(f"recipes.{recipe}.recovery", Recovery)])
    )
