"""Factorizing a whole model: every target that has a rank gives way to its factors.

Either all under the statistics of the dense model, or in order of execution, each under what it reads once those before
it were factorized: what a layer reads is by then what it will read (sequential calibration).

Source of the order: DRONE (Chen et al., NeurIPS 2021), section 3.3: "the changes of lower layer parameters will cause
the distribution of representation shifts in upper layers", so components are approximated one by one from the lower
layers to the higher ones, as algorithm 2 does.
Departs from the paper: ranks are those that were decided before. What a loss says, such as gradients of outputs, stays
that of the dense model (choice): gathered anew for each layer it changed nothing that could be measured.

By default the error that a target is held to is that of its own map on the inputs that it has by now, ‖(W − Ŵ) X̂ᵀ‖,
as in the paper; what was lost before it is not made up for. On a chain of two linear maps without biases, under
weighting `inputs`, this is never worse than the dense model's inputs: with X the rows of samples and Ŵ₁ the best of its
rank, (W₁ − Ŵ₁) Xᵀ and Ŵ₁ Xᵀ have orthogonal rows, hence::

    ‖W₂ W₁ Xᵀ − Ŵ₂ Ŵ₁ Xᵀ‖² = ‖W₂ (W₁ − Ŵ₁) Xᵀ‖² + ‖(W₂ − Ŵ₂) Ŵ₁ Xᵀ‖²,

whose second term, and no other, depends on Ŵ₂. Deeper, with biases or nonlinear functions it is no theorem. With an
anchor above 0 a target is held to the outputs of the dense model (eckart/factorization/error_compensation.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch
from eckart.calibration.statistics import Statistics
from eckart.factorization.decomposition import decompose_target, factorize_product
from eckart.factorization.error_compensation import DenseModules, anchor_targets
from eckart.factorization.layerwise_forward import walking
from eckart.factorization.weightings import Weighting
from eckart.model.layers import factorize_target, tie_head
from eckart.model.targets import Product, Target, Tied, weight_of
from eckart.ranks.budget import Ranks


class InOrder(BaseModel):
    """How targets are factorized in order.

    Attributes:
        anchor: a, from 0, the dense weight, to 1, the map that makes up best for what was lost before.
        ridge: λ of that map ÷ the mean of the inputs' second moments.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    anchor: float = Field(ge=0, le=1)
    ridge: float = Field(gt=0)


def factorize_model(
    model: PreTrainedModel,
    targets: Sequence[Target],
    ranks: Ranks,
    weighting: Weighting,
    statistics: Statistics,
    *,
    in_order: InOrder | None = None,
    batches: Iterable[Batch] = (),
    residual: bool = False,
) -> None:
    """Replace each of `targets` that has a rank by its best factors: all at once, or one after the other.

    Args:
        in_order: settings of factorizing in order of execution; None: all at once.
        batches: the calibration data, read where targets are factorized in order.
        residual: as in `factorize_at_once`, and for that alone.

    Raises:
        ValueError: a weight or its statistics are not fit; or a batch does not run a target.
    """
    if in_order:
        factorize_in_order(model, targets, ranks, weighting, statistics, batches, in_order)
    else:
        factorize_at_once(model, targets, ranks, weighting, statistics, residual)


def factorize_at_once(
    model: PreTrainedModel,
    targets: Iterable[Target],
    ranks: Ranks,
    weighting: Weighting,
    statistics: Statistics,
    residual: bool = False,
) -> None:
    """Replace each of `targets` that has a rank by the best factors of that rank under `weighting`.

    Args:
        ranks: target name → rank; None leaves the target as it is.
        residual: whether what the factors leave of W stands beside them.

    Raises:
        ValueError: a weight or its statistics are not fit; the message names the target.
    """
    for target in targets:
        rank = ranks[target.name]
        if rank is None:
            continue
        left, right = decompose_target(model, target, weighting, statistics).truncate(rank)
        if isinstance(target, Product):
            factorize_product(model, target, left, right)
            continue
        weight = weight_of(model.get_submodule(target.name))
        factorize_target(model, target.name, left, right, rest(weight, left, right) if residual else None)
        if isinstance(target, Tied):
            tie_head(model, target.other.name, target.name)


def rest(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """S = W − left right `(out, in)` (LoSparse, eq. 8) for factors `(out, rank)` and `(rank, in)`.

    What the factors lose when a model of W's type rounds them goes into S, so that the sum is W again.
    """
    product = left.to(weight.dtype).to(left.dtype) @ right.to(weight.dtype).to(right.dtype)
    return weight.to(product.dtype) - product


def factorize_in_order(
    model: PreTrainedModel,
    targets: Sequence[Target],
    ranks: Ranks,
    weighting: Weighting,
    statistics: Statistics,
    batches: Iterable[Batch],
    order: InOrder,
) -> None:
    """As `factorize_at_once`, but the inputs in `statistics` give way to what targets read when their turn comes.

    With an anchor, targets without a rank stay dense and are anchored, too; dense weights stay in memory beside their
    factors until the end. A target that runs several times comes before all others, under `statistics` as it is and
    without an anchor, and so does a product of maps that read two tensors: no one pause knows all that they read.

    Args:
        targets: in order of execution, as `find_targets` gives them.
        batches: the calibration data; model inputs, each tensor `(batch, …)`.

    Raises:
        ValueError: as for `factorize_at_once`; or a batch does not run a target.
    """
    first = [target for target in targets if _has_no_turn(target)]
    dense = DenseModules(model) if order.anchor else None
    if dense:
        dense.keep(first)
    factorize_at_once(model, first, ranks, weighting, statistics)
    wanted = [
        target
        for target in targets
        if not _has_no_turn(target) and (ranks[target.name] is not None or (order.anchor and target.sampled))
    ]
    groups = _readers(wanted)
    with walking(model, groups, batches, dense) as walk:
        for group in groups:
            anew = {**statistics, **walk.to(group)}
            if dense:
                dense.keep(group)
                anchor_targets(model, group, anew, order.anchor, order.ridge)
            factorize_at_once(model, group, ranks, weighting, anew)


def _has_no_turn(target: Target) -> bool:
    return target.repeated or len({each.input_of for each in target.maps}) > 1


def _readers(targets: Iterable[Target]) -> list[list[Target]]:
    """Those that read the same tensor, in order; the first of them is whose input it is, as others may be missing."""
    readers: dict[str, list[Target]] = {}
    for target in targets:
        readers.setdefault(target.input_of, []).append(target)
    return [[_reads_what(group[0].name, target) for target in group] for group in readers.values()]


def _reads_what(leader: str, target: Target) -> Target:
    update: dict[str, Any] = {"input_of": leader}
    if isinstance(target, Product):
        update["other"] = target.other.model_copy(update=update)
    return target.model_copy(update=update)
