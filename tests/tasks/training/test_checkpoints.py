"""Trainings that are killed resume to the same bytes, and never from another training's checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.predictions import logits_of
from eckart.factorization.factorize import rest
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import factorize_target, low_rank_layers
from eckart.model.targets import find_targets, weight_of
from eckart.recovery.distillation import Distillation, DistillationRule, TopLogitsRule
from eckart.recovery.teacher_logits import TeacherLogits, largest
from eckart.residual.sparse_rows import RowPruning, SparseRows
from eckart.training.rules import Rule
from tasks.training.checkpoints import CHECKPOINTS, SECONDS, digest
from tests import tiny
from tests.training import train
from tests.workspace import bert, collate, rows, tiny_tokenizer

OPTIONS = {"batch_size": 8, "learning_rate": 1e-3, "warmup": 0.1, "weight_decay": 0.01, "seed": 0, "steps": 22}
"""A point of the curve is two steps, so that a training may be killed between two checkpoints."""
CURVE = Path("curve.jsonl")


class Killed(Exception):
    pass


class Kill(Rule):
    """A rule with a memory, and with a death at a step."""

    def __init__(self, step: int | None = None) -> None:
        self.step = step
        self.seen = torch.zeros(1)

    def after_update(self, step: int) -> None:
        self.seen += step
        if step == self.step:
            raise Killed

    def measures(self) -> dict[str, float]:
        return {"seen": float(self.seen)}

    def state(self) -> dict[str, Tensor]:
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.seen = state["seen"]


@pytest.fixture(autouse=True)
def _workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, with a checkpoint at every logged point."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECONDS, "0")


def trained(rule: Rule, data: Dataset | None = None, **changes: Any) -> bytes:
    """The weights that training leaves."""
    model = bert()
    train(model, collate(), rows() if data is None else data, CURVE, rules=[rule], **{**OPTIONS, **changes})
    return save(dict(model.state_dict()))


def killed(step: int, **changes: Any) -> None:
    with pytest.raises(Killed):
        trained(Kill(step), **changes)


def steps_taken(output: str) -> int:
    return int(output.partition("goes on from step ")[2].split()[0]) if "goes on" in output else 0


def test_a_killed_training_resumes_to_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where in its schedule the learning rate is."""
    cosine = {"schedule": "cosine", "last_rate": 0.1}
    whole, curve = trained(Kill(), **cosine), CURVE.read_text()
    for step in (2, 20):
        killed(step, **cosine)
        assert list(CHECKPOINTS.rglob("digest"))
        CURVE.unlink()  # as DVC does before it runs a stage
        capsys.readouterr()
        assert trained(Kill(), **cosine) == whole
        assert CURVE.read_text() == curve
        assert step - 2 <= steps_taken(capsys.readouterr().out) <= step
        assert not list(CHECKPOINTS.rglob("*.safetensors"))


def trained_mixture(kill: int | None) -> bytes:
    """Its folders have other names, and a tensor for each expert."""
    sizes = {"vocab_size": bert().config.vocab_size, "num_labels": 2, "num_local_experts": 4, "pad_token_id": 0}
    model = tiny.build("MixtralForSequenceClassification", **tiny.GROUPED, **sizes)
    train(model, collate(), rows(), CURVE, rules=[Kill(kill)], **OPTIONS)
    return save(dict(model.state_dict()))


def test_a_model_whose_folders_have_other_tensors_resumes_to_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    whole = trained_mixture(None)
    with pytest.raises(Killed):
        trained_mixture(11)
    capsys.readouterr()
    assert trained_mixture(None) == whole
    assert steps_taken(capsys.readouterr().out) == 10


def taught_by(teacher: PreTrainedModel, kill: int | None = None) -> bytes:
    rule = DistillationRule(teacher, Distillation(layers=1.0, logits=1.0, temperature=2.0), classes=True)
    model = bert()
    train(model, collate(), rows(), CURVE, rules=[rule, Kill(kill)], **OPTIONS)
    return save(dict(model.state_dict()))


