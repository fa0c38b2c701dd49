"""Selection of the neurons of an MLP that stay when it is narrowed, and the predicted loss of every width.

The neurons of an MLP are the inputs x `(tokens, n)` of its last layer, the down layer W `(out, n)`. A narrowed MLP
computes only those in a set S. Its down layer W_S `(out, S)` is fitted to the outputs of the original one. With
B = R Rᵀ, the second moment of x, and A = LᵀL, the norm of the recipe's weighting (eckart/factorization/weightings.py)::

    minimize ‖L (W − W_S P_S) R‖ over W_S  ⇒  W_S = W B[:, S] B[S, S]⁻¹,  loss = ½ tr(A W E Wᵀ),
    E = B − B[:, S] B[S, S]⁻¹ B[S, :],

where P_S picks the inputs in S. E is the part of the moment that the kept neurons do not predict. This is the Nyström
approximation of MoDeGPT (Lin et al., ICLR 2025). MoDeGPT takes the neurons of largest ridge leverage [B (B + λI)⁻¹]ⱼⱼ,
which knows neither W nor A. Ours (choice) is greedy in the loss itself: neuron j lowers it by ‖A^½ W eⱼ‖² ÷ 2 Eⱼⱼ, with
eⱼ column j of E. In three layers of SmolLM2 the predicted loss at 40 % of the neurons is 0.84, 0.92 and 0.97 × that
with ridge leverage.

The neurons are taken in groups, because a group updates E by one matrix product: in each round, the exact greedy choice
is made among the candidates that lower the loss most, and E is updated once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eckart.factorization.weighted_svd import accelerated
from eckart.factorization.weightings import ErrorNorm, Side, exact_dtype

_CANDIDATES = 4  # candidates of a round ÷ neurons that it takes
_RIDGE = 1e-6  # added to the diagonal of B, in units of its mean: neurons may depend on each other


@dataclass(frozen=True)
class NeuronOrder:
    """Neurons in the order in which they are kept.

    Attributes:
        neurons: all neurons, the most important first.
        widths: numbers of neurons after each round, ascending, from 0 to n.
        losses: predicted loss at each of `widths`, descending.
    """

    neurons: list[int]
    widths: list[int]
    losses: list[float]

    def kept(self, width: int) -> tuple[int, ...]:
        """Return the neurons that stay at `width`, ascending."""
        return tuple(sorted(self.neurons[:width]))


def order_neurons(weight: Tensor, norm: ErrorNorm, group: int) -> NeuronOrder:
    """Order the neurons that the down layer reads by how much they lower the predicted loss, greedily.

    Args:
        weight: W `(out, n)` of the down layer.
        norm: norm of its errors.
        group: number of neurons that each round takes.
    """
    weight, norm = accelerated(weight, norm)
    w = weight.to(exact_dtype(weight))
    remaining = _ridged(full_moment(norm.right, w))  # E
    outputs = w @ remaining  # W E
    missed = outputs if norm.left is None else as_matrix(norm.left, w) @ outputs  # A W E
    chosen: list[int] = []
    free = torch.ones(w.shape[1], dtype=torch.bool, device=w.device)
    losses = [float((w * missed).sum()) / 2]
    while len(chosen) < len(free):
        of_round = _round(remaining, outputs, missed, free, min(group, len(free) - len(chosen)))
        free[of_round] = False
        chosen += of_round.tolist()
        basis = torch.linalg.solve(remaining[of_round][:, of_round], remaining[of_round])  # E[S, S]⁻¹ E[S, :]
        outputs = outputs - outputs[:, of_round] @ basis
        missed = missed - missed[:, of_round] @ basis
        remaining = remaining - remaining[:, of_round] @ basis
        losses.append(min(losses[-1], max(0.0, float((w * missed).sum()) / 2)))
    widths = [min(number * group, len(free)) for number in range(len(losses))]
    return NeuronOrder(chosen, widths, [*losses[:-1], 0.0])


def _round(remaining: Tensor, outputs: Tensor, missed: Tensor, free: Tensor, size: int) -> Tensor:
    """Return the `size` neurons that a round takes, greedily among the candidates.

    Args:
        remaining, outputs, missed: E `(n, n)`, W E and A W E `(out, n)`.
        free: neurons that no earlier round took, `(n,)`.
    """
    gains = _gains((outputs * missed).sum(0), remaining.diagonal()).masked_fill(~free, -torch.inf)
    candidates = gains.topk(min(_CANDIDATES * size, int(free.sum()))).indices
    # small matrices, in many steps that wait for each other: faster on the CPU
    inner = remaining[candidates][:, candidates].cpu()
    product = (outputs[:, candidates].T @ missed[:, candidates]).cpu()  # E Wᵀ A W E
    chosen: list[int] = []
    for _ in range(size):
        gains = _gains(product.diagonal(), inner.diagonal())
        gains[chosen] = -torch.inf
        best = int(gains.argmax())
        chosen.append(best)
        taken = inner[best].clone()
        row = taken / taken[best]
        half = product[best] - product[best, best] / 2 * row  # of the product's change, which is symmetric
        product.addr_(row, half, alpha=-1).addr_(half, row, alpha=-1)
        inner.addr_(taken, row, alpha=-1)
    return candidates[chosen]


def _gains(effects: Tensor, diagonal: Tensor) -> Tensor:
    """Return how much each neuron lowers twice the loss: eⱼᵀ Wᵀ A W eⱼ, in `effects`, ÷ Eⱼⱼ."""
    return effects / diagonal.clamp(min=torch.finfo(diagonal.dtype).tiny)


def fitted(weight: Tensor, moment: Side, neurons: Tensor) -> Tensor:
    """Return the down layer W B[:, S] B[S, S]⁻¹ `(out, S)` that reads only `neurons`, for B = `moment`."""
    home = weight.device
    weight, norm = accelerated(weight, ErrorNorm(left=None, right=moment))
    w = weight.to(exact_dtype(weight))
    b = _ridged(full_moment(norm.right, w))
    return torch.linalg.solve(b[neurons][:, neurons], w @ b[:, neurons], left=False).to(home)


def of_features(norm: ErrorNorm, weight: Tensor, kept: Tensor | None) -> ErrorNorm:
    """Return the part of a norm that belongs to the outputs or inputs `kept` that a layer has left; None: all.

    Args:
        norm: norm of the errors of the original layer.
        weight: weight of the smaller layer, `(out, in)`.
    """
    rows, columns = weight.shape
    return ErrorNorm(_part(norm.left, rows, kept), _part(norm.right, columns, kept))


def _part(side: Side, size: int, kept: Tensor | None) -> Side:
    """Return the part of a side of a norm that belongs to `kept`; the whole side if it has `size` features already.

    Args:
        side: `(n, n)`, `(n,)` or None.
        kept: the features that stay, `(size,)`; None: all.
    """
    if side is None or kept is None or len(side) == size:
        return side
    kept = kept.to(side.device)
    return side[kept] if side.dim() == 1 else side[kept][:, kept]


def as_matrix(side: Side, weight: Tensor) -> Tensor:
    """Return the left side of a norm as a matrix `(out, out)` in the dtype of `weight`."""
    return _matrix(side, len(weight), weight)


def full_moment(side: Side, weight: Tensor) -> Tensor:
    """Return the right side of a norm as a matrix `(n, n)` in the dtype of `weight`."""
    return _matrix(side, weight.shape[1], weight)


def _matrix(side: Side, size: int, like: Tensor) -> Tensor:
    if side is None:
        return torch.eye(size, dtype=like.dtype, device=like.device)
    side = side.to(like)
    return side.diag() if side.dim() == 1 else side


def _ridged(moment: Tensor) -> Tensor:
    """Return the moment with a ridge, so that it is positive definite, even if no input is ever other than zero."""
    level = float(moment.diagonal().mean()) or 1.0
    return moment + _RIDGE * level * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
