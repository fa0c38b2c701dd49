"""Recovery fine-tuning, for the stages finetune and control."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, set_seed

from eckart.factorization.pivoted_storage import pivot
from eckart.model import hf_format
from eckart.model.targets import Storage, Target
from eckart.recovery import Recovery
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.residual import Residual
from tasks.artifacts.task_spec import load_task
from tasks.config.schema import Seed, Trainer, section
from tasks.data.loading import encoded
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import explained, output
from tasks.training.loop import train


def recover(
    model_from: Path,
    to: Path,
    curve: Path,
    recovery: Recovery,
    *,
    residual: Residual | None = None,
    targets: Sequence[Target] = (),
    keep: float = 1.0,
    storage: Storage = "factors",
    source: Path = TEACHER,
) -> None:
    """Train the model in the folder `model_from` on the task, and save it in the folder `to`.

    Args:
        curve: file of the training curve.
        residual: method that prunes a residual during the first training; None if the model has no residual.
        storage: the form in which the factors are saved; in training they always have the form `factors`.
        source: folder of the dense model whose weights were factorized.
    """
    seed, trainer = section("seed", Seed), section("trainer", Trainer)
    set_seed(seed)
    task = load_task()
    kind = kind_of(task)
    objective = kind.objective()
    model, tokenizer = load(model_from, kind.auto)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)  # type: ignore[arg-type]

    def dense(folder: Path) -> PreTrainedModel:
        return load(folder, kind.auto)[0]

    problem = RecoveryProblem(
        model=model,
        targets=tuple(targets),
        keep=keep,
        seed=seed,
        objective=objective,
        teacher=lambda: dense(TEACHER).to(device),  # type: ignore[arg-type]
        source=lambda: dense(source),
    )
    with explained(), output(to) as folder:
        data, collate = encoded("train", tokenizer), kind.collate(tokenizer, model)
        steps = 0
        for training in recovery.trainings.values():
            rules = [residual.rule(problem, training.steps)] if residual and not steps else []
            rules = [*rules, *training.rules(problem)]  # type: ignore[attr-defined]  # every training of a recovery has `rules`
            options = {**training.options(), **trainer.options(), "seed": seed, "loss": objective.training_loss}
            steps += train(model, collate, data, curve, **options, rules=rules, before=steps)
        if storage == "pivoted":
            pivot(model)
        hf_format.save(model, folder)
        tokenizer.save_pretrained(folder)
