"""Saved logits in a recovery: what the teacher would teach beside the model, computed once for all candidates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, default_data_collator

import tasks.training.saved_logits as module
from eckart.calibration.losses import Objective, sum_loss
from eckart.recovery.distillation import Distillation
from eckart.recovery.finetune import Finetune
from eckart.recovery.recovery_problem import RecoveryProblem
from tasks.artifacts.paths import LOGITS
from tasks.config.schema import Trainer
from tasks.training.recovery import recover
from tests import tiny

BLOCKS = 10


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Examples of each forward pass of the teacher whose logits were saved."""
    seen: list[int] = []
    teach = module.teach

    def counted(teacher: Any, batch: Any, *others: Any) -> Any:
        seen.append(len(batch["input_ids"]))
        return teach(teacher, batch, *others)

    monkeypatch.setattr(module, "teach", counted)
    return seen


def blocks() -> Dataset:
    ids = torch.randint(tiny.VOCABULARY, (BLOCKS, 6), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 6] * BLOCKS, "labels": ids})


def student() -> PreTrainedModel:
    batch = tiny.collate(tiny.samples(3))
    return tiny.factorize(tiny.causal_llama(), {**batch, "labels": batch["input_ids"]}, lambda _: 2).eval()


def recovered(
    top: int | None, steps: int = 3, trainer: Trainer | None = None, teacher: Callable[[], Any] = tiny.causal_llama
) -> dict[str, torch.Tensor]:
    """The weights after a distillation in which the task's own loss hardly counts."""

    def predictions(outputs: Any, batch: Any) -> torch.Tensor:
        return outputs["logits"][:, :-1].flatten(0, 1)

    objective = Objective(sum_loss, sum_loss, None, predictions, classes=True)
    problem = RecoveryProblem(student(), (), 1.0, 0, objective, teacher=teacher, source=teacher)
    taught = Distillation(layers=0.0, logits=10.0, top=top)
    recovery = Finetune(steps=steps, batch_size=4, learning_rate=1e-3, warmup=0.0, distillation=taught)
    recover(problem, recovery, blocks, default_data_collator, Path("curve.jsonl"), trainer or Trainer())
    return dict(problem.model.state_dict())


def losses() -> list[float]:
    return [json.loads(line)["distill_logits"] for line in Path("curve.jsonl").read_text().splitlines()]


def test_all_classes_teach_what_the_teacher_does(passes: list[int]) -> None:
    """Three steps of four examples, so all ten are computed. float16 has three digits."""
    recovered(None)
    beside = losses()
    recovered(tiny.VOCABULARY)
    assert losses() == pytest.approx(beside, rel=1e-3)
    assert sum(passes) == BLOCKS
    recovered(1)
    assert all(few < loss / 2 for few, loss in zip(losses(), beside, strict=True))


def test_the_next_candidate_takes_what_is_there(passes: list[int]) -> None:
    first = recovered(3)
    again = recovered(3)
    assert sum(passes) == BLOCKS
    assert all(torch.equal(again[name], values) for name, values in first.items())
    recovered(4)
    assert sum(passes) == 2 * BLOCKS  # others are computed beside them
    recovered(3)
    assert sum(passes) == 2 * BLOCKS


def test_only_examples_that_are_drawn_are_computed(passes: list[int]) -> None:
    recovered(3, steps=2)
    assert sum(passes) == 8


def test_a_killed_computation_goes_on(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recovered(3)
    for file in [*LOGITS.rglob("*.npy"), *LOGITS.rglob("examples")]:
        file.unlink()
    del passes[:]
    counted, append = module.teach, module._append

    def killed(*given: Any) -> int:
        if len(passes) == 2:
            raise KeyboardInterrupt
        return append(*given)

    monkeypatch.setattr(module, "_append", killed)
    with pytest.raises(KeyboardInterrupt):
        recovered(3)
    monkeypatch.setattr(module, "_append", append)
    resumed = recovered(3)
    assert counted is module.teach
    assert passes == [4, 4, 4, 2]
    assert all(torch.equal(resumed[name], values) for name, values in whole.items())


def test_those_of_another_teacher_are_removed(passes: list[int]) -> None:
    def other() -> PreTrainedModel:
        model = tiny.causal_llama()
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        return model

    recovered(3)
    (before,) = (path for path in LOGITS.iterdir() if path.is_dir())
    recovered(3, teacher=other)
    assert sum(passes) == 2 * BLOCKS
    assert not before.exists()


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"micro_batch": 2, "checkpoint_activations": True}])
def test_precision_and_micro_batches_hold_for_the_teacher_too(options: dict[str, Any]) -> None:
    plain = recovered(3)
    other = recovered(3, trainer=Trainer(**options))
    assert any(not torch.equal(other[name], values) for name, values in plain.items())
    for name, values in plain.items():
        torch.testing.assert_close(other[name], values, rtol=0.1, atol=0.01)
