"""Laws of the two-sided weighted SVD, held against torch's SVD of L W R with explicit symmetric roots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from eckart.factorization import weighted_svd
from eckart.factorization.weighted_svd import Decomposition, absorbed, decompose, spectrum, weighted_loss
from eckart.factorization.weightings import ErrorNorm, Side

REGULAR = ("none", "diagonal", "full")
SINGULAR = ("deficient", "dead", "dead diagonal")
OUTLIERS = ("outlier", "outlier diagonal", "rotated outlier")


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def draw_metric(kind: str, size: int, generator: torch.Generator) -> Side:
    """A metric of `size` channels, as the Gram matrix of random inputs `(samples, size)`."""
    inputs = normal(generator, 3 * size + 2, size)
    match kind:
        case "none":
            return None
        case "diagonal":
            return inputs[0].square() + 0.1
        case "dead diagonal":
            return inputs[0].square() * (torch.arange(size) != size // 2)
        case "outlier diagonal":
            return (inputs[0].square() + 0.1) * torch.where(torch.arange(size) == size // 2, 1e6, 1.0)
        case "deficient":
            inputs = inputs[: size // 2]
        case "dead":
            inputs[:, size // 2] = 0
        case "zero":
            inputs = torch.zeros_like(inputs)
        case "outlier":
            inputs[:, size // 2] *= 1e3
        case "rotated outlier":
            direction = torch.nn.functional.normalize(normal(generator, size), dim=0)
            inputs += 999 * (inputs @ direction).unsqueeze(1) * direction
    return inputs.T @ inputs / max(1, len(inputs))


@st.composite
def problems(draw: st.DrawFn, kinds: tuple[str, ...] = REGULAR, smallest: int = 1) -> tuple[Tensor, ErrorNorm]:
    """A weight with more rows, as many, or fewer than columns, and a pair of metrics of `kinds`."""
    rows, columns = draw(st.integers(smallest, 9)), draw(st.integers(smallest, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    left, right = draw(st.sampled_from(kinds)), draw(st.sampled_from(kinds))
    metrics = ErrorNorm(draw_metric(left, rows, generator), draw_metric(right, columns, generator))
    return normal(generator, rows, columns), metrics


# --- the reference ---------------------------------------------------------------------------------------------------


def matrix(metric: Side, size: int) -> Tensor:
    if metric is None:
        return torch.eye(size, dtype=torch.float64)
    return (metric.diag() if metric.dim() == 1 else metric).double()


def root(metric: Side, size: int) -> Tensor:
    """The symmetric root of a metric."""
    values, vectors = torch.linalg.eigh(matrix(metric, size))
    return vectors * values.clamp(min=0).sqrt() @ vectors.T


def roots(weight: Tensor, metrics: ErrorNorm) -> tuple[Tensor, Tensor]:
    return root(metrics.left, weight.shape[0]), root(metrics.right, weight.shape[1])


def reference_loss(error: Tensor, weight: Tensor, metrics: ErrorNorm) -> float:
    left, right = roots(weight, metrics)
    return float((left @ error @ right).square().sum())


def reference_spectrum(weight: Tensor, metrics: ErrorNorm) -> Tensor:
    left, right = roots(weight, metrics)
    return torch.linalg.svdvals(left @ weight @ right)


def approximation(result: Decomposition, rank: int) -> Tensor:
    left, right = result.truncate(rank)
    return left @ right


# --- laws ------------------------------------------------------------------------------------------------------------


@given(problems((*REGULAR, *SINGULAR, *OUTLIERS, "zero")))
def test_full_rank_gives_the_weight_back(problem):
    weight, metrics = problem
    result = decompose(weight, metrics)
    assert result.left.shape == (weight.shape[0], min(weight.shape))
    assert result.right.shape == (min(weight.shape), weight.shape[1])
    torch.testing.assert_close(result.left @ result.right, weight, rtol=1e-6, atol=1e-6)


@given(problems(), st.sampled_from([0.25, 1.0, 9.0]), st.sampled_from(["diagonal", "full"]), st.data())
def test_isotropic_metrics_reduce_to_the_plain_svd(problem, scale, form, data):
    """Identity weighting, uniform Fisher and isotropic inputs are one and the same."""
    weight, _ = problem
    rank = data.draw(st.integers(0, min(weight.shape)))
    left, right = (torch.full((size,), scale, dtype=torch.float64) for size in weight.shape)
    metrics = ErrorNorm(left, right) if form == "diagonal" else ErrorNorm(left.diag(), right.diag())
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    assume(rank in (0, len(s)) or s[rank - 1] - s[rank] > 1e-2 * s[0])
    plain = (u[:, :rank] * s[:rank]) @ vt[:rank]
    for some in (ErrorNorm(), metrics, ErrorNorm(left=metrics.left), ErrorNorm(right=metrics.right)):
        torch.testing.assert_close(approximation(decompose(weight, some), rank), plain, rtol=1e-7, atol=1e-7)


@given(problems(REGULAR + SINGULAR + OUTLIERS, smallest=2))
def test_the_loss_is_the_tail_of_the_spectrum_and_no_larger_than_the_optimum(problem):
    """At every rank, for singular metrics and outliers of 10³ too."""
    weight, metrics = problem
    result = decompose(weight, metrics)
    optimum = reference_spectrum(weight, metrics).square()
    negligible = 1e-11 * float(optimum.sum()) + 1e-20
    for rank in range(min(weight.shape) + 1):
        loss = reference_loss(weight - approximation(result, rank), weight, metrics)
        tail = float(result.spectrum[rank:].square().sum())
        assert loss == pytest.approx(tail, rel=1e-6, abs=negligible)
        assert loss <= float(optimum[rank:].sum()) * (1 + 1e-6) + negligible


@given(problems(REGULAR + SINGULAR + OUTLIERS, smallest=2), st.integers(0, 2**20), st.data())
def test_no_other_candidate_of_the_same_rank_is_better(problem, seed, data):
    weight, metrics = problem
    rank = data.draw(st.integers(1, min(weight.shape)))
    generator = torch.Generator().manual_seed(seed)
    left, right = decompose(weight, metrics).truncate(rank)
    best = reference_loss(weight - left @ right, weight, metrics)
    total = reference_loss(weight, weight, metrics)

    def noise(like: Tensor, scale: float) -> Tensor:
        return scale * normal(generator, *like.shape) * like.norm() / like.numel() ** 0.5

    candidates = [(left + noise(left, scale), right + noise(right, scale)) for scale in (1e-4, 1e-2, 1.0)]
    candidates.append((normal(generator, *left.shape), normal(generator, *right.shape)))
    candidates += [(left * scale, right) for scale in (0.99, 1.01)]
    # a random row space with the best weights for it, and the plain truncation
    rows = normal(generator, *right.shape)
    candidates.append((weight @ torch.linalg.pinv(rows), rows))
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    candidates.append((u[:, :rank] * s[:rank], vt[:rank]))
    for some_left, some_right in candidates:
        assert best <= reference_loss(weight - some_left @ some_right, weight, metrics) + 1e-11 * total


@given(problems(REGULAR + SINGULAR + OUTLIERS))
def test_factors_of_a_component_have_equal_norms(problem):
    """Under any weighting, so that one learning rate suits all; without a weighting, both norms are √S."""
    weight, metrics = problem
    result = decompose(weight, metrics)
    norms = result.left.norm(dim=0)
    torch.testing.assert_close(result.right.norm(dim=1), norms, rtol=1e-9, atol=0)
    plain = decompose(weight, ErrorNorm())
    floor = 2e-6 * float(plain.spectrum[0])
    torch.testing.assert_close(plain.left.norm(dim=0).square(), plain.spectrum, rtol=1e-6, atol=floor)


@given(problems(REGULAR), st.floats(min_value=1e-8, max_value=1e8))
def test_factors_do_not_depend_on_the_units_of_the_statistics(problem, scale):
    weight, metrics = problem
    scaled = ErrorNorm(*(None if metric is None else metric * scale for metric in (metrics.left, metrics.right)))
    norms, others = (decompose(weight, some).left.norm(dim=0) for some in (metrics, scaled))
    torch.testing.assert_close(norms, others, rtol=1e-4, atol=1e-6 * float(norms.max()))


@given(problems(REGULAR + SINGULAR + OUTLIERS, smallest=2))
def test_the_spectrum_alone_is_that_of_the_decomposition(problem):
    weight, metrics = problem
    values, expected = spectrum(weight, metrics), decompose(weight, metrics).spectrum
    assert values.shape == (min(weight.shape),)
    assert bool((values.diff() <= 0).all())
    # energies, not values: what is compared with the budget, and what eigenvalues are exact in
    torch.testing.assert_close(values**2, expected**2, rtol=1e-9, atol=1e-13 * float(expected[0]) ** 2)


@given(problems((*REGULAR, *SINGULAR, *OUTLIERS, "zero")), st.sampled_from(["left", "right"]))
def test_a_weight_that_has_absorbed_a_side_keeps_its_spectrum(problem, side):
    """So does any part of it that leaves out features of the other side."""
    weight, norm = problem
    rows, columns = weight.shape
    rows, columns = (rows, (columns + 1) // 2) if side == "left" else ((rows + 1) // 2, columns)

    def part(weight, norm):
        kept = ErrorNorm(norm.left, _first(norm.right, columns)), ErrorNorm(_first(norm.left, rows), norm.right)
        return weight[:rows, :columns], kept[side == "right"]

    whole = absorbed(weight, norm, side)
    assert getattr(whole[1], side) is None
    for expected, values in (
        (spectrum(weight, norm), spectrum(*whole)),
        (spectrum(*part(weight, norm)), spectrum(*part(*whole))),
    ):
        torch.testing.assert_close(values**2, expected**2, rtol=1e-9, atol=1e-11 * float(expected[0]) ** 2)


def _first(side: Side, size: int) -> Side:
    """The part of a side that belongs to its first features."""
    return side if side is None else side[:size] if side.dim() == 1 else side[:size, :size]


@given(problems(REGULAR + SINGULAR + OUTLIERS, smallest=2))
def test_weighted_loss_is_the_norm_between_the_roots(problem):
    error, metrics = problem
    expected = reference_loss(error, error, metrics)
    total = float(error.square().sum())
    for metric in (metrics.left, metrics.right):
        total *= 1.0 if metric is None else float(metric.abs().max()) * len(metric)
    assert float(weighted_loss(error, metrics)) == pytest.approx(expected, rel=1e-8, abs=1e-12 * total)


# --- hand-solved cases -----------------------------------------------------------------------------------------------

DRONE_WEIGHT = torch.tensor(
    [[7, 0, 2, 3, 1], [9, 6, 7, 5, 0], [6, 1, 8, 0, 3], [4, 3, 2, 1, 4], [1, 2, 2, 1, 2]], dtype=torch.float64
)
DRONE_INPUTS = torch.tensor([[2, 2, 5, 5, 4], [1, 1, 2, 2, 6]], dtype=torch.float64)  # (tokens, in)
DRONE_OUTPUTS = torch.tensor([[43, 90, 66, 45, 29], [23, 39, 41, 37, 21]], dtype=torch.float64)


def test_the_example_of_drone_is_exact_at_rank_2():
    """Section 3 of the paper: W has full rank, inputs span two dimensions, so two ranks lose nothing."""
    metrics = ErrorNorm(right=DRONE_INPUTS.T @ DRONE_INPUTS)
    result = decompose(DRONE_WEIGHT, metrics)
    torch.testing.assert_close(DRONE_INPUTS @ approximation(result, 2).T, DRONE_OUTPUTS, rtol=1e-9, atol=1e-9)
    assert float((DRONE_INPUTS @ approximation(result, 1).T - DRONE_OUTPUTS).abs().max()) > 1
    plain = approximation(decompose(DRONE_WEIGHT, ErrorNorm()), 2)
    assert float((DRONE_INPUTS @ plain.T - DRONE_OUTPUTS).abs().max()) > 1


@pytest.mark.parametrize(
    ("metrics", "kept"),
    [
        (ErrorNorm(), 1),
        (ErrorNorm(right=torch.tensor([4.0, 1.0])), 0),
        (ErrorNorm(left=torch.tensor([4.0, 1.0])), 0),
        (ErrorNorm(right=torch.tensor([2.0, 1.0])), 1),
        (ErrorNorm(left=torch.tensor([2.0, 1.0]), right=torch.tensor([2.0, 1.0])), 0),
    ],
)
def test_a_diagonal_weight_keeps_the_entry_that_weighs_most(metrics, kept):
    """W = diag(2, 3): the second entry is larger, until the first one's squared weight passes 9/4."""
    weight = torch.diag(torch.tensor([2.0, 3.0]))
    expected = torch.zeros(2, 2, dtype=torch.float64)
    expected[kept, kept] = weight[kept, kept]
    torch.testing.assert_close(approximation(decompose(weight, metrics), 1), expected)


