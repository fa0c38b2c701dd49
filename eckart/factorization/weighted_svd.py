"""The two-sided weighted SVD: every closed-form factorization is this one function.

Minimise ‖L (W − Ŵ) R‖_F over rank(Ŵ) ≤ r. With U S Vᵀ = L W R the optimum is Ŵ = L⁻¹ U_r S_r V_rᵀ R⁻¹, and its squared
loss is Σ_{k>r} S_k² (Eckart and Young 1936, after the change of variables W → L W R).

How it is computed here, for A = LᵀL, B = R Rᵀ and out ≤ in: with any root A = K Kᵀ and L = Kᵀ, U and S² are the
eigenvectors and eigenvalues of Kᵀ (W B Wᵀ) K `(out, out)`, and::

    Ŵ = K⁻ᵀ U_r · U_rᵀ Kᵀ W.

R is never formed and never inverted, so a singular B (dead channels, fewer samples than dimensions) is no special case.
For in < out the transpose of everything holds. Only the smaller side is factored and inverted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eckart.factorization.weightings import ErrorNorm, Side

_FLOOR = 1e-12  # least eigenvalue and variance of a side, relative to the largest; more in float32


@dataclass(frozen=True)
class Decomposition:
    """W = left @ right, with components in order of what they save; k = min(out, in).

    Attributes:
        left: `(out, k)`.
        right: `(k, in)`.
        spectrum: S `(k,)`, descending.
    """

    left: Tensor
    right: Tensor
    spectrum: Tensor

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """The best factors of `rank`: `(out, rank)` and `(rank, in)`."""
        return self.left[:, :rank], self.right[:rank]


def decompose(weight: Tensor, norm: ErrorNorm) -> Decomposition:
    """Decompose `weight` `(out, in)` under `norm`; left and right of each component have equal norms.

    Computed in float64 where the device has it.

    Raises:
        ValueError: the weight or a side of the norm is not finite.
    """
    _check_finite(weight, norm)
    rows, columns = weight.shape
    if columns < rows:
        flipped = decompose(weight.T, ErrorNorm(left=norm.right, right=norm.left))
        return Decomposition(left=flipped.right.T, right=flipped.left.T, spectrum=flipped.spectrum)
    w, lift, unlift, gram = _weighted_gram(weight, norm)
    energies, basis = torch.linalg.eigh(gram)  # ascending
    spectrum, basis = energies.flip(0).clamp(min=0).sqrt(), basis.flip(1)
    left, right = _balanced(_apply(unlift, basis), basis.T @ _apply(lift, w))
    return Decomposition(left=left, right=right, spectrum=spectrum)


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same product with equal norms of each component's column and row.

    Without a weighting this is the usual split of √S to each side. Under a weighting (choice) it is not: √S in weighted
    coordinates would give the factors a scale that depends on the units of the statistics, up to a hundredfold apart,
    and one learning rate would mean another recovery for each recipe.
    """
    norms, others = left.norm(dim=0), right.norm(dim=1)
    balance = torch.where((norms > 0) & (others > 0), (others / norms).sqrt(), torch.ones_like(norms))
    return left * balance, right / balance.unsqueeze(1)


def spectrum(weight: Tensor, norm: ErrorNorm) -> Tensor:
    """S of `decompose`, descending `(min(out, in),)`, at half the price."""
    _check_finite(weight, norm)
    if weight.shape[1] < weight.shape[0]:
        return spectrum(weight.T, ErrorNorm(left=norm.right, right=norm.left))
    *_, gram = _weighted_gram(weight, norm)
    return torch.linalg.eigvalsh(gram).flip(0).clamp(min=0).sqrt()


def weighted_loss(error: Tensor, norm: ErrorNorm) -> Tensor:
    """‖L E R‖²_F = tr(A E B Eᵀ) of an error `(out, in)`."""
    e = error.to(_precision(error))
    return (_apply(norm.left, e) * _apply(norm.right, e.T).T).sum()


def _weighted_gram(weight: Tensor, norm: ErrorNorm) -> tuple[Tensor, Side, Side, Tensor]:
    """W in working precision, Kᵀ and K⁻ᵀ of the left side, and Kᵀ (W B Wᵀ) K."""
    w = weight.to(_precision(weight))
    lift, unlift = _root(norm.left)
    gram = _apply(norm.right, w.T).T @ w.T
    gram = _apply(lift, _apply(lift, gram).T)
    if norm.left is not None and not norm.left.any():
        gram = torch.zeros_like(gram)  # where nothing weighs anything, everything can be lost for nothing
    return w, lift, unlift, (gram + gram.T) / 2


def _check_finite(weight: Tensor, norm: ErrorNorm) -> None:
    for what, values in (
        ("weight", weight),
        ("left weighting", norm.left),
        ("right weighting", norm.right),
    ):
        if values is not None and not torch.isfinite(values).all():
            raise ValueError(f"the {what} is not finite")


def _root(side: Side) -> tuple[Side, Side]:
    """Kᵀ and K⁻ᵀ with K Kᵀ = side, made positive definite by a floor under its eigenvalues.

    The floor is set on the correlation matrix, so that it is small against each channel's own variance and an outlier
    channel does not drown the others.
    """
    if side is None:
        return None, None
    values = side.to(_precision(side))
    diagonal = values if values.dim() == 1 else values.diagonal()
    top, floor = float(diagonal.max()), max(_FLOOR, 10 * torch.finfo(values.dtype).eps)
    deviations = diagonal.clamp(min=floor * top if top > 0 else 1.0).sqrt()
    if values.dim() == 1:
        return deviations, 1 / deviations
    correlations = values / deviations.unsqueeze(1) / deviations
    correlations.diagonal()[:] = 1.0  # also where the channel is dead
    eigenvalues, vectors = torch.linalg.eigh(correlations)
    roots = eigenvalues.clamp(min=floor * float(eigenvalues[-1])).sqrt()
    return (deviations.unsqueeze(1) * vectors * roots).T, vectors / deviations.unsqueeze(1) / roots


def _apply(side: Side, x: Tensor) -> Tensor:
    if side is None:
        return x
    side = side.to(x)
    return side @ x if side.dim() == 2 else side.unsqueeze(1) * x


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
