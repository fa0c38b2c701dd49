"""Laws of factorizing in order: full rank gives W back, and fresh inputs are never worse on a chain of two layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from eckart.calibration.statistics import collect
from eckart.factorization.factorize import InOrder, factorize_at_once, factorize_in_order, rest
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm, Inputs, Kfac
from eckart.model.layers import factorized
from eckart.model.targets import Target, find_targets
from tests import tiny

INPUTS = Inputs()
BATCHES = tiny.batches(tiny.samples(8), 4)
IN_ORDER = InOrder(anchor=0.0, ridge=1e-9)


class Chain(nn.Module):
    """y = x W₁ᵀ W₂ᵀ …; an example's loss is half the square of its outputs."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(*reversed(weight.shape), bias=False).double() for weight in weights))
        for module, weight in zip(self.layers, weights, strict=True):
            module.weight.data.copy_(weight)

    def forward(self, x: Tensor) -> SimpleNamespace:
        y = self.layers(x)
        return SimpleNamespace(loss=y.square().sum() / 2 / len(x), y=y)


def targets_of(weights: Sequence[Tensor]) -> list[Target]:
    shapes = [(f"layers.{position}", *weight.shape) for position, weight in enumerate(weights)]
    return [Target(name=name, out_features=rows, in_features=columns, input_of=name) for name, rows, columns in shapes]


def errors(weights: Sequence[Tensor], x: Tensor, ranks: Sequence[int | None]) -> tuple[float, float]:
    """Return ‖Y − Ŷ‖² with statistics of the dense chain, and with those of the partly factorized one."""
    targets, batches = targets_of(weights), [{"x": x}]
    wanted = dict(zip([target.name for target in targets], ranks, strict=True))
    at_once, in_order, dense = Chain(weights), Chain(weights), Chain(weights)
    statistics = collect(at_once, batches, targets, ["inputs"])
    factorize_at_once(at_once, targets, wanted, INPUTS, statistics)
    factorize_in_order(in_order, targets, wanted, INPUTS, statistics, batches, IN_ORDER)
    with torch.no_grad():
        y = dense(x).y
        return tuple(float((y - model(x).y).square().sum()) for model in (at_once, in_order))  # type: ignore[return-value]


def test_a_chain_solved_by_hand():
    """W₁ = diag(2, 1) at rank 1 keeps the first channel alone, the only one that the second layer then reads.

    Under the dense inputs it keeps the other one, as 3 · 1 > 1 · 2, and nothing is left of the output.
    """
    weights = [torch.diag(torch.tensor([2.0, 1.0])).double(), torch.diag(torch.tensor([1.0, 3.0])).double()]
    x = torch.eye(2, dtype=torch.float64).unsqueeze(1)  # two samples of one token
    stale, fresh = errors(weights, x, [1, 1])
    assert stale == pytest.approx(2**2 + 3**2, abs=1e-9)
    assert fresh == pytest.approx(3**2, abs=1e-9)


def test_fresh_inputs_are_never_worse_on_a_chain_of_two():
    """Eckart and Young for W₂ on its current inputs: the error of Ŵ₁ is orthogonal to them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights, x = [draw(6, 5), draw(7, 6)], draw(9, 3, 5)
    stale, fresh = errors(weights, x, [2, 3])
    assert fresh < stale


def test_each_target_is_decomposed_under_its_current_inputs():
    """Bit for bit as with a separate forward of the partly factorized model for each tensor that targets read."""
    model, expected, weighting = tiny.llama(), tiny.llama(), Kfac()
    targets = find_targets(model, BATCHES[0]).targets
    ranks = dict.fromkeys([target.name for target in targets], 3)
    statistics = collect(model, BATCHES, targets, weighting.statistics)
    factorize_in_order(model, targets, ranks, weighting, statistics, BATCHES, IN_ORDER)
    for name in dict.fromkeys(target.input_of for target in targets):
        group = [target for target in targets if target.input_of == name]
        anew = {**statistics, **collect(expected, BATCHES, group, ["inputs"])}
        factorize_at_once(expected, group, ranks, weighting, anew)
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_shared_input_is_gathered_also_if_its_first_reader_stays_dense():
    model = tiny.llama()
    targets = find_targets(model, BATCHES[0]).targets
    ranks = {target.name: None if target.input_of == target.name else 2 for target in targets}
    factorize_in_order(model, targets, ranks, INPUTS, {}, BATCHES, IN_ORDER)
    assert set(factorized(model)) == {name for name, rank in ranks.items() if rank is not None}


def test_an_error_names_the_target():
    model = tiny.bert()
    targets = find_targets(model, BATCHES[0]).targets
    with pytest.raises(ValueError, match=r"^bert\.encoder\.layer\.0\.attention\.self\.query: "):
        factorize_at_once(model, targets, dict.fromkeys([target.name for target in targets], 2), INPUTS, {})


def test_the_residual_makes_up_for_the_rounding_of_the_factors():
    """Which the model has in its own dtype."""
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    left, right = decompose(weight, ErrorNorm()).truncate(2)
    product = left.bfloat16().double() @ right.bfloat16().double()
    torch.testing.assert_close(product + rest(weight, left, right), weight.double(), rtol=1e-12, atol=1e-12)
