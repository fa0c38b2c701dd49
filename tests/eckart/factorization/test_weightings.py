"""Each weighting gives its method's norm of an error, from the statistics that it asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from eckart.calibration.second_moments import square_sums
from eckart.calibration.statistics import collect
from eckart.factorization.weighted_svd import decompose, weighted_loss
from eckart.factorization.weightings import Weighting, _shrunk, weigh
from eckart.model.targets import Target, find_targets, weight_of
from tests import tiny

ADAPTER: TypeAdapter[Weighting] = TypeAdapter(Weighting)
WRITTEN = [
    {"kind": "none"},
    {"kind": "fisher", "axis": "input"},
    {"kind": "taylor", "axis": "output"},
    {"kind": "activation_scaling"},
    {"kind": "inputs"},
    {"kind": "kfac", "shrinkage": 0.5, "input_shrinkage": 0.5, "correlation_shrinkage": 0.5},
    {"kind": "fisher_inputs"},
]
KEY = Target(name="key", out_features=4, in_features=6, input_of="query")


def parse(written: dict[str, Any]) -> Weighting:
    return ADAPTER.validate_python(written)


def token_statistics(x: torch.Tensor, delta: torch.Tensor):
    """Statistics of `KEY` from inputs `(examples, tokens, in)` and output gradients `(examples, tokens, out)`."""
    count = len(x)
    flat_x, flat_delta = x.flatten(0, 1), delta.flatten(0, 1)
    weight = x.new_zeros(delta.shape[-1], x.shape[-1])
    by_input, by_output = square_sums(x, delta, weight, ["fisher"])["fisher"]
    return {
        "inputs": {"query": flat_x.T @ flat_x / count},
        "input_magnitudes": {"query": flat_x.abs().sum(0) / count},
        "tokens": {"query": torch.tensor(float(x.shape[1]), dtype=x.dtype)},
        "output_gradients": {"key": flat_delta.T @ flat_delta / count},
        "fisher": {"key.input": by_input / count, "key.output": by_output / count},
    }


@st.composite
def calibrations(draw: st.DrawFn, samples: int = 5, tokens: int = 3):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    shapes = ((samples, tokens, 6), (samples, tokens, 4), (4, 6))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


@pytest.mark.parametrize("written", WRITTEN)
def test_the_statistics_that_a_weighting_asks_for_are_enough(written):
    """They give every target a norm of its shape."""
    model = tiny.gpt2()
    targets = find_targets(model, tiny.collate(tiny.samples(2))).targets
    weighting = parse(written)
    gathered = collect(model, tiny.batches(tiny.samples(8), 4), targets, kinds=weighting.statistics)
    for target in targets:
        weight = weight_of(model.get_submodule(target.name)).double()
        result = decompose(weight, weigh(weighting, target, gathered))
        torch.testing.assert_close(result.left @ result.right, weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("written", WRITTEN[1:])
def test_missing_statistics_are_an_error_that_names_them(written):
    weighting = parse(written)
    with pytest.raises(ValueError, match=weighting.statistics[0]):
        weigh(weighting, KEY, {})


def test_scores_of_inputs_weigh_columns_and_scores_of_outputs_rows():
    scores = {"fisher": {"key.input": torch.arange(6.0), "key.output": torch.arange(4.0)}}
    by_input = weigh(parse({"kind": "fisher", "axis": "input"}), KEY, scores)
    by_output = weigh(parse({"kind": "fisher", "axis": "output"}), KEY, scores)
    assert by_input.left is None
    assert torch.equal(by_input.right, torch.arange(6.0))
    assert torch.equal(by_output.left, torch.arange(4.0))
    assert by_output.right is None


def test_movement_weighs_rows_by_the_scores_and_not_their_roots():
    """LPAF, section 4.2: L = diag(Ŝ), so its square is the metric."""
    metrics = weigh(parse({"kind": "movement"}), KEY, {"movement": {"key.output": torch.arange(4.0)}})
    assert torch.equal(metrics.left, torch.tensor([0.0, 1.0, 4.0, 9.0]))
    assert metrics.right is None
    assert parse({"kind": "movement"}).statistics == ()  # no pass over the data gathers them
    with pytest.raises(ValueError, match=r"\bshaping\b"):
        weigh(parse({"kind": "movement"}), KEY, {})


@given(calibrations())
def test_the_loss_under_inputs_is_the_error_of_the_outputs(calibration):
    """DRONE, eq. 3: the mean over examples of ‖X Wᵀ − X Ŵᵀ‖²."""
    x, delta, error = calibration
    metrics = weigh(parse({"kind": "inputs"}), KEY, token_statistics(x, delta))
    torch.testing.assert_close(weighted_loss(error, metrics), (x @ error.T).square().sum() / len(x))


@given(calibrations())
def test_the_loss_under_fisher_and_inputs_weighs_that_error_by_output(calibration):
    x, delta, error = calibration
    gathered = token_statistics(x, delta)
    metrics = weigh(parse({"kind": "fisher_inputs"}), KEY, gathered)
    expected = ((x @ error.T).square().sum((0, 1)) / len(x) * gathered["fisher"]["key.output"]).sum()
    torch.testing.assert_close(weighted_loss(error, metrics), expected)


@given(calibrations(samples=1, tokens=1))
def test_the_loss_under_kfac_is_the_squared_change_of_the_loss(calibration):
    """For one example of one token the factors are exact: tr(A E B Eᵀ) = ⟨G, E⟩²."""
    x, delta, error = calibration
    metrics = weigh(parse({"kind": "kfac", "shrinkage": 0.0}), KEY, token_statistics(x, delta))
    change = ((delta[0].T @ x[0]) * error).sum()
    torch.testing.assert_close(weighted_loss(error, metrics), change.square())


@given(calibrations(), st.floats(0, 0.99))
def test_shrinkage_mixes_kfac_with_the_mean_gradient_of_all_outputs(calibration, share):
    x, delta, error = calibration
    gathered = token_statistics(x, delta)
    plain, shrunk = (weigh(parse({"kind": "kfac", "shrinkage": value}), KEY, gathered) for value in (0.0, share))
    mean = gathered["output_gradients"]["key"].diagonal().mean()
    even = mean * (x @ error.T).square().sum() / len(x) / x.shape[1]
    expected = (1 - share) * weighted_loss(error, plain) + share * even
    torch.testing.assert_close(weighted_loss(error, shrunk), expected)


@given(calibrations(), st.floats(0, 0.99))
def test_shrinkage_of_either_side_keeps_its_trace_and_bounds_its_condition(calibration, share):
    x, delta, _ = calibration
    gathered = token_statistics(x[:1, :1], delta[:1, :1])  # one token: both moments have rank 1
    plain = weigh(parse({"kind": "kfac"}), KEY, gathered)
    shrunk = weigh(parse({"kind": "kfac", "shrinkage": share, "input_shrinkage": share}), KEY, gathered)
    for before, after in ((plain.left, shrunk.left), (plain.right, shrunk.right)):
        torch.testing.assert_close(after.trace(), before.trace())
        least = share * before.diagonal().mean()
        torch.testing.assert_close(
            torch.linalg.eigvalsh(after)[0], least, atol=1e-12 * float(before.trace()), rtol=1e-9
        )


@given(calibrations(), st.floats(0, 0.99))
def test_shrunk_correlations_mix_kfac_with_independent_inputs(calibration, share):
    x, delta, error = calibration
    gathered = token_statistics(x, delta)
    alone = {**gathered, "inputs": {key: value.diagonal().diag() for key, value in gathered["inputs"].items()}}
    weighting = parse({"kind": "kfac", "correlation_shrinkage": share})
    plain, independent = (weighted_loss(error, weigh(parse({"kind": "kfac"}), KEY, some)) for some in (gathered, alone))
    expected = (1 - share) * plain + share * independent
    torch.testing.assert_close(weighted_loss(error, weigh(weighting, KEY, gathered)), expected)


@given(calibrations())
def test_scaling_by_activations_is_by_the_mean_magnitude_and_by_nothing_at_power_0(calibration):
    x, delta, error = calibration
    gathered = token_statistics(x, delta)
    loss, plain = (
        weighted_loss(error, weigh(parse({"kind": "activation_scaling", "alpha": alpha}), KEY, gathered))
        for alpha in (1.0, 0.0)
    )
    torch.testing.assert_close(loss, (error * x.abs().mean((0, 1))).square().sum())
    torch.testing.assert_close(plain, error.square().sum())


@given(calibrations(samples=400, tokens=3))
def test_kfac_is_in_units_of_loss_if_tokens_are_independent(calibration):
    """Then the mean of ⟨G, E⟩² is tokens · E[(δᵀ E x)²], which the factors divided by the tokens give."""
    x, delta, error = calibration
    metrics = weigh(parse({"kind": "kfac", "shrinkage": 0.0}), KEY, token_statistics(x, delta))
    changes = torch.einsum("nto,oi,nti->n", delta, error, x)
    assert float(weighted_loss(error, metrics)) == pytest.approx(float(changes.square().mean()), rel=0.5)


@given(calibrations(), st.integers(1, 10))
def test_examples_that_do_not_reach_an_expert_lower_its_loss_in_proportion(calibration, others):
    """The loss under kfac is a mean over all examples."""
    x, delta, error = calibration
    gathered, share = token_statistics(x, delta), 1 / (1 + others)
    fewer = {kind: {key: share * value for key, value in tensors.items()} for kind, tensors in gathered.items()}
    before, after = (weighted_loss(error, weigh(parse({"kind": "kfac"}), KEY, some)) for some in (gathered, fewer))
    torch.testing.assert_close(after, share * before)


def test_shrinkage_of_a_diagonal_is_that_of_its_matrix() -> None:
    diagonal = torch.tensor([1.0, 2.0, 6.0])
    torch.testing.assert_close(_shrunk(diagonal, 0.3), _shrunk(diagonal.diag(), 0.3).diagonal())