def test_another_teacher_starts_anew() -> None:
    first, second = bert(), bert()
    second.classifier.weight.data *= -1
    whole = taught_by(second)
    with pytest.raises(Killed):
        taught_by(first, 11)
    assert taught_by(second) == whole


@pytest.mark.parametrize("top", [1, 4])
def test_saved_logits_of_another_teacher_are_told_apart(top: int) -> None:
    settings = Distillation(layers=0.0, logits=1.0, top=top)

    def rule(logits: Tensor) -> TopLogitsRule:
        saved = (part.numpy()[None] for part in largest(logits, top, 1.0))
        return TopLogitsRule(TeacherLogits({}, *saved), settings, logits_of)

    logits = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
    digests = [digest(bert(), rows(), [rule(values)], {}) for values in (logits, logits, -logits)]
    assert digests[0] == digests[1] != digests[2]


def pruned_and_taught(kill: int | None) -> bytes:
    """Rows of a residual are pruned while the dense model teaches: rules whose state is in scores and in a model."""
    model, teacher = bert(), bert()
    batch = tiny_tokenizer()(["the plot is dull"], return_tensors="pt")
    for target in find_targets(model, batch).targets:
        weight = weight_of(model.get_submodule(target.name))
        left, right = decompose(weight, ErrorNorm()).truncate(2)
        factorize_target(model, target.name, left, right, rest(weight, left, right))
    settings = SparseRows(kind="sparse_rows", low_rank=0.2, smoothing=0.85, start=0.1, end=0.3, window=None)
    budget = (
        sum(layer.left.weight.numel() + layer.right.weight.numel() for layer in low_rank_layers(model).values()) + 2000
    )
    taught = DistillationRule(teacher, Distillation(layers=1.0, logits=1.0, temperature=2.0), classes=True)
    rules = [RowPruning(model, settings, budget, OPTIONS["steps"]), taught, Kill(kill)]
    train(model, collate(), rows(), CURVE, rules=rules, **OPTIONS)
    return save(dict(model.state_dict()))


def test_pruning_and_distillation_resume_to_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    whole, curve = pruned_and_taught(None), CURVE.read_text()
    with pytest.raises(Killed):
        pruned_and_taught(11)
    capsys.readouterr()
    assert pruned_and_taught(None) == whole
    assert CURVE.read_text() == curve
    assert steps_taken(capsys.readouterr().out) == 10


@pytest.mark.parametrize("changes", [{"learning_rate": 2e-3}, {"data": rows().select(range(50))}])
def test_other_settings_or_data_start_anew(changes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    killed(4)
    trained(Kill(), **changes)
    assert steps_taken(capsys.readouterr().out) == 0


def test_a_step_of_more_processes_is_another_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes with 4 examples each take steps of 8, one process with 4 examples takes steps of 4."""
    monkeypatch.setattr("tasks.training.loop._share_of_process", lambda size: 4)
    killed(4, batch_size=8)
    trained(Kill(), batch_size=4)
    assert steps_taken(capsys.readouterr().out) == 0


def test_an_incomplete_checkpoint_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    killed(4)
    for file in CHECKPOINTS.rglob("digest"):
        file.unlink()
    trained(Kill())
    assert steps_taken(capsys.readouterr().out) == 0


def test_two_trainings_share_a_curve() -> None:
    model = bert()
    for before in (0, 2):
        options = {**OPTIONS, "steps": 2}
        assert train(model, collate(), rows(), CURVE, **options, before=before) == 2
    assert [json.loads(line)["step"] for line in CURVE.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_rule_finishes_without_any_step() -> None:
    class Finished(Kill):
        def finish(self) -> None:
            self.seen += 7

    rule = Finished()
    trained(rule, steps=0)
    assert rule.seen == 7


def test_measures_of_a_rule_are_in_the_curve() -> None:
    trained(Kill(), steps=3)
    assert [json.loads(line)["seen"] for line in CURVE.read_text().splitlines()] == [0, 1, 3]
    assert all("task_loss" in json.loads(line) for line in CURVE.read_text().splitlines())
