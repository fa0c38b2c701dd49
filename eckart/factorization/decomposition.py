"""Decomposition of a target's weight: a weighted SVD, or a weighted SVD for each head of an attention product (DRONE).

Source: DRONE (Chen et al., NeurIPS 2021), section 3.2, corollary 1. In our axes, for a head of width d with queries q
and keys k `(tokens, d)`, biases included::

    minimize ‖q kᵀ − q M kᵀ‖_F over rank(M) ≤ r.

The solution is the two-sided weighted SVD of the identity `(d, d)` with LᵀL = qᵀq and R Rᵀ = kᵀk. With M = left right,
a head computes q left and k rightᵀ, which have r columns in place of d. So both layers keep r rows of weight and bias
for each head. All heads of a layer get the same rank, as in appendix F, in which all ranks are multiples of 12 heads.

The r outputs of a head are followed by zeros (HeadRows in eckart/model/layers.py). Zeros add nothing to an inner
product, so this saves parameters and the cost of projections in any attention module, without changes to the module.
The product itself costs the same, because attention kernels need heads of one width for queries, keys and values.

The moments qᵀq and kᵀk follow from the weights and from the weighting of their inputs. With C_in, for instance,
qᵀq = Q C_in Qᵀ; the bias is one more column of Q, for an input that is always 1. If a weighting also weighs outputs
(kfac), the query's left side of the norm replaces kᵀk, because a change of M changes the queries by q M − q (choice).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics
from eckart.factorization.neuron_selection import of_features
from eckart.factorization.weighted_svd import Decomposition, decompose
from eckart.factorization.weightings import ErrorNorm, Weighting, exact_dtype, weigh
from eckart.model.layers import head_rows_like, present, set_weight
from eckart.model.targets import Product, Target, weight_of


def decompose_target(
    model: PreTrainedModel,
    target: Target,
    weighting: Weighting,
    statistics: Statistics,
    kept: Tensor | None = None,
) -> Decomposition:
    """Decompose the weight of `target` in `model` into components, under `weighting`.

    Args:
        kept: the outputs or inputs that the layer has left, if its MLP was narrowed; None: all.

    Raises:
        ValueError: a weight or its statistics are missing or not finite; the message names the target.
    """
    try:
        if isinstance(target, Product):
            return decompose_product(model, target, weighting, statistics)
        weight, norm = weight_of(model.get_submodule(target.name)), weigh(weighting, target, statistics)
        return decompose(weight, of_features(norm, weight, kept))
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}") from error


def decompose_product(
    model: PreTrainedModel, product: Product, weighting: Weighting, statistics: Statistics
) -> Decomposition:
    """Decompose the identity M between queries and keys of `product` in `model` into components, under `weighting`.

    Raises:
        ValueError: a statistic that the weighting reads is missing, or a weight or a side of the norm is not finite.
    """
    outputs = weigh(weighting, product, statistics).left
    queries = _output_moments(model, product, product.heads, weighting, statistics)
    if outputs is None:
        keys = _output_moments(model, product.other, product.heads, weighting, statistics)
    else:  # the diagonal blocks `(heads, d, d)`
        square = outputs.diag() if outputs.dim() == 1 else outputs
        blocks = square.unflatten(0, (product.heads, -1)).unflatten(2, (product.heads, -1))
        keys = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    identity = torch.eye(queries.shape[-1], dtype=queries.dtype, device=queries.device)
    parts = [decompose(identity, ErrorNorm(left=q, right=k)) for q, k in zip(queries, keys, strict=True)]
    left, right, spectra = (
        torch.stack([getattr(part, name) for part in parts]) for name in ("left", "right", "spectrum")
    )
    return Decomposition(left, right, spectra.norm(dim=0))


def _output_moments(
    model: PreTrainedModel, target: Target, heads: int, weighting: Weighting, statistics: Statistics
) -> Tensor:
    """Return the second moments of each head's outputs `(heads, d, d)`, for inputs as `weighting` weighs them."""
    module = present(model, target.name)
    weight, bias = weight_of(module), getattr(module, "bias", None)
    weight, side = weight.to(exact_dtype(weight)), weigh(weighting, target, statistics).right
    if bias is not None and side is not None and "inputs" in weighting.statistics:
        weight = torch.cat([weight, bias.detach().to(weight).unsqueeze(1)], 1)
        side = _with_ones(side, statistics, target.input_of, weighting.correlations)
    by_head = weight.unflatten(0, (heads, -1))
    if side is None:
        return by_head @ by_head.mT
    side = side.to(weight)
    return (by_head @ side if side.dim() == 2 else by_head * side) @ by_head.mT


def _with_ones(side: Tensor, statistics: Statistics, name: str, correlations: float) -> Tensor:
    """Return a right side `(in + 1, in + 1)` for inputs with a 1 appended, which makes a bias a column of the weight.

    The 1 is certain, so its own moment is not shrunk. Its products with inputs are, like those of two inputs: else the
    side would not be positive semidefinite if inputs have large means.

    Args:
        side: the scaled and perhaps shrunk C_in `(in, in)`; shrinkage keeps the trace.
        correlations: share of the products of two inputs that is left in `side`.
    """
    moment, sums, tokens = (statistics[kind][name] for kind in ("inputs", "input_sums", "tokens"))
    scale = side.trace() / moment.trace() if moment.any() else 1.0
    last = torch.cat([correlations * sums, tokens.reshape(1)]).to(side) * scale
    return torch.cat([torch.cat([side, last[:-1].unsqueeze(0)]), last.unsqueeze(1)], 1)


@torch.no_grad()
def factorize_product(model: PreTrainedModel, product: Product, left: Tensor, right: Tensor) -> None:
    """Replace both layers of `product` by layers that compute q left and k rightᵀ in every head, followed by zeros.

    Args:
        left, right: the factors of M, `(heads, d, rank)` and `(heads, rank, d)`.
    """
    for target, mix in zip(product.layers, (left.mT, right), strict=True):
        module = present(model, target.name)
        layer = head_rows_like(module, product.heads, mix.shape[1])
        layer.factor.weight.copy_(_mixed(mix, weight_of(module)))
        if layer.bias is not None:
            layer.bias.copy_(_mixed(mix, module.get_parameter("bias").unsqueeze(1)).squeeze(1))
        model.set_submodule(target.name, layer)


@torch.no_grad()
def approximate_product(model: PreTrainedModel, product: Product, left: Tensor, right: Tensor) -> None:
    """Change the dense weight of the product's second layer so that it computes the keys k Mᵀ with M = left right.

    The model then has the same outputs as with the factorized product, but both layers stay dense.

    Args:
        left, right: the factors of M, `(heads, d, rank)` and `(heads, rank, d)`.
    """
    module, mix = model.get_submodule(product.other.name), left @ right
    set_weight(module, _mixed(mix, weight_of(module)))
    if getattr(module, "bias", None) is not None:
        bias = module.get_parameter("bias")
        bias.copy_(_mixed(mix, bias.unsqueeze(1)).squeeze(1))


def _mixed(mix: Tensor, rows: Tensor) -> Tensor:
    """Multiply each head's `rows` `(heads · d, n)` from the left with `mix` `(heads, m, d)`: `(heads · m, n)`."""
    return (mix @ rows.detach().to(mix).unflatten(0, (len(mix), -1))).flatten(0, 1)
