"""Decompositions of targets as they stand in a model; of the attention product, query and key of a head (DRONE, 3.2).

Source: DRONE (Chen et al., NeurIPS 2021), section 3.2, corollary 1. In our axes, for a head of width d whose queries q
and keys k `(tokens, d)` have passed their maps and biases::

    minimise ‖q kᵀ − q M kᵀ‖_F over rank(M) ≤ r,

which is the two-sided weighted SVD of the identity `(d, d)` with LᵀL = qᵀq and R Rᵀ = kᵀk. With M = left right the head
keeps r of its d queries and keys, q left and k rightᵀ: that is, r rows of either map, and of either bias, for M acts
behind it. All heads of a layer get one rank, as the ranks of appendix F are, multiples of 12 heads.

The rows stand at the first r outputs of their head and zeros at the others (eckart/model/layers.py: HeadRows). Zeros
add nothing to an inner product, so this saves parameters and projections in any attention module as it is; not the
product itself, whose kernels take heads of one width for queries, keys and values.

The sums qᵀq and kᵀk come from the weights as they are and what the weighting says of their inputs, C_in say:
qᵀq = Q C_in Qᵀ, and with the bias as one more column of Q, of inputs that are 1. A weighting that weighs outputs
(kfac) has in place of kᵀk what it says of the query's: changing M is changing queries by q M − q (choice).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics
from eckart.factorization.weighted_svd import Decomposition, decompose
from eckart.factorization.weightings import ErrorNorm, Weighting, weigh
from eckart.model.layers import head_rows_like, present, replace, set_weight
from eckart.model.targets import Product, Target, weight_of


def decompose_target(
    model: PreTrainedModel, target: Target, weighting: Weighting, statistics: Statistics
) -> Decomposition | ProductDecomposition:
    """The decomposition of `target`, as it is in `model`, under `weighting`.

    Raises:
        ValueError: a weight or its statistics are not fit; the message names the target.
    """
    try:
        if isinstance(target, Product):
            return decompose_product(model, target, weighting, statistics)
        return decompose(weight_of(model.get_submodule(target.name)), weigh(weighting, target, statistics))
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}") from error


@dataclass(frozen=True)
class ProductDecomposition:
    """M = left @ right of every head, the identity, with components in order of what they save.

    Attributes:
        left: `(heads, d, d)`.
        right: `(heads, d, d)`.
        spectrum: of all heads together `(d,)`, descending.
    """

    left: Tensor
    right: Tensor
    spectrum: Tensor

    def truncate(self, rank: int) -> tuple[Tensor, Tensor]:
        """The best factors of `rank`: `(heads, d, rank)` and `(heads, rank, d)`."""
        return self.left[:, :, :rank], self.right[:, :rank]


def decompose_product(
    model: PreTrainedModel, product: Product, weighting: Weighting, statistics: Statistics
) -> ProductDecomposition:
    """Decompose the product of `product`'s maps, as they are in `model`, under `weighting`.

    Raises:
        ValueError: the statistics lacks what the weighting reads, or a weight or a side is not finite.
    """
    outputs = weigh(weighting, product, statistics).left
    queries = _outputs(model, product, product.heads, weighting, statistics)
    if outputs is None:
        keys = _outputs(model, product.other, product.heads, weighting, statistics)
    else:
        keys = _of_heads(outputs, product.heads)
    identity = torch.eye(queries.shape[-1], dtype=queries.dtype, device=queries.device)
    parts = [decompose(identity, ErrorNorm(left=q, right=k)) for q, k in zip(queries, keys, strict=True)]
    left, right, spectra = (
        torch.stack([getattr(part, name) for part in parts]) for name in ("left", "right", "spectrum")
    )
    return ProductDecomposition(left, right, spectra.norm(dim=0))


def _outputs(
    model: PreTrainedModel, target: Target, heads: int, weighting: Weighting, statistics: Statistics
) -> Tensor:
    """The second moments of each head's outputs `(heads, d, d)`, as `weighting` weighs the inputs."""
    module = present(model, target.name)
    weight, bias = weight_of(module), getattr(module, "bias", None)
    weight = weight.to(torch.float32 if weight.device.type == "mps" else torch.float64)
    if bias is not None and "inputs" in weighting.statistics:
        weight = torch.cat([weight, bias.detach().to(weight).unsqueeze(1)], 1)
        statistics = {**statistics, "inputs": {target.input_of: _with_ones(statistics, target.input_of)}}
    of_heads = weight.unflatten(0, (heads, -1))
    side = weigh(weighting, target, statistics).right
    if side is None:
        return of_heads @ of_heads.mT
    side = side.to(weight)
    return (of_heads @ side if side.dim() == 2 else of_heads * side) @ of_heads.mT


def _of_heads(side: Tensor, heads: int) -> Tensor:
    """The blocks `(heads, d, d)` of a side `(out, out)` or `(out,)` that are within heads."""
    square = side.diag() if side.dim() == 1 else side
    return square.unflatten(0, (heads, -1)).unflatten(2, (heads, -1)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def _with_ones(statistics: Statistics, name: str) -> Tensor:
    """C_in `(in + 1, in + 1)` of inputs that have a 1 behind them, which the bias is the weight of."""
    moment, sums, tokens = (statistics[kind][name] for kind in ("inputs", "input_sums", "tokens"))
    last = torch.cat([sums, tokens.reshape(1)]).to(moment)
    return torch.cat([torch.cat([moment, last[:-1].unsqueeze(0)]), last.unsqueeze(1)], 1)


def factorize_product(model: PreTrainedModel, product: Product, left: Tensor, right: Tensor) -> None:
    """Replace both maps of `product` by those that give `q left` and `k rightᵀ` in every head, zeros behind them.

    Args:
        left, right: `(heads, d, rank)` and `(heads, rank, d)`.
    """
    for target, mix in zip(product.maps, (left.mT, right), strict=True):
        module = present(model, target.name)
        layer = head_rows_like(module, product.heads, mix.shape[1])
        with torch.no_grad():
            layer.factor.copy_(_mixed(mix, weight_of(module)))
            if layer.bias is not None:
                layer.bias.copy_(_mixed(mix, module.get_parameter("bias").unsqueeze(1)).squeeze(1))
        replace(model, target.name, layer)


def approximate_product(model: PreTrainedModel, product: Product, left: Tensor, right: Tensor) -> None:
    """Give the second map, which stays dense, the keys k Mᵀ with M = left right; arguments as `factorize_product`."""
    module = model.get_submodule(product.other.name)
    set_weight(module, _mixed(left @ right, weight_of(module)))
    if getattr(module, "bias", None) is not None:
        bias = module.get_parameter("bias")
        with torch.no_grad():
            bias.copy_(_mixed(left @ right, bias.unsqueeze(1)).squeeze(1))


def _mixed(mix: Tensor, rows: Tensor) -> Tensor:
    """`rows` `(heads · d, n)` of which each head's are mixed by `(heads, m, d)`: `(heads · m, n)`."""
    return (mix @ rows.detach().to(mix).unflatten(0, (len(mix), -1))).flatten(0, 1)
