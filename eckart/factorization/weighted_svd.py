"""The two-sided weighted SVD; all closed-form factorizations are special cases of it.

Minimize ‖L (W − Ŵ) R‖_F over rank(Ŵ) ≤ r. With U S Vᵀ = L W R, the optimum is Ŵ = L⁻¹ U_r S_r V_rᵀ R⁻¹, and its squared
loss is Σ_{k>r} S_k² (Eckart and Young 1936, after the change of variables W → L W R).

The code only needs A = LᵀL and B = R Rᵀ. If out ≤ in, take any root A = K Kᵀ and let L = Kᵀ. Then U and S² are the
eigenvectors and eigenvalues of Kᵀ (W B Wᵀ) K `(out, out)`, and::

    Ŵ = K⁻ᵀ U_r · U_rᵀ Kᵀ W.

R is never formed nor inverted, so a singular B (dead channels, fewer tokens than dimensions) is no special case. If
in < out, the same is done with the transpose, so that only the smaller side is factored and inverted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eckart.factorization.weightings import ErrorNorm, Side, exact_dtype, fast_device

_FLOOR = 1e-12  # lower bound of a side's eigenvalues and variances ÷ the largest of each; higher in float32 (see _root)
_WIDE = 512  # features from which a side's root is a Cholesky factor: for fewer, that saves no time worth other bits
_INEXACT = 1e-6  # largest bound of the relative error of its smallest eigenvalue for which it is


@dataclass(frozen=True)
class Decomposition:
    """Result of a weighted SVD: W = left @ right, with components in descending order of their weighted energy.

    Attributes:
        left: left factor `(out, k)`, k = min(out, in); for an attention product, one for each head: `(heads, d, d)`.
        right: right factor `(k, in)`, or `(heads, d, d)`.
        spectrum: weighted singular values S, descending, `(k,)`; for a product, their norms over the heads, `(d,)`.
    """

    left: Tensor
    right: Tensor
    spectrum: Tensor

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return the best factors of `rank`: `(…, out, rank)` and `(…, rank, in)`."""
        return self.left[..., :rank], self.right[..., :rank, :]


def decompose(weight: Tensor, norm: ErrorNorm) -> Decomposition:
    """Return the weighted SVD of `weight` `(out, in)` under `norm`, computed in float64 if the device supports it.

    Each component's column of `left` and row of `right` have equal norms. A weight on the CPU is decomposed on the GPU,
    if there is one; the result is on the weight's device.

    Raises:
        ValueError: the weight or a side of the norm is not finite.
    """
    _check_finite(weight, norm)
    rows, columns = weight.shape
    if columns < rows:
        flipped = decompose(weight.T, ErrorNorm(left=norm.right, right=norm.left))
        return Decomposition(left=flipped.right.T, right=flipped.left.T, spectrum=flipped.spectrum)
    home = weight.device
    weight, norm = accelerated(weight, norm)
    w, lift, unlift, gram = _weighted_gram(weight, norm)
    energies, basis = torch.linalg.eigh(gram)  # ascending
    spectrum, basis = energies.flip(0).clamp(min=0).sqrt(), basis.flip(1)
    left, right = _balanced(_apply(unlift, basis), basis.T @ _apply(lift, w))
    return Decomposition(left.to(home), right.to(home), spectrum.to(home))


