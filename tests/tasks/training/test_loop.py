"""The training loop: what it writes, what it repeats, and that it does not go on from a broken loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from eckart.recovery.distillation import Distillation, DistillationRule
from tasks.artifacts.errors import StageError
from tests import tiny
from tests.training import train
from tests.workspace import bert, collate, rows

POINTS = 20
OPTIONS = {"batch_size": 8, "learning_rate": 1e-3, "warmup": 0.1, "weight_decay": 0.01, "seed": 0}


@pytest.fixture
def curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder that is not there yet."""
    monkeypatch.chdir(tmp_path)
    return Path("reports/curve.jsonl")


def trained(curve: Path, model: PreTrainedModel | None = None, **changes: Any) -> PreTrainedModel:
    model = model or bert()
    train(model, collate(), rows(), curve, **{**OPTIONS, "steps": 3, **changes})
    return model


def points(curve: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in curve.read_text().splitlines()]


def weights(model: PreTrainedModel) -> bytes:
    return save(dict(model.state_dict()))


@pytest.mark.parametrize("steps", [1, 21, 39])
def test_a_curve_has_twenty_points_at_most_and_ends_at_the_last_step(curve: Path, steps: int) -> None:
    """Nothing but the curve is written."""
    trained(curve, steps=steps, batch_size=2)
    climb = [point["step"] for point in points(curve)]
    assert climb == sorted(set(climb))
    assert climb[0] >= 1
    assert climb[-1] == steps
    assert min(steps, POINTS // 2) <= len(climb) <= POINTS
    for point in points(curve):
        assert set(point) == {"step", "loss", "learning_rate", "grad_norm"}
        assert all(map(math.isfinite, point.values()))
        assert point["loss"] > 0
    assert [str(path) for path in Path().rglob("*") if path.is_file()] == [str(curve)]


@pytest.mark.parametrize(
    ("schedule", "falling"),
    [("linear", [8, 7, 6, 5, 4, 3, 2, 1]), ("cosine", [4 + 4 * math.cos(math.pi * step / 8) for step in range(8)])],
)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero(
    curve: Path, schedule: str, falling: list[float]
) -> None:
    """Ten steps, the first two of which warm up: 0, 1/2, then from 1 towards 0."""
    trained(curve, steps=10, warmup=0.2, learning_rate=0.008, schedule=schedule)
    rates = [point["learning_rate"] for point in points(curve)]
    assert rates == pytest.approx([0, 0.004, *(0.001 * eighths for eighths in falling)])


def test_a_single_step_is_not_all_warm_up(curve: Path) -> None:
    before = bert()
    assert weights(trained(curve, bert(), steps=1)) != weights(before)


def test_training_learns(curve: Path) -> None:
    """One word in two tells the label."""
    trained(curve, steps=40, learning_rate=5e-3)
    losses = [point["loss"] for point in points(curve)]
    assert losses[0] > 0.6
    assert losses[-1] < 0.2


def test_no_steps_leave_the_model_as_it_is(curve: Path) -> None:
    model = bert()
    before = weights(model)
    trained(curve, model, steps=0)
    assert weights(model) == before
    assert curve.read_text() == ""


def test_the_same_seed_gives_the_same_bytes(curve: Path) -> None:
    """Whatever was drawn before; dropout is on."""
    torch.manual_seed(1)
    first, first_curve = weights(trained(curve, seed=5)), curve.read_text()
    torch.manual_seed(2)
    assert weights(trained(curve, seed=5)) == first
    assert curve.read_text() == first_curve


@pytest.mark.parametrize("steps", [0, 2])
def test_the_model_is_in_eval_mode_afterwards(curve: Path, steps: int) -> None:
    assert not any(module.training for module in trained(curve, bert().train(), steps=steps).modules())


@pytest.mark.parametrize("cache", [{"use_cache": True}, {"use_cache": False}, {}])
def test_the_config_is_as_before(curve: Path, cache: dict[str, bool]) -> None:
    """transformers' Trainer switches the cache off, and language models would then be timed and saved without it."""
    sizes = {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}
    model = bert() if cache else tiny.of("DistilBertForSequenceClassification", **sizes, num_labels=2)()
    vars(model.config).update(cache)
    before = model.config.to_json_string()
    assert trained(curve, model).config.to_json_string() == before


def test_weights_that_are_not_finite_are_seen_at_the_first_step(curve: Path) -> None:
    model = bert()
    with torch.no_grad():
        model.classifier.weight.fill_(math.nan)
    with pytest.raises(StageError, match=r"\bstep 1\b"):
        trained(curve, model)
    assert points(curve) == []


def test_a_learning_rate_that_breaks_the_loss_is_named_with_its_step(curve: Path) -> None:
    """The curve keeps what was sound."""
    with pytest.raises(StageError, match=r"\bstep ([2-9]|1\d)\b"):
        trained(curve, steps=20, warmup=0.0, learning_rate=1e30)
    assert points(curve)
    assert all(map(math.isfinite, (point["loss"] for point in points(curve))))


def test_a_model_that_cannot_recompute_activations_is_an_error(curve: Path) -> None:
    model = bert()
    model.supports_gradient_checkpointing = False
    with pytest.raises(StageError, match=r"trainer\.checkpoint_activations"):
        trained(curve, model, checkpoint_activations=True)


def test_after_a_training_activations_are_kept_again(curve: Path) -> None:
    model = trained(curve, checkpoint_activations=True)
    assert not model.is_activation_checkpointing
    assert not model.get_input_embeddings()._forward_hooks


def test_a_layer_that_calls_dropout_itself_has_none(curve: Path) -> None:
    """OPT's do; recomputing activations needs the layer in training mode, but not what it does there."""

    def opt(rate: float) -> PreTrainedModel:
        sizes = {**tiny.LAYERS, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
        return tiny.of("OPTForSequenceClassification", **sizes, dropout=rate, num_labels=2)()

    plain = trained(curve, opt(0.0), steps=2)
    again = trained(curve, opt(0.5), steps=2, dropout=False, checkpoint_activations=True)
    for (name, found), expected in zip(again.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_a_teacher_runs_in_the_precision_of_the_training_and_without_a_cache(curve: Path) -> None:
    teacher, model = (bert().eval() for _ in range(2))
    teacher.config.use_cache = True
    seen = list[torch.dtype]()
    teacher.bert.encoder.layer[0].attention.self.query.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    rule = DistillationRule(teacher, Distillation(), classes=True)
    assert not teacher.config.use_cache
    trained(curve, model, rules=[rule], precision="bf16")
    trained(curve, model, rules=[rule])
    assert seen == [torch.bfloat16] * 3 + [torch.float32] * 3


@pytest.mark.parametrize(("again", "passes"), [(False, 2), (True, 4)])
def test_without_dropout_activations_are_still_recomputed(curve: Path, again: bool, passes: int) -> None:
    """Twice the passes of a layer in two steps, and the same weights as a model whose dropout rates are 0."""
    still, model = (bert(hidden_dropout_prob=rate, attention_probs_dropout_prob=rate) for rate in (0.0, 0.5))
    seen: list[Any] = []
    model.bert.encoder.layer[0].attention.register_forward_hook(lambda *call: seen.append(call))
    trained(curve, model, steps=2, dropout=False, checkpoint_activations=again)
    assert len(seen) == passes
    for (name, found), expected in zip(
        model.named_parameters(), trained(curve, still, steps=2).parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, msg=name)
