"""Pivoted storage: a matrix of rank r, stored as r of its rows and the coefficients that give the other rows.

Source: PIFA (Zhao, Zhang and Cannistraci, ICML 2025). A matrix of rank r has r (out + in − r) degrees of freedom, and
two factors hold r² numbers more. Take r independent rows of Ŵ = left right, the pivots, and let P be their numbers::

    Ŵ[P] = left[P] right `(r, in)`, Ŵ[others] = D Ŵ[P] with D = left[others] left[P]⁻¹ `(out − r, r)`.

So Ŵ takes r (out + in − r) numbers, never more than dense.

Choice of P: rounding errors should be no larger than in a dense layer. Pivoted QR or LU would prefer large rows, and
the output of a small row would then be a small difference of large numbers. So P is chosen by the directions
ŵ_j / ‖ŵ_j‖ of the rows. Each direction is a linear combination of the pivots' directions. P is refined until no
coefficient of these combinations is above _LARGEST (a submatrix of dominant volume: Goreinov et al., How to find a good
submatrix, 2010); pivoting alone does not guarantee this. Then, with the pivots' outputs y = Ŵ[P] x,
Σ_k abs(D_jk y_k) ≤ _LARGEST r ‖ŵ_j‖ ‖x‖, so rounding errors are small compared with ‖ŵ_j‖ ‖x‖, as in a dense layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.factorization.weightings import exact_dtype, fast_device
from eckart.model.layers import low_rank_layers, matrix_of, pivoted_like, tied_heads

_LARGEST = 1.05  # largest coefficient of a direction; the closer to 1, the more pivots have to be exchanged


def pivot(model: PreTrainedModel) -> None:
    """Convert every target of `model` from factors to pivoted storage, except embeddings that are tied to a head.

    The outputs of the model stay the same, up to rounding.

    Raises:
        ValueError: a target has sparse rows beside its factors, or factors are not finite.
    """
    shared = tied_heads(model).values()
    for name, layer in low_rank_layers(model).items():
        if name in shared:
            continue
        if layer.residual is not None:
            raise ValueError(f"{name} has sparse rows, which pivoted storage does not hold: use storage: factors")
        left, right = (factor.detach() for factor in layer.factors)
        if not (left.isfinite().all() and right.isfinite().all()):
            raise ValueError(f"the factors of {name} are not finite")
        rows, others, places = pivots(left, right)
        stored = pivoted_like(layer, layer.rank).train(layer.training)
        with torch.no_grad():
            matrix_of(stored.right).copy_(rows)
            stored.others.weight.copy_(others)
            stored.places.copy_(places)
            if stored.bias is not None and layer.bias is not None:
                stored.bias.copy_(layer.bias)
        model.set_submodule(name, stored)


def pivots(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose pivots and compute the pivoted storage of Ŵ = left right, in float64 if the device supports it.

    The factors need not have full rank r: Ŵ[others] = D Ŵ[P] in any case.

    Args:
        left, right: `(out, r)` and `(r, in)`, r ≤ out.

    Returns:
        Ŵ[P] `(r, in)`, D `(out − r, r)`, and for each row of Ŵ its position in [Ŵ[P]; D Ŵ[P]], `(out,)`.
    """
    home, device = left.device, fast_device(left)
    left, right = (factor.to(device, exact_dtype(factor)) for factor in (left, right))
    weight = left @ right
    norms = weight.norm(dim=1)
    lengths = torch.where(norms > 0, norms, torch.ones_like(norms))
    chosen, coefficients = _dominant(torch.linalg.qr(left / lengths.unsqueeze(1)).Q)
    is_other = torch.ones(len(left), dtype=torch.bool, device=left.device)
    is_other[chosen] = False
    others = is_other.nonzero().squeeze(1)
    scaled = coefficients[others] * norms[others].unsqueeze(1) / lengths[chosen]
    return weight[chosen].to(home), scaled.to(home), torch.cat([chosen, others]).argsort().to(home)


def _dominant(basis: Tensor) -> tuple[Tensor, Tensor]:
    """Choose r rows P of `basis`, so that small coefficients give all rows from these: basis = coefficients basis[P].

    The search starts with the pivots of Gaussian elimination. While the largest coefficient is above _LARGEST, the row
    with this coefficient takes the place of the pivot that the coefficient belongs to. Each exchange multiplies the
    volume of basis[P] by the coefficient, so no choice of rows comes twice.

    Args:
        basis: `(out, r)`, with orthonormal columns.

    Returns:
        P `(r,)` and the coefficients `(out, r)`; no absolute value is above _LARGEST.
    """
    chosen = torch.tensor(_gauss(basis), device=basis.device)
    coefficients = _coefficients(basis, chosen)
    while coefficients.numel():
        row, column = divmod(int(coefficients.abs().argmax()), basis.shape[1])
        if coefficients[row, column].abs() <= _LARGEST:
            break
        chosen[column] = row
        change = coefficients[row].clone()
        change[column] -= 1
        coefficients.addr_(coefficients[:, column] / coefficients[row, column], change, alpha=-1)
    return chosen, _coefficients(basis, chosen)


def _gauss(basis: Tensor) -> list[int]:
    """Return the numbers of the pivot rows of Gaussian elimination of `basis`."""
    order = list(range(len(basis)))
    for place, row in enumerate((torch.linalg.lu_factor(basis).pivots - 1).tolist()):
        order[place], order[row] = order[row], order[place]
    return order[: basis.shape[1]]


def _coefficients(basis: Tensor, chosen: Tensor) -> Tensor:
    """Return basis basis[P]⁻¹ `(out, r)`."""
    return torch.linalg.solve(basis[chosen], basis, left=False)