def accelerated(weight: Tensor, norm: ErrorNorm) -> tuple[Tensor, ErrorNorm]:
    """Return a weight and the norm of its errors on one device, the weight's `fast_device`."""
    device = fast_device(weight)
    left, right = (None if side is None else side.to(device) for side in (norm.left, norm.right))
    return weight.to(device), ErrorNorm(left=left, right=right)


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale each component so that its column of `left` and its row of `right` have equal norms.

    Without a weighting, this gives the usual √S on each side. With a weighting, √S on each side would be different
    (choice): the scales of the factors would depend on the units of the statistics and differ up to a hundredfold, so
    that no learning rate could suit all recipes.
    """
    columns, rows = left.norm(dim=0), right.norm(dim=1)
    balance = torch.where((columns > 0) & (rows > 0), (rows / columns).sqrt(), torch.ones_like(columns))
    return left * balance, right / balance.unsqueeze(1)


def spectrum(weight: Tensor, norm: ErrorNorm) -> Tensor:
    """Return only the weighted singular values of `decompose`, at half the cost: descending, `(min(out, in),)`."""
    _check_finite(weight, norm)
    if weight.shape[1] < weight.shape[0]:
        return spectrum(weight.T, ErrorNorm(left=norm.right, right=norm.left))
    home = weight.device
    *_, gram = _weighted_gram(*accelerated(weight, norm))
    return spectrum_of_moment(gram).to(home)


def spectrum_of_moment(moment: Tensor) -> Tensor:
    """Return the singular values of X, descending, from the moment X Xᵀ or Xᵀ X: as many as the moment has rows."""
    return torch.linalg.eigvalsh((moment + moment.T) / 2).flip(0).clamp(min=0).sqrt()


def absorbed(weight: Tensor, norm: ErrorNorm, side: Literal["left", "right"]) -> tuple[Tensor, ErrorNorm]:
    """Return L W, or W R, and the norm without this side: they have the weighted singular values of W and the norm.

    The same holds for any columns of L W, or rows of W R: to decompose such a part, no root of this side is needed.

    Raises:
        ValueError: the weight or a side of the norm is not finite.
    """
    _check_finite(weight, norm)
    weight, norm = accelerated(weight, norm)
    w = weight.to(exact_dtype(weight))
    if side == "left":
        return _lifted(norm.left, w), ErrorNorm(None, norm.right)
    return _lifted(norm.right, w.T).T, ErrorNorm(norm.left, None)


def weighted_loss(error: Tensor, norm: ErrorNorm) -> Tensor:
    """Return the squared norm ‖L E R‖²_F = tr(A E B Eᵀ) of an error E `(out, in)`."""
    e = error.to(exact_dtype(error))
    return (_apply(norm.left, e) * _apply(norm.right, e.T).T).sum()


def _weighted_gram(weight: Tensor, norm: ErrorNorm) -> tuple[Tensor, Side, Side, Tensor]:
    """Return W in the dtype for exact computation, Kᵀ and K⁻ᵀ of the left side, and Kᵀ (W B Wᵀ) K."""
    w = weight.to(exact_dtype(weight))
    lift, unlift = _root(norm.left)
    gram = _apply(norm.right, w.T).T @ w.T
    gram = _apply(lift, _apply(lift, gram).T)
    if norm.left is not None and not norm.left.any():
        gram = torch.zeros_like(gram)  # no error has a weight, but _root puts a floor above 0
    return w, lift, unlift, (gram + gram.T) / 2


def _check_finite(weight: Tensor, norm: ErrorNorm) -> None:
    for name, values in (("weight", weight), ("left weighting", norm.left), ("right weighting", norm.right)):
        if values is not None and not torch.stack(values.aminmax()).isfinite().all():  # no copy of all values
            raise ValueError(f"the {name} is not finite")


def _root(side: Side) -> tuple[Side, Side]:
    """Return Kᵀ and K⁻ᵀ with K Kᵀ = side; small eigenvalues are raised to a floor to make the side positive definite.

    The floor is for eigenvalues of the correlation matrix. So the floor is small compared with each channel's own
    variance, even if another channel is an outlier.
    """
    if side is None:
        return None, None
    values = side.to(exact_dtype(side))
    diagonal = values if values.dim() == 1 else values.diagonal()
    top, floor = float(diagonal.max()), max(_FLOOR, 10 * torch.finfo(values.dtype).eps)
    deviations = diagonal.clamp(min=floor * top if top > 0 else 1.0).sqrt()
    if values.dim() == 1:
        return deviations, 1 / deviations
    correlations = values / deviations.unsqueeze(1) / deviations
    correlations.diagonal()[:] = 1.0  # also for dead channels
    if len(values) >= _WIDE and (factors := _cholesky(correlations)):
        lift, unlift = factors
        return lift * deviations, unlift / deviations.unsqueeze(1)
    eigenvalues, vectors = torch.linalg.eigh(correlations)
    roots = eigenvalues.clamp(min=floor * float(eigenvalues[-1])).sqrt()
    return (deviations.unsqueeze(1) * vectors * roots).T, vectors / deviations.unsqueeze(1) / roots


def _lifted(side: Side, x: Tensor) -> Tensor:
    """Return Kᵀ x with K Kᵀ = `side`, without the floor of `_root` if the side is zero."""
    return torch.zeros_like(x) if side is not None and not side.any() else _apply(_root(side)[0], x)


def _cholesky(correlations: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return Fᵀ and F⁻ᵀ with F Fᵀ = `correlations`, or None unless they are known to be well conditioned.

    This takes a fifth of the time of an eigendecomposition. Then no eigenvalue is below the floor: the smallest is at
    least 1 / tr(C⁻¹) = 1 / ‖F⁻¹‖²_F, and the largest at most tr(C), the number of features.
    """
    factor, failed = torch.linalg.cholesky_ex(correlations)
    if failed:
        return None
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
    condition = float(inverse.square().sum()) * len(factor)
    return (factor.T, inverse.T) if condition * torch.finfo(factor.dtype).eps <= _INEXACT else None


def _apply(side: Side, x: Tensor) -> Tensor:
    if side is None:
        return x
    side = side.to(x)
    return side @ x if side.dim() == 2 else side.unsqueeze(1) * x
