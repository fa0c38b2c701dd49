"""Pivoted storage computes the same as factors, with as many numbers as the matrix has degrees of freedom."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.factorization.pivoted_storage import pivot, pivots
from eckart.model.batches import without_labels
from eckart.model.layers import (
    LowRankLinear,
    PivotedLinear,
    factorize_target,
    factorized,
    low_rank_layers,
    merge,
    pivoted,
)
from eckart.model.targets import find_targets, weight_of
from tests import tiny

BATCH = without_labels(tiny.collate(tiny.samples(8)))
EPSILON = torch.finfo(torch.float32).eps


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def growing(rank: int) -> Tensor:
    """Wilkinson's matrix, whose rows Gaussian elimination takes in order, and a row of 2^k times each of them."""
    rows = torch.eye(rank, dtype=torch.float64) - torch.ones(rank, rank, dtype=torch.float64).tril(-1)
    return torch.cat([rows, torch.ones(1, rank, dtype=torch.float64), 0.1 * drawn(5, rank)])


def kahan(rank: int) -> Tensor:
    """A matrix whose first rows pivoted QR takes in order, though they are nearly dependent."""
    sine, cosine = 0.6, 0.8
    upper = torch.eye(rank, dtype=torch.float64) - cosine * torch.ones(rank, rank, dtype=torch.float64).triu(1)
    return torch.cat([(sine ** torch.arange(rank).double()).diag() @ upper, torch.eye(rank).double()], 1).T


def steep(rows: int, rank: int) -> Tensor:
    """Singular values from 1 to 1e-12, and outputs from 1e-3 to 1e3."""
    left = torch.linalg.qr(drawn(rows, rank)).Q * torch.logspace(0, -12, rank, dtype=torch.float64)
    return torch.logspace(-3, 3, rows, dtype=torch.float64)[torch.randperm(rows)].unsqueeze(1) * left


LEFTS = {
    "drawn": drawn(40, 12),
    "growing": growing(30),
    "kahan": kahan(20),
    "steep": steep(40, 12),
    "tall": drawn(40, 1),
    "square": drawn(12, 12),
    "empty rows": torch.cat([torch.zeros(5, 7).double(), drawn(9, 7), torch.zeros(5, 7).double()]),
    "of lower rank": drawn(30, 3) @ drawn(3, 9, seed=1),
    "all zeros": torch.zeros(8, 3).double(),
}
LEFT = pytest.mark.parametrize("left", LEFTS.values(), ids=LEFTS)


def together(rows: Tensor, others: Tensor, places: Tensor) -> Tensor:
    return torch.cat([rows, others @ rows])[places]


@LEFT
def test_pivots_and_coefficients_give_the_matrix_back(left):
    """With coefficients of directions of at most about one."""
    right = drawn(left.shape[1], 17, seed=2)
    rows, others, places = pivots(left, right)
    rank = len(rows)
    assert rows.numel() + others.numel() == rank * (len(left) + 17 - rank)
    weight, result = left @ right, together(rows, others, places)
    assert ((result - weight).norm(dim=1) <= 1e-11 * weight.norm(dim=1)).all()
    norms = result.norm(dim=1)[places.argsort()]
    assert (others.abs() * norms[:rank] <= 1.06 * norms[rank:].unsqueeze(1) + 1e-12).all()


