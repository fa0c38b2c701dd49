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
is made among the candidates that lower the loss most, and E is updated once. With L W in place of W, the loss is that
of A = 1, which halves the work.

The smaller layers may be factorized, too. The squares of their weighted singular values are the eigenvalues of a
moment `(m, m)`, which a larger width adds to, so that no width needs a fit or a root of its own. For a layer W
`(n, in)` before the neurons it is (W R)[S]ᵀ A[S, S] (W R)[S]. For the down layer, with the ridge of `fitted` in B, it
is L W_S B[S, S] W_Sᵀ Lᵀ = L W (B − E) Wᵀ Lᵀ.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eckart.factorization.weighted_svd import accelerated
from eckart.factorization.weightings import ErrorNorm, Side, exact_dtype
from eckart.model.mlps import Mlp, Width

_CANDIDATES = 4  # candidates of a round ÷ neurons that it takes
_RIDGE = 1e-6  # added to the diagonal of B, in units of its mean: neurons may depend on each other


@dataclass(frozen=True)
class NeuronOrder:
    """Neurons in the order in which they are kept.

    Attributes:
        neurons: all neurons, the most important first.
        widths: numbers of neurons after each round, ascending, from 0 to n.
        losses: predicted loss at each of `widths`, descending.
        moments: some of `widths` → the moment of the fitted down layer L W_S, `(out, out)`.
    """

    neurons: list[int]
    widths: list[int]
    losses: list[float]
    moments: Mapping[int, Tensor]

    def kept(self, width: int) -> tuple[int, ...]:
        """Return the neurons that stay at `width`, ascending."""
        return tuple(sorted(self.neurons[:width]))

    def width(self, mlp: Mlp, width: int) -> Width:
        """Return the width of `mlp`, whose order this is, at one of `widths`."""
        loss = self.losses[self.widths.index(width)]
        return Width(up=mlp.up, kept=self.kept(width), loss=loss, interleaved=mlp.interleaved)


def order_neurons(weight: Tensor, moment: Side, group: int, moments_at: Container[int] = ()) -> NeuronOrder:
    """Order the neurons that the down layer reads by how much they lower the predicted loss, greedily.

    Args:
        weight: L W `(out, n)` of the down layer.
        moment: B, `(n, n)`, `(n,)` or None for the identity.
        group: number of neurons that each round takes.
        moments_at: widths to return moments for; those that no round ends at are ignored.
    """
    weight, norm = accelerated(weight, ErrorNorm(left=None, right=moment))
    columns = weight.T.to(exact_dtype(weight), copy=True).contiguous()  # (L W)ᵀ, in the order of `left`
    remaining = _ridged(_full_moment(norm.right, columns.T))  # E, of the neurons that are left
    outputs = remaining @ columns  # (L W E)ᵀ
    everything = outputs.T @ columns  # L W B Wᵀ Lᵀ
    left = torch.arange(len(columns), device=columns.device)
    chosen, widths, losses, moments = list[int](), [0], [float(everything.trace()) / 2], dict[int, Tensor]()
    while len(left):
        taken = _round(remaining, outputs, min(group, len(left)))
        chosen += left[taken].tolist()
        _move_to_end((left, columns, outputs, remaining, remaining.T), taken)
        rest = len(left) - len(taken)
        rows, effects = remaining[rest:], outputs[rest:]
        basis = torch.linalg.solve(rows[:, rest:], rows)  # E[S, S]⁻¹ E[S, :]
        left, columns = left[:rest], columns[:rest]
        outputs = outputs[:rest].addmm_(basis[:, :rest].T, effects, alpha=-1)
        remaining = remaining[:rest, :rest].addmm_(rows[:, :rest].T, basis[:, :rest], alpha=-1)
        widths.append(len(chosen))
        losses.append(min(losses[-1], max(0.0, float(torch.linalg.vecdot(columns, outputs).sum()) / 2)))
        if len(chosen) in moments_at:
            moments[len(chosen)] = everything - outputs.T @ columns
    return NeuronOrder(chosen, widths, [*losses[:-1], 0.0], moments)


def _move_to_end(tensors: Sequence[Tensor], places: Tensor) -> None:
    """Exchange rows of `tensors`, all of one length, so that those at `places` are the last; the others stay."""
    count = len(tensors[0])
    last = torch.arange(count - len(places), count, device=places.device)
    first, second = places[~torch.isin(places, last)], last[~torch.isin(last, places)]
    there, here = torch.cat([first, second]), torch.cat([second, first])
    for values in tensors:
        values[there] = values[here]


def _round(remaining: Tensor, outputs: Tensor, size: int) -> Tensor:
    """Return the places of the `size` neurons that a round takes, greedily among the candidates.

    Args:
        remaining, outputs: E `(n, n)` and (L W E)ᵀ `(n, out)` of the neurons that are left.
    """
    gains = _gains(torch.linalg.vecdot(outputs, outputs), remaining.diagonal())
    candidates = gains.topk(min(_CANDIDATES * size, len(gains))).indices
    # small matrices, in many steps that wait for each other: faster on the CPU
    inner = remaining[candidates][:, candidates].cpu()
    product = (outputs[candidates] @ outputs[candidates].T).cpu()  # E Wᵀ A W E
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


def moments_of_widths(weight: Tensor, side: Side, parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the moment W[S]ᵀ A[S, S] W[S] `(in, in)` of the rows S of a weight, after each of `parts` has joined S.

    Args:
        weight: W `(out, in)`, in the dtype to compute in.
        side: A, `(out, out)`, `(out,)` or None for the identity.
        parts: places of the rows that join.
    """
    joined = torch.empty(0, dtype=torch.long, device=weight.device)
    moment = weight.new_zeros(weight.shape[1], weight.shape[1])
    for part in parts:
        new = weight[part]
        if side is None or side.dim() == 1:
            half = (new if side is None else side[part].to(new).unsqueeze(1) * new) / 2
        else:
            rows = side[part]
            half = rows[:, joined].to(new) @ weight[joined] + rows[:, part].to(new) @ new / 2
        product = new.T @ half
        moment = moment + product + product.T
        joined = torch.cat([joined, part])
        yield moment


def _gains(effects: Tensor, diagonal: Tensor) -> Tensor:
    """Return how much each neuron lowers twice the loss: eⱼᵀ Wᵀ A W eⱼ, in `effects`, ÷ Eⱼⱼ."""
    return effects / diagonal.clamp(min=torch.finfo(diagonal.dtype).tiny)


def fitted(weight: Tensor, moment: Side, neurons: Tensor) -> Tensor:
    """Return the down layer W B[:, S] B[S, S]⁻¹ `(out, S)` that reads only `neurons`, for B = `moment`."""
    home = weight.device
    weight, norm = accelerated(weight, ErrorNorm(left=None, right=moment))
    w = weight.to(exact_dtype(weight))
    b = _ridged(_full_moment(norm.right, w))
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


def _full_moment(side: Side, weight: Tensor) -> Tensor:
    """Return the right side of a norm as a matrix `(n, n)` in the dtype of `weight`."""
    if side is None:
        return torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    side = side.to(weight)
    return side.diag() if side.dim() == 1 else side


def _ridged(moment: Tensor) -> Tensor:
    """Return the moment with a ridge, so that it is positive definite, even if no input is ever other than zero."""
    level = float(moment.diagonal().mean()) or 1.0
    return moment + _RIDGE * level * torch.eye(len(moment), dtype=moment.dtype, device=moment.device)
