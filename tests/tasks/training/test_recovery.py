"""Recovery fine-tuning of a model in memory: it is the training that the recovery describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from eckart.recovery import Recovery
from eckart.recovery.recovery_problem import RecoveryProblem
from tasks.config.schema import Trainer
from tasks.nlp_tasks import kind_of
from tasks.training.recovery import recover
from tests.training import train
from tests.workspace import a_task, bert, collate, rows

STEPS = {"steps": 3, "batch_size": 8, "learning_rate": 1e-3}
RECOVERIES = ({"kind": "finetune", **STEPS}, {"kind": "in_turn", "first": STEPS, "then": STEPS})


def test_without_a_step_no_teacher_is_needed(tmp_path: Path) -> None:
    def none() -> Any:
        raise AssertionError

    objective = kind_of(a_task("classification", ("no", "yes"), "accuracy")).objective()
    problem = RecoveryProblem(bert(), (), 1.0, 7, objective, teacher=none, source=none)
    settings = {"kind": "finetune", "steps": 0, "distillation": {"layers": 0.0, "logits": 1.0, "top": 4}}
    recover(
        problem, TypeAdapter(Recovery).validate_python(settings), none, collate(), tmp_path / "curve.jsonl", Trainer()
    )


@pytest.mark.parametrize("settings", RECOVERIES)
def test_a_recovery_is_its_trainings_one_after_the_other(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The second training begins anew, and its points follow those of the first in the curve."""
    model, expected = bert(), bert()
    objective = kind_of(a_task("classification", ("no", "yes"), "accuracy")).objective()
    problem = RecoveryProblem(model, (), 1.0, 7, objective, teacher=bert, source=bert)
    recovery = TypeAdapter(Recovery).validate_python(settings)
    recover(problem, recovery, rows, collate(), tmp_path / "curve.jsonl", Trainer())
    for number, training in enumerate(recovery.trainings.values()):
        options = {**vars(training.optimization), "seed": 7, "before": 3 * number, "loss": objective.training_loss}
        train(expected, collate(), rows(), tmp_path / "expected.jsonl", **options)
    assert all(torch.equal(values, expected.state_dict()[name]) for name, values in model.state_dict().items())
    assert (tmp_path / "curve.jsonl").read_text() == (tmp_path / "expected.jsonl").read_text()
