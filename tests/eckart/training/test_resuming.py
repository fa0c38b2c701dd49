"""A training that was killed goes on from its checkpoint to the same bytes, whatever its rule draws and remembers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

import eckart
from eckart.factorization.factorize import rest
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.layers import factorize_target
from eckart.model.targets import Target, find_targets, weight_of
from eckart.ranks.hypernetwork import HypernetworkSearch
from eckart.ranks.threshold import ThresholdSearch
from eckart.recovery.mixed_rank import MixedRankRule
from eckart.residual.sparse_rows import RowMasking, RowPruning
from eckart.shaping.pruning import WeightPruning
from eckart.training.rules import Rule
from tasks.training.checkpoints import SECONDS
from tests.killing import Kill, Killed
from tests.training import train
from tests.workspace import bert, collate, rows, tiny_tokenizer

STEPS = 6
RECIPES = eckart.recipes()
CURVE = Path("curve.jsonl")


def factorized(model: Any, targets: tuple[Target, ...], residual: bool) -> dict[str, torch.Tensor]:
    """Factorize all targets at rank 1 and return their dense weights."""
    weights = {target.name: weight_of(model.get_submodule(target.name)).clone() for target in targets}
    for name, weight in weights.items():
        left, right = decompose(weight, ErrorNorm()).truncate(1)
        factorize_target(model, name, left, right, rest(weight, left, right) if residual else None)
    return weights


def hypernetwork(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    parts = {target.name: decompose(weight_of(model.get_submodule(target.name)), ErrorNorm()) for target in targets}
    return HypernetworkSearch(model, targets, parts, RECIPES["ars"].ranks, 0.5, seed=0)


def threshold(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    return ThresholdSearch(model, targets, RECIPES["softlm"].ranks, 0.5)


def pruning(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    return WeightPruning(model, targets, RECIPES["lpaf_sensitivity"].shaping.model_copy(update={"steps": STEPS}), 0.5)


def mixed_rank(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    settings = RECIPES["lpaf_sensitivity"].recovery.model_copy(update={"steps": STEPS})
    return MixedRankRule(model, factorized(model, targets, False), settings, True, seed=0)


def sparse_rows_in_windows(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    factorized(model, targets, True)
    settings = RECIPES["losparse"].residual.model_copy(update={"window": 3, "end": 0.1})  # the kill is within a window
    return RowPruning(model, settings, sum(target.parameters for target in targets) // 2, STEPS)


def masked_rows(model: PreTrainedModel, targets: tuple[Target, ...]) -> Rule:
    factorized(model, targets, True)
    settings = RECIPES["movement_pruning"].residual
    return RowMasking(model, settings, sum(target.parameters for target in targets) // 2, STEPS)


def trained(make: Callable[[PreTrainedModel, tuple[Target, ...]], Rule], kill: int | None = None) -> list[bytes]:
    """Return the bytes of the model and of the rule's state after training."""
    model = bert()
    rule = make(model, find_targets(model, tiny_tokenizer()(["a plot"], return_tensors="pt")).targets)
    options = {"batch_size": 8, "learning_rate": 1e-3, "warmup": 0.1, "weight_decay": 0.01, "seed": 0, "steps": STEPS}
    train(model, collate(), rows(), CURVE, **options, rules=[rule, Kill(kill)])
    return [
        save({name: value.contiguous() for name, value in part.items()}) for part in (model.state_dict(), rule.state())
    ]


@pytest.mark.parametrize("make", [hypernetwork, threshold, pruning, mixed_rank, sparse_rows_in_windows, masked_rows])
def test_a_killed_training_goes_on_to_the_same_bytes(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, curve = trained(make), CURVE.read_text()
    monkeypatch.setenv(SECONDS, "0")
    with pytest.raises(Killed):
        trained(make, kill=4)
    capsys.readouterr()
    assert trained(make) == whole
    assert CURVE.read_text() == curve
    assert "goes on from step" in capsys.readouterr().out
