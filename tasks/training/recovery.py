"""Recovery fine-tuning, for the stages finetune and control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from eckart.factorization.pivoted_storage import pivot
from eckart.model.targets import Storage
from eckart.recovery import Recovery
from eckart.recovery.recovery_problem import RecoveryProblem
from eckart.residual import Residual
from tasks.config.schema import Trainer
from tasks.models.device import to_device
from tasks.models.model_io import TEACHER, load
from tasks.nlp_tasks._prediction import Collate
from tasks.training.loop import train
from tasks.training.saved_logits import saved_logits


def load_teacher(auto: type[Any]) -> PreTrainedModel:
    """Load the original model for distillation, onto the device on which the stage trains."""
    model, _ = load(TEACHER, auto)
    to_device(model)
    return model


def recover(
    problem: RecoveryProblem,
    recovery: Recovery,
    examples: Callable[[], Dataset],
    collate: Collate,
    curve: Path,
    trainer: Trainer,
    *,
    residual: Residual | None = None,
    storage: Storage = "factors",
) -> None:
    """Train the model of `problem` on the task in place.

    Args:
        examples: function that loads the training examples; it is not called if there is no step.
        collate: function that makes a batch from examples.
        curve: file of the training curve.
        residual: method that prunes a residual during the first training; None if the model has no residual.
        storage: the form that the factors have at the end; in training they always have the form `factors`.
    """
    steps = 0
    data = examples() if any(training.steps for training in recovery.trainings.values()) else []
    for training in recovery.trainings.values():
        rules = [residual.rule(problem, training.steps)] if residual and not steps else []
        given = replace(problem, teacher_logits=partial(saved_logits, problem, data, collate, training, trainer))
        if training.steps:  # without a step, no teacher is needed
            rules += training.rules(given)  # type: ignore[attr-defined]  # every training of a recovery has `rules`
        objective = problem.objective
        steps += train(
            problem.model,
            collate,
            data,
            curve,
            training,
            trainer,
            seed=problem.seed,
            rules=rules,
            loss=objective.training_loss,
            dropout=objective.dropout,
            before=steps,
        )
    if storage == "pivoted":
        pivot(problem.model)
