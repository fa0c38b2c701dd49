"""Finetune: heal a factorized model → models/finetuned/RECIPE-KEEP and its training curve."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, set_seed

from eckart import hub
from eckart.methods import Source, train_together
from eckart.recovery import Recovery
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.residual import Residual
from tasks.batches import encoded
from tasks.candidate_files import CURVES, FACTORIZED, FINETUNED, source_model
from tasks.dataset import load_task
from tasks.importance_files import load_targets
from tasks.kinds import kind_of, objective_of
from tasks.models import DENSE, TEACHER, load
from tasks.params import Seed, Trainer, section
from tasks.stage import candidate_name, explained, output, run_candidate
from tasks.training import train


def finetune(recipe: str, keep: str) -> None:
    """Train the factorized model on the task as the recipe's recovery and residual say."""
    name, part = candidate_name(recipe, keep), f"recipes.{recipe}"
    recovery = section(f"{part}.recovery", Recovery)
    residual = section(f"{part}.residual", Residual | None)
    seed, trainer = section("seed", Seed), section("trainer", Trainer)
    set_seed(seed)
    task = load_task()
    kind, objective = kind_of(task), objective_of(task)
    model, tokenizer = load(FACTORIZED / name, kind.auto)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)  # type: ignore[arg-type]

    def dense(folder: Path) -> PreTrainedModel:
        return load(folder, kind.auto)[0]

    problem = RecoveryProblem(
        model=model,
        targets=load_targets().targets,
        keep=float(keep),
        seed=seed,
        objective=objective,
        teacher=lambda: dense(TEACHER).to(device),  # type: ignore[arg-type]
        source=lambda: dense(source_model(name, DENSE[section(f"{part}.source", Source)])),
    )
    with explained(), output(FINETUNED / name) as folder:
        data, collate = encoded("train", tokenizer), kind.collate(tokenizer, model)
        done = 0
        for training in recovery.trainings.values():
            rules = [residual.rule(problem, training.steps)] if residual and not done else []
            rules = [*rules, *training.rules(problem)]
            options = {**training.options(), **trainer.options(), "seed": seed, "loss": objective.training_loss}
            done += train(model, collate, data, CURVES / f"{name}.jsonl", **options, rules=rules, before=done)
        hub.save(model, folder)
        tokenizer.save_pretrained(folder)


def _is_shared(recipe: str) -> bool:
    """Whether it trains, and several processes can do so together."""
    return train_together([section(f"recipes.{recipe}.recovery", Recovery)])


if __name__ == "__main__":
    run_candidate("finetune", finetune, trains=_is_shared)
