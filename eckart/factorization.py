"""Factorizing a whole model: every target that has a rank gives way to its factors.

Either all under the evidence of the dense model, or in order of execution, each group of layers under evidence that is
gathered anew after those below it were factorized: what a layer reads is by then what it will read (sequential
calibration).

Source of the order: DRONE (Chen et al., NeurIPS 2021), section 3.3: "the changes of lower layer parameters will cause
the distribution of representation shifts in upper layers", so components are approximated one by one from the lower
layers to the higher ones, as algorithm 2 does.
Departs from the paper: ranks are those that were decided before, and evidence is gathered anew after a number of layers
rather than after each component, as each capture is a pass over the calibration data.

By default the error that a target is held to is that of its own map on the inputs that it has by now, ‖(W − Ŵ) X̂ᵀ‖,
as in the paper; what the layers below have lost already is not made up for. On a chain of two linear maps without
biases, under weighting `inputs`, this is never worse than the dense model's inputs: with X the rows of samples and Ŵ₁
the best of its rank, (W₁ − Ŵ₁) Xᵀ and Ŵ₁ Xᵀ have orthogonal rows, hence

    ‖W₂ W₁ Xᵀ − Ŵ₂ Ŵ₁ Xᵀ‖² = ‖W₂ (W₁ − Ŵ₁) Xᵀ‖² + ‖(W₂ − Ŵ₂) Ŵ₁ Xᵀ‖²,

whose second term, and no other, depends on Ŵ₂. Deeper, with biases or nonlinear functions it is no theorem. With an
anchor above 0 a target is held to the outputs of the dense model (eckart/anchoring.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import PreTrainedModel

from eckart.anchoring import DenseModules, anchor_targets
from eckart.budget import Ranks
from eckart.decomposition import decompose_target, factorize_product
from eckart.evidence import Evidence, collect, passes
from eckart.layers import factorize_target
from eckart.losses import Batch, Loss, mean_loss_times_batch
from eckart.targets import Product, Target, weight_of
from eckart.weighting import Weighting


class InOrder(BaseModel):
    """How targets are factorized in order.

    layers: that are factorized between two captures of their evidence.
    anchor: a, from 0, the dense weight, to 1, the map that makes up best for what the layers below have lost.
    ridge: λ of that map ÷ the mean of the inputs' second moments.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    layers: int = Field(ge=1)
    anchor: float = Field(ge=0, le=1)
    ridge: float = Field(gt=0)


def factorize_at_once(
    model: PreTrainedModel,
    targets: Iterable[Target],
    ranks: Ranks,
    weighting: Weighting,
    evidence: Evidence,
    residual: bool = False,
) -> None:
    """Replace each of `targets` that has a rank by the best factors of that rank under `weighting`.

    Args:
        ranks: target name → rank; None leaves the target as it is.
        residual: whether what the factors leave of W stands beside them.

    Raises:
        ValueError: a weight or its evidence is not fit; the message names the target.
    """
    for target in targets:
        rank = ranks[target.name]
        if rank is None:
            continue
        left, right = decompose_target(model, target, weighting, evidence).truncate(rank)
        if isinstance(target, Product):
            factorize_product(model, target, left, right)
            continue
        weight = weight_of(model.get_submodule(target.name))
        factorize_target(model, target.name, left, right, rest(weight, left, right) if residual else None)


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
    batches: Callable[[], Iterable[Batch]],
    order: InOrder,
    loss: Loss = mean_loss_times_batch,
    offload_activations: bool = False,
) -> None:
    """As `factorize_at_once`, with evidence gathered anew for each group of layers; no more is in memory.

    With an anchor, targets without a rank stay dense and are anchored, too; dense weights stay in memory beside their
    factors until the end.

    Args:
        targets: in order of execution, as `find_targets` gives them.
        batches: the calibration data from their beginning; model inputs with labels, each tensor `(batch, …)`.
        loss, offload_activations: as for `collect`.

    Raises:
        ValueError: as for `factorize_at_once` and `collect`.
    """
    dense = DenseModules(model)
    wanted = [target for target in targets if ranks[target.name] is not None or (order.anchor and target.sampled)]
    for part in passes(wanted, order.layers):
        some = _among_themselves(part.targets)
        beside = dense.back if dense.modules else None  # at first nothing is lost
        evidence = collect(model, batches(), some, weighting.evidence, loss, part.then, offload_activations, beside)
        if order.anchor:
            dense.keep(some)
        if beside:
            anchor_targets(model, some, evidence, order.anchor, order.ridge)
        factorize_at_once(model, some, ranks, weighting, evidence)


def _among_themselves(targets: Iterable[Target]) -> list[Target]:
    """The same targets, whose first reader of a tensor is the first of these: others may be factorized, or dense."""
    first: dict[str, str] = {}

    def renamed(target: Target) -> Target:
        update: dict[str, Any] = {"input_of": first.setdefault(target.input_of, target.name)}
        if isinstance(target, Product):
            update["other"] = renamed(target.other)
        return target.model_copy(update=update)

    return [renamed(target) for target in targets]
