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
from eckart.rules import Rule
from eckart.targets import weight_of
from tasks.calibration import load_targets
from tasks.candidates import CURVES, FACTORIZED, FINETUNED, source_model
from tasks.dataset import load_task, tokenized
from tasks.models import TEACHER, load
from tasks.params import Seed, section
from tasks.stage import candidate, explained, output, run_candidate
from tasks.training import train


def finetune(recipe: str, keep: str) -> None:
    """Train the factorized model on the task as the recipe's recovery and residual say."""
    name, part = candidate(recipe, keep), f"recipes.{recipe}"
    recovery = section(f"{part}.recovery", Recovery)
    residual = section(f"{part}.residual", Residual | None)
    seed = section("seed", Seed)
    set_seed(seed)
    model, tokenizer = load(FACTORIZED / name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)  # type: ignore[arg-type]
    with explained(), output(FINETUNED / name) as folder:
        rules = list(_rules(model, name, float(keep), recovery, residual, seed))
        data, curve = tokenized("train", tokenizer), CURVES / f"{name}.jsonl"
        train(model, tokenizer, data, curve, **recovery.options(), seed=seed, rules=rules)
        hub.save(model, folder)
        tokenizer.save_pretrained(folder)


def _rules(
    model: PreTrainedModel, name: str, keep: float, recovery: Recovery, residual: Residual | None, seed: int
) -> Iterator[Rule]:
    classification = load_task().kind == "classification"
    if residual:
        yield RowPruning(model, residual, _budget(model, keep), recovery.steps)
    if isinstance(recovery, MixedRank):
        source, _ = load(source_model(name, TEACHER))
        weights = {target: weight_of(source.get_submodule(target)) for target in factorized(model)}
        yield MixedRankRule(model, weights, recovery, classification, seed)
    if recovery.distillation:
        teacher, _ = load(TEACHER)
        yield DistillationRule(teacher.to(model.device), recovery.distillation, classification)  # type: ignore[arg-type]


def _budget(model: PreTrainedModel, keep: float) -> int:
    """Parameters that `keep` leaves to the factorized targets, after those that stay dense."""
    targets, ranks = load_targets().targets, factorized(model)
    return allowance(targets, keep) - sum(target.parameters for target in targets if target.name not in ranks)


if __name__ == "__main__":
    run_candidate("finetune", finetune)
