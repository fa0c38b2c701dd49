"""Finetune: heal a factorized model → models/finetuned/RECIPE-KEEP and its training curve."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, set_seed

from eckart import hub
from eckart.budget import allowance
from eckart.layers import factorized
from eckart.recovery import MixedRank, Recovery
from eckart.recovery.distillation import DistillationRule
from eckart.recovery.mixed_rank import MixedRankRule
from eckart.residual import Residual, RowPruning
from eckart.targets import weight_of
from eckart.training_rules import Rule
from tasks.batches import encoded
from tasks.candidate_files import CURVES, FACTORIZED, FINETUNED, source_model
from tasks.dataset import Task, load_task
from tasks.importance_files import load_targets
from tasks.kinds import kind_of
from tasks.kinds.kind import loss_of_training
from tasks.models import TEACHER, load
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
    kind = kind_of(task)
    model, tokenizer = load(FACTORIZED / name, kind.auto)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)  # type: ignore[arg-type]
    with explained(), output(FINETUNED / name) as folder:
        rules = list(_rules(model, task, name, float(keep), recovery, residual, seed))
        data, collate = encoded("train", tokenizer), kind.collate(tokenizer, model)
        options = {**recovery.options(), **trainer.options(), "seed": seed, "loss": loss_of_training(kind)}
        train(model, collate, data, CURVES / f"{name}.jsonl", **options, rules=rules)
        hub.save(model, folder)
        tokenizer.save_pretrained(folder)


def _rules(
    model: PreTrainedModel,
    task: Task,
    name: str,
    keep: float,
    recovery: Recovery,
    residual: Residual | None,
    seed: int,
) -> Iterator[Rule]:
    kind, classes = kind_of(task), task.kind != "regression"
    if residual:
        yield RowPruning(model, residual, _budget(model, keep), recovery.steps)
    if isinstance(recovery, MixedRank):
        source, _ = load(source_model(name, TEACHER), kind.auto)
        weights = {target: weight_of(source.get_submodule(target)) for target in factorized(model)}
        yield MixedRankRule(model, weights, recovery, classes, seed, kind.logits, loss_of_training(kind))
    if recovery.distillation:
        teacher, _ = load(TEACHER, kind.auto)
        teacher.to(model.device)  # type: ignore[arg-type]
        yield DistillationRule(teacher, recovery.distillation, classes, kind.logits)


def _is_shared(recipe: str) -> bool:
    """Whether several processes can train together."""
    recovery = section(f"recipes.{recipe}.recovery", Recovery)
    return recovery.steps > 0 and not isinstance(recovery, MixedRank)


def _budget(model: PreTrainedModel, keep: float) -> int:
    """Parameters that `keep` leaves to the factorized targets, after those that stay dense."""
    targets, ranks = load_targets().targets, factorized(model)
    return allowance(targets, keep) - sum(target.parameters for target in targets if target.name not in ranks)


if __name__ == "__main__":
    run_candidate("finetune", finetune, trains=_is_shared)
