"""Recipes of published methods give what the method's own formula gives, for a random layer.

The formulas are those of the papers' code, by Cholesky factors: ours never forms them. It was run beside them, too:
docs/explanation/methods/index.md has the differences.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eckart import recipes
from eckart.factorization.error_compensation import anchored
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import weigh
from eckart.model.targets import Target

EXAMPLES, TOKENS, RANK = 8, 16, 3
KEY = Target(name="key", out_features=6, in_features=9, input_of="key")


@pytest.fixture
def layer() -> dict[str, Tensor]:
    """W, inputs X, inputs X̂ in the compressed model, and output gradients Δ, of a random layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "w": (6, 9),
        "x": (EXAMPLES * TOKENS, 9),
        "noise": (EXAMPLES * TOKENS, 9),
        "delta": (EXAMPLES * TOKENS, 6),
    }
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    x = drawn["x"] @ torch.randn(9, 9, generator=generator, dtype=torch.float64)
    return {"w": drawn["w"], "x": x, "changed": x + drawn["noise"], "delta": drawn["delta"]}


def ours(recipe: str, w: Tensor, x: Tensor, delta: Tensor) -> Tensor:
    statistics = {
        "inputs": {"key": x.T @ x / EXAMPLES},
        "input_magnitudes": {"key": x.abs().sum(0) / EXAMPLES},
        "tokens": {"key": torch.tensor(float(TOKENS))},
        "output_gradients": {"key": delta.T @ delta / EXAMPLES},
    }
    left, right = decompose(w, weigh(recipes()[recipe].weighting, KEY, statistics)).truncate(RANK)
    return left @ right


def truncated(matrix: Tensor) -> Tensor:
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :RANK] * s[:RANK] @ vt[:RANK]


def test_asvd(layer):
    w, x = layer["w"], layer["x"]
    scale = x.abs().mean(0).sqrt()
    torch.testing.assert_close(ours("asvd", w, x, layer["delta"]), truncated(w * scale) / scale)


def test_svd_llms_whitening_is_drone(layer):
    w, x = layer["w"], layer["x"]
    root = torch.linalg.cholesky(x.T @ x)
    torch.testing.assert_close(ours("drone", w, x, layer["delta"]), truncated(w @ root) @ root.inverse())


@pytest.mark.parametrize(("recipe", "anchor"), [("svd_llm_sequential", 0), ("aa_svd", 1)])
def test_objectives_3_and_4_of_aa_svd(recipe, anchor, layer):
    """W D L⁻ᵀ is truncated, with C = L Lᵀ; objective 3 has C in place of D."""
    w, x, changed = layer["w"], layer["x"], layer["changed"]
    c, d = changed.T @ changed, x.T @ changed
    root = torch.linalg.cholesky(c)
    expected = truncated(w @ (d if anchor else c) @ root.T.inverse()) @ root.inverse()
    settings = recipes()[recipe].sequential
    assert settings.anchor == anchor
    target = anchored(w, c, w @ d, settings.anchor, settings.ridge) if anchor else w
    torch.testing.assert_close(ours(recipe, target, changed, layer["delta"]), expected, rtol=1e-6, atol=1e-6)


def test_kfac_svd(layer):
    """Whitened by both factors, each shrunk towards its mean diagonal, whatever the scale of the gradients."""
    w, x, delta = layer["w"], layer["x"], layer["delta"]
    right, left = (
        torch.linalg.cholesky((1 - share) * m + share * m.diagonal().mean() * torch.eye(len(m), dtype=m.dtype))
        for m, share in ((x.T @ x, 0.1), (delta.T @ delta, 0.3))
    )
    expected = left.T.inverse() @ truncated(left.T @ w @ right) @ right.inverse()
    torch.testing.assert_close(ours("kfac_svd", w, x, 1e-3 * delta), expected)