def test_a_correlated_metric_solved_by_hand():
    """W = I and inputs along (1, 1) only: rank 1 reproduces (1, 1) and S = (√2, 0)."""
    metrics = ErrorNorm(right=torch.ones(2, 2, dtype=torch.float64))
    result = decompose(torch.eye(2), metrics)
    torch.testing.assert_close(result.spectrum, torch.tensor([2.0**0.5, 0.0], dtype=torch.float64), atol=1e-7, rtol=0)
    one = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(approximation(result, 1) @ one, one)


@pytest.mark.parametrize("zeros", [torch.zeros(3), torch.zeros(3, 3)], ids=["diagonal", "matrix"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_zero_metric_has_a_spectrum_of_zeros(side, zeros):
    """A target that no gradient reaches must not ask for ranks."""
    weight = normal(torch.Generator().manual_seed(4), *((3, 5) if side == "left" else (5, 3)))
    metrics = ErrorNorm(**{side: zeros})
    assert not spectrum(weight, metrics).any()
    assert not decompose(weight, metrics).spectrum.any()


def test_single_precision_inputs_are_decomposed_in_double():
    """Singular values of a float32 weight survive down to 1e-6 of the largest; their squares would not in float32."""
    weight = torch.diag(torch.tensor([1.0, 1e-6]))
    values = decompose(weight, ErrorNorm(right=torch.ones(2))).spectrum
    torch.testing.assert_close(values, weight.diagonal().double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("where", ["weight", "left weighting", "right weighting"])
@pytest.mark.parametrize("function", [decompose, spectrum])
def test_values_that_are_not_finite_are_an_error_that_names_them(where, function):
    tensors = {"weight": torch.ones(4, 3), "left weighting": torch.eye(4), "right weighting": torch.eye(3)}
    tensors[where][0, 0] = float("nan")
    with pytest.raises(ValueError, match=rf"\b{where}\b"):
        function(tensors["weight"], ErrorNorm(tensors["left weighting"], tensors["right weighting"]))


# --- wide layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "conditioned"), [("full", True), ("dead", True), ("outlier", True), ("deficient", False)]
)
def test_a_wide_layers_cholesky_root_gives_the_same_components(kind, conditioned, monkeypatch):
    """A singular side still takes the eigendecomposition, whose floor it needs."""
    generator = torch.Generator().manual_seed(0)
    weight, right = normal(generator, 12, 15), draw_metric("full", 15, generator)
    norm = ErrorNorm(draw_metric(kind, 12, generator), right)
    narrow, used = decompose(weight, norm), []
    cholesky = weighted_svd._cholesky
    monkeypatch.setattr(weighted_svd, "_WIDE", 1)
    monkeypatch.setattr(weighted_svd, "_cholesky", lambda side: used.append(cholesky(side)) or used[-1])
    wide = decompose(weight, norm)
    assert [factors is not None for factors in used] == [conditioned]
    torch.testing.assert_close(wide.spectrum, narrow.spectrum)
    torch.testing.assert_close(spectrum(weight, norm), narrow.spectrum)
    for rank in (1, 5, 12):
        torch.testing.assert_close(approximation(wide, rank), approximation(narrow, rank))
