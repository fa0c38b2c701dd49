"""Pivoted storage: r of a matrix's rows, and what the others are of these.

Source: PIFA (Zhao, Zhang and Cannistraci, ICML 2025). A matrix of rank r has r (out + in − r) degrees of freedom, and
two factors hold r² numbers more. With r independent rows P of Ŵ = left right::

    Ŵ[P] = left[P] right `(r, in)`, Ŵ[others] = D Ŵ[P] with D = left[others] left[P]⁻¹ `(out − r, r)`,

so Ŵ is r (out + in − r) numbers, never more than dense.

Which rows (choice): those by which no output is rounded more than the dense map rounds it. A pivoted QR or LU prefers
large rows, and y of a small one is then the small difference of large numbers. So rows count by their direction,
ŵ_j / ‖ŵ_j‖, and P is refined until no coefficient of a direction in those of the pivots exceeds _LARGEST (a submatrix
of dominant volume: Goreinov et al., How to find a good submatrix, 2010), which no pivoting guarantees. Then
Σ_k abs(D_jk y_k) ≤ _LARGEST r ‖ŵ_j‖ ‖x‖, and rounding is small beside ‖ŵ_j‖ ‖x‖, as that of the dense map is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.model.layers import low_rank_layers, pivoted_like, replace, tied_heads

_LARGEST = 1.05  # coefficient of a direction; the nearer to 1, the more exchanges


def pivot(model: PreTrainedModel) -> None:
    """Store every target of `model` that has factors as pivots, but for those that a head shares.

    It computes the same, but for rounding.

    Raises:
        ValueError: sparse rows stand beside factors, or factors are not finite.
    """
    shared = tied_heads(model).values()
    for name, layer in low_rank_layers(model).items():
        if name in shared:
            continue
        if layer.residual is not None:
            raise ValueError(f"{name} has sparse rows, which stand beside factors: leave them as they are")
        left, right = (part.detach() for part in (layer.left, layer.right))
        if not (left.isfinite().all() and right.isfinite().all()):
            raise ValueError(f"the factors of {name} are not finite")
        rows, others, places = pivots(left, right)
        stored = pivoted_like(layer, layer.rank).train(layer.training)
        with torch.no_grad():
            stored.right.copy_(rows)
            stored.others.copy_(others)
            stored.places.copy_(places)
            if stored.bias is not None and layer.bias is not None:
                stored.bias.copy_(layer.bias)
        replace(model, name, stored)


def pivots(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ŵ[P] `(r, in)`, D `(out − r, r)`, and where each row of Ŵ stands in both one after the other `(out,)`.

    Computed in float64 where the device has it. Factors need not have rank r: Ŵ[others] = D Ŵ[P] in any case.

    Args:
        left, right: `(out, r)` and `(r, in)`, r ≤ out.
    """
    exact = torch.float32 if left.device.type == "mps" else torch.float64
    left, right = left.to(exact), right.to(exact)
    weight = left @ right
    norms = weight.norm(dim=1)
    lengths = torch.where(norms > 0, norms, torch.ones_like(norms))
    chosen, coefficients = _dominant(torch.linalg.qr(left / lengths.unsqueeze(1)).Q)
    is_other = torch.ones(len(left), dtype=torch.bool, device=left.device)
    is_other[chosen] = False
    others = is_other.nonzero().squeeze(1)
    scaled = coefficients[others] * norms[others].unsqueeze(1) / lengths[chosen]
    return weight[chosen], scaled, torch.cat([chosen, others]).argsort()


def _dominant(basis: Tensor) -> tuple[Tensor, Tensor]:
    """Rows P of an orthonormal `basis` `(out, r)` by which no row has a coefficient beyond _LARGEST, and all of these
    `(out, r)`: basis = coefficients basis[P].

    From the pivots of Gauss, the largest coefficient says which row is exchanged for which pivot: the volume of
    basis[P] grows by it, so no choice comes twice.
    """
    chosen = torch.tensor(_gauss(basis), device=basis.device)
    coefficients = _solved(basis, chosen)
    while coefficients.numel():
        row, column = divmod(int(coefficients.abs().argmax()), basis.shape[1])
        if coefficients[row, column].abs() <= _LARGEST:
            break
        chosen[column] = row
        change = coefficients[row].clone()
        change[column] -= 1
        coefficients = coefficients - torch.outer(coefficients[:, column] / coefficients[row, column], change)
    return chosen, _solved(basis, chosen)


def _gauss(basis: Tensor) -> list[int]:
    """The pivots of Gaussian elimination: rows of `basis`."""
    order = list(range(len(basis)))
    for place, row in enumerate((torch.linalg.lu_factor(basis).pivots - 1).tolist()):
        order[place], order[row] = order[row], order[place]
    return order[: basis.shape[1]]


def _solved(basis: Tensor, chosen: Tensor) -> Tensor:
    """basis basis[P]⁻¹ `(out, r)`."""
    return torch.linalg.solve(basis[chosen], basis, left=False)
