"""A step in micro-batches is the step of the whole batch, whatever the rules do in it; and the other optimizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, default_data_collator

import eckart
from eckart.calibration.losses import causal_loss
from eckart.factorization.factorize import rest
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import factorize_target
from eckart.model.targets import Target, find_targets, weight_of
from eckart.recovery.distillation import Distillation, DistillationRule
from eckart.recovery.mixed_rank import MixedRank, MixedRankRule
from eckart.residual.sparse_rows import RowPruning
from eckart.shaping.pruning import WeightPruning
from eckart.training.rules import Rule
from tasks.artifacts.errors import StageError
from tasks.training.checkpoints import SECONDS
from tests import tiny
from tests.killing import Kill, Killed
from tests.training import train
from tests.workspace import bert, collate, rows

STEPS = 3
CURVE = Path("curve.jsonl")
OPTIONS = {"steps": STEPS, "batch_size": 8, "learning_rate": 1e-2, "warmup": 0.0, "weight_decay": 0.01, "seed": 0}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def blocks() -> Dataset:
    """Blocks of running text, as language modeling has them."""
    ids = torch.randint(tiny.VOCABULARY, (21, 6), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 6] * 21, "labels": ids})


def language_model() -> tuple[PreTrainedModel, tuple[Target, ...]]:
    model = tiny.causal_llama().double().eval()
    return model, find_targets(model, default_data_collator(list(blocks().select(range(2))))).targets


def factorized(model: PreTrainedModel, targets: tuple[Target, ...], residual: bool = False) -> dict[str, torch.Tensor]:
    weights = {target.name: weight_of(model.get_submodule(target.name)).clone() for target in targets}
    for name, weight in weights.items():
        left, right = decompose(weight, ErrorNorm()).truncate(2)
        factorize_target(model, name, left, right, rest(weight, left, right) if residual else None)
    return weights


def distilled(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    factorized(model, targets)
    return DistillationRule(tiny.causal_llama().double(), Distillation(), classes=True)


def mixed(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    settings = MixedRank(steps=STEPS, until=0.6)
    return MixedRankRule(model, factorized(model, targets), settings, True, seed=0)


def pruned(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    settings = eckart.recipes()["lpaf_sensitivity"].shaping.model_copy(update={"steps": STEPS})
    return WeightPruning(model, targets, settings, 0.5)


def sparse(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    factorized(model, targets, residual=True)
    settings = eckart.recipes()["losparse"].residual
    return RowPruning(model, settings, sum(target.parameters for target in targets) // 2, STEPS)


def last_point() -> dict[str, float]:
    return json.loads(CURVE.read_text().splitlines()[-1])


def test_a_step_has_the_models_own_mean_loss() -> None:
    """GPT-2 predicts one token less than it has labels, which its loss must not be divided by."""
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    for model in (tiny.causal_llama(), tiny.build("GPT2LMHeadModel", vocab_size=tiny.VOCABULARY, **sizes)):
        data = blocks().select(range(8))
        expected = model.double().eval()(**default_data_collator(list(data))).loss.item()
        train(model, default_data_collator, data, CURVE, dropout=False, **{**OPTIONS, "steps": 1})
        assert last_point()["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("make", [None, distilled, mixed, pruned, sparse])
def test_micro_batches_take_the_steps_of_the_whole_batch(
    make: Callable[[PreTrainedModel, tuple[Target, ...]], Rule] | None,
) -> None:
    """Of 8 examples three at a time, so the last pass has two; the last batch of the epoch has five. In float64."""
    results = []
    for micro_batch in (None, 3):
        model, targets = language_model()
        rules = [make(model, targets)] if make else []
        train(model, default_data_collator, blocks(), CURVE, rules=rules, micro_batch=micro_batch, **OPTIONS)
        results.append((dict(model.state_dict()), last_point()))
    (whole, point), (parts, other) = results
    for name, values in whole.items():
        torch.testing.assert_close(parts[name], values, rtol=1e-6, atol=1e-7)
    for name in {"loss", "task_loss", "grad_norm"} & set(point):
        assert other[name] == pytest.approx(point[name], rel=1e-5)


def test_padded_examples_weigh_as_in_the_whole_batch() -> None:
    """The task's loss is a mean over examples, not over tokens: also where examples differ in length."""
    texts = tiny.samples(8, shortest=2, longest=9)
    data = Dataset.from_dict({"input_ids": [ids.tolist() for ids, _ in texts], "labels": [0] * 8})

    def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = tiny.collate([(torch.tensor(example["input_ids"]), 0) for example in examples])
        return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    trained = []
    for micro_batch in (None, 3):
        model = tiny.causal_llama().double().eval()
        train(model, padded, data, CURVE, loss=causal_loss, micro_batch=micro_batch, **{**OPTIONS, "steps": 1})
        trained.append(dict(model.state_dict()))
    for name, values in trained[0].items():
        torch.testing.assert_close(trained[1][name], values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("optimizer", "most"),
    [
        ("adafactor", 1),
        pytest.param(
            "adamw_8bit",
            4,  # small matrices and embeddings keep float32
            marks=pytest.mark.skipif(not find_spec("bitsandbytes"), reason="bitsandbytes is not installed"),
        ),
    ],
)
def test_states_of_small_optimizers_are_small_and_resume(
    optimizer: str, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At most so many bytes a parameter, where AdamW has 8."""
    monkeypatch.setenv(SECONDS, "0")

    def trained(kill: int | None, **changes: Any) -> dict[str, torch.Tensor]:
        model = bert(hidden_size=64, intermediate_size=128)
        train(model, collate(), rows(), CURVE, rules=[Kill(kill)], **{**OPTIONS, "optimizer": optimizer, **changes})
        return dict(model.state_dict())

    whole = trained(None)
    with pytest.raises(Killed):
        trained(1)
    states = torch.load(next(Path().rglob("optimizer.pt")))["state"]
    assert size(states) < most * sum(values.numel() for values in whole.values())
    capsys.readouterr()
    resumed = trained(None)
    assert "goes on from step" in capsys.readouterr().out
    assert all(torch.equal(resumed[name], values) for name, values in whole.items())
    adamw = trained(None, optimizer="adamw")
    assert "goes on from step" not in capsys.readouterr().out
    assert any(not torch.equal(adamw[name], values) for name, values in whole.items())


def size(states: Any) -> int:
    """Bytes of the tensors in nested mappings."""
    if isinstance(states, torch.Tensor):
        return states.numel() * states.element_size()
    return sum(map(size, states.values())) if isinstance(states, dict) else 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_an_optimizer_needs_is_named() -> None:
    def trained(optimizer: str) -> None:
        train(bert(), collate(), rows(), CURVE, **OPTIONS, optimizer=optimizer)

    with pytest.raises(StageError, match=r"\bpaged_adamw_8bit\b.*\bGPU\b.*\badamw_8bit\b"):
        trained("paged_adamw_8bit")
    if not find_spec("bitsandbytes"):
        with pytest.raises(StageError, match=r"\badamw_8bit\b.*\bpip install -U bitsandbytes\b.*\badafactor\b"):
            trained("adamw_8bit")