@LEFT
def test_outputs_are_rounded_no_more_than_those_of_a_dense_layer(left):
    """Each output relative to its own row, though another one may be a million times as large."""
    right, x = drawn(left.shape[1], 17, seed=2), drawn(200, 17, seed=3).float()
    weight = left @ right
    layer = of(left, right)
    pivot(layer)
    stored = layer.map
    assert isinstance(stored, PivotedLinear)
    with torch.no_grad():
        error = (stored(x).double() - x.double() @ weight.T).abs()
    # of the factors themselves, which are float32 before they are pivoted
    given = left.float().double() @ right.float().double() - weight
    rounded = EPSILON * len(right) * weight.norm(dim=1) + given.norm(dim=1)
    assert (error <= 2 * rounded * x.double().norm(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("tokens", [2, 40])  # outputs are put into order, and rows
def test_both_forms_of_the_forward_give_the_same_outputs_and_gradients(tokens):
    layer = of(drawn(9, 3, seed=1), drawn(3, 10, seed=2))
    layer.map.left.bias = nn.Parameter(drawn(9, seed=4).float())
    pivot(layer)
    stored, x = layer.map, drawn(tokens, 10, seed=3).float()
    expected = x @ stored.dense().T + stored.bias
    torch.testing.assert_close(stored(x), expected, rtol=1e-4, atol=1e-5)
    parts = (stored.right.weight, stored.others.weight, stored.bias)
    gradients = (torch.autograd.grad(y.square().sum(), parts) for y in (stored(x), expected))
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-3)


def of(left: Tensor, right: Tensor) -> nn.Module:
    """Return a module with a low-rank layer of these factors, in float32."""
    layer = LowRankLinear(right.shape[1], len(left), len(right), bias=False)
    layer.left.weight.data.copy_(left)
    layer.right.weight.data.copy_(right)
    return nn.ModuleDict({"map": layer})


def adversarial() -> PreTrainedModel:
    """Factors that are hard on rounding: steep spectra, outputs of many sizes."""
    model = tiny.gpt2().eval()
    for number, target in enumerate(find_targets(model, BATCH).targets):
        weight = weight_of(model.get_submodule(target.name)).double()
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        rank = min(3 + number % 6, len(s) - 1)
        values = s[0] * torch.logspace(0, -8, rank, dtype=torch.float64)
        sizes = torch.logspace(-2, 0, len(u), dtype=torch.float64).unsqueeze(1)
        factorize_target(model, target.name, sizes * u[:, :rank] * values.sqrt(), values.sqrt().unsqueeze(1) * v[:rank])
    return model


def test_a_pivoted_model_computes_the_same_with_fewer_parameters():
    model = adversarial()
    ranks, before = factorized(model), copy.deepcopy(model)
    with torch.no_grad():
        expected = model(**BATCH).logits
        pivot(model)
        torch.testing.assert_close(model(**BATCH).logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert pivoted(model) == list(ranks)
    assert factorized(model) == ranks
    assert not low_rank_layers(model)
    saved = sum(rank**2 for rank in ranks.values())
    assert model.num_parameters() == before.num_parameters() - saved


@pytest.mark.parametrize(
    "module", [nn.Linear(9, 7), Conv1D(7, 9), nn.Embedding(9, 7)], ids=lambda some: type(some).__name__
)
def test_every_kind_of_target_can_be_pivoted_and_merged(module):
    model = nn.ModuleDict({"map": module}).train()
    left, right = drawn(7, 3).float(), drawn(3, 9, seed=1).float()
    factorize_target(model, "map", left, right)
    pivot(model)
    x = torch.tensor([[1, 5], [8, 0]]) if isinstance(module, nn.Embedding) else drawn(2, 9).float()
    answers = model["map"](x)
    assert isinstance(module, nn.Embedding) or model["map"].weight.shape == module.weight.shape
    assert model["map"].training
    answers.square().sum().backward()
    assert all(parameter.grad.any() for parameter in model["map"].parameters())
    merged = merge(model, "map")
    assert type(merged) is type(module)
    torch.testing.assert_close(weight_of(merged), left @ right)
    torch.testing.assert_close(merged(x), answers)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_rank_can_be_pivoted(rows, columns, data):
    rank = data.draw(st.integers(1, min(rows, columns)))
    left, right = drawn(rows, rank), drawn(rank, columns, seed=1)
    torch.testing.assert_close(together(*pivots(left, right)), left @ right, rtol=1e-9, atol=1e-9)


def test_sparse_rows_cannot_be_pivoted():
    model = tiny.bert()
    factorize_target(model, "classifier", torch.ones(3, 1), torch.ones(1, 16), torch.ones(3, 16))
    with pytest.raises(ValueError, match="classifier"):
        pivot(model)


def test_factors_that_are_not_finite_are_an_error_that_names_the_target():
    with pytest.raises(ValueError, match=r"\bmap\b"):
        pivot(of(torch.full((4, 2), torch.inf), torch.ones(2, 4)))
