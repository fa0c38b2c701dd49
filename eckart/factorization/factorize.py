"""Factorization of a whole model: every target with a rank is replaced by its factors.

There are two ways. Either all targets are factorized at once, with statistics of the original model. Or they are
factorized in order of execution, each with statistics of the inputs that it gets after the earlier targets were
factorized (sequential calibration).

Source of the order: DRONE (Chen et al., NeurIPS 2021), section 3.3: "the changes of lower layer parameters will cause
the distribution of representation shifts in upper layers". So algorithm 2 of the paper approximates one component after
the other, from lower to higher layers.
Departs from the paper: ranks are chosen before the factorization begins. Statistics of gradients stay those of the
original model (choice): gathering them again for each layer made no measurable difference.

With an anchor of 0, as in the paper, a target minimizes the error ‖(W − Ŵ) X̂ᵀ‖ of its own weight on its current inputs
X̂, and does not correct earlier errors. For a chain of two linear layers without biases under weighting `inputs`, this
is never worse than with the original inputs X `(tokens, in)`: for the best Ŵ₁ of its rank, (W₁ − Ŵ₁) Xᵀ and Ŵ₁ Xᵀ have
orthogonal rows, hence::

    ‖W₂ W₁ Xᵀ − Ŵ₂ Ŵ₁ Xᵀ‖² = ‖W₂ (W₁ − Ŵ₁) Xᵀ‖² + ‖(W₂ − Ŵ₂) Ŵ₁ Xᵀ‖²,

and only the second term depends on Ŵ₂. For deeper models, biases or nonlinear functions this is not proven. With an
anchor above 0, a target approximates the original model's outputs (eckart/factorization/error_compensation.py). With
refinement, each transformer layer is trained after its targets are factorized (eckart/factorization/refinement.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Loss, mean_loss_times_batch
from eckart.calibration.statistics import Statistics
from eckart.factorization.decomposition import decompose_target, factorize_product
from eckart.factorization.error_compensation import DenseModules, anchor_targets
from eckart.factorization.layerwise_forward import layerwise_forward
from eckart.factorization.narrowing import Narrowing
from eckart.factorization.refinement import (
    NO_STORE,
    Block,
    BlockStore,
    Refine,
    RefinedBlock,
    Step,
    changed,
    gradient_moments,
    refine,
    restore,
    split,
    steps,
)
from eckart.factorization.residual_sums import residual_readers
from eckart.factorization.weightings import Weighting
from eckart.model.batches import Batch, first_examples
from eckart.model.layers import factorize_target, tie_head
from eckart.model.mlps import Widths
from eckart.model.targets import Product, Target, Tied, weight_of
from eckart.progress import Progress, silent

if TYPE_CHECKING:  # a rank search factorizes, too
    from eckart.ranks.budget import Ranks


class InOrder(BaseModel):
    """Settings of the factorization in order of execution (sequential calibration)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    anchor: float = Field(
        0.5, ge=0, le=1, description="share of the earlier layers' error that each target corrects; 0: none"
    )
    ridge: float = Field(
        0.1, gt=0, description="weight λ of the pull to the original weights, in units of the inputs' mean square"
    )
    sums: bool = Field(
        False,
        description="whether a target whose output is added to hidden states corrects their error, too; for anchors "
        "above 0",
    )
    refine: Refine | None = Field(
        None, description="train each transformer layer to restore the original layer's outputs; null: do not"
    )


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
    progress: Progress = silent,
    widths: Widths | None = None,
    store: BlockStore = NO_STORE,
    loss: Loss = mean_loss_times_batch,
) -> list[RefinedBlock]:
    """Factorize all targets as a recipe asks for: with `factorize_in_order` if `in_order` is given, else at once.

    Args:
        batches: calibration data; only needed for the factorization in order.
        in_order: settings of the factorization in order of execution; None: use `factorize_at_once`.
        residual: as in `factorize_at_once`; ignored with `in_order`.
        progress: shows how far the factorization has come.
        widths: MLPs to narrow; a rank of one of their targets is that of the smaller layer.
        store: storage of refined blocks, from which a factorization that was killed goes on.
        loss: loss for a refinement that weighs errors by gradients.

    Returns:
        The refined blocks in order of execution; none if the recipe asks for no refinement.
    """
    narrowing = Narrowing(model, targets, widths or {}, weighting, statistics)
    if in_order:
        return factorize_in_order(
            model,
            targets,
            ranks,
            weighting,
            statistics,
            batches,
            in_order,
            progress,
            narrowing=narrowing,
            store=store,
            loss=loss,
        )
    for name in narrowing.down_of:
        narrowing.narrow(name)
    shown = progress(targets, "Factorization", "target")
    factorize_at_once(model, shown, ranks, weighting, statistics, residual, narrowing)
    return []


def factorize_at_once(
    model: PreTrainedModel,
    targets: Iterable[Target],
    ranks: Ranks,
    weighting: Weighting,
    statistics: Statistics,
    residual: bool = False,
    narrowing: Narrowing | None = None,
) -> None:
    """Replace each of `targets` that has a rank by the best factors of this rank under `weighting`.

    Args:
        ranks: target name → rank; None leaves the target as it is.
        residual: whether to add the `rest` W − left right to the factors, so that each layer still computes with W.
        narrowing: has narrowed some of the targets already; None: none.

    Raises:
        ValueError: a weight or its statistics are missing or not finite; the message names the target.
    """
    for target in targets:
        rank = ranks[target.name]
        if rank is None:
            continue
        kept = narrowing.kept(target.name) if narrowing else None
        left, right = decompose_target(model, target, weighting, statistics, kept).truncate(rank)
        if isinstance(target, Product):
            factorize_product(model, target, left, right)
            continue
        weight = weight_of(model.get_submodule(target.name))
        factorize_target(model, target.name, left, right, rest(weight, left, right) if residual else None)
        if isinstance(target, Tied):
            tie_head(model, target.other.name, target.name)


def rest(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the residual S = W − left right `(out, in)` of a factorization (LoSparse, eq. 8).

    The factors are rounded to W's dtype first, so that S makes up for this rounding, too, and the sum is W.

    Args:
        weight: W `(out, in)`.
        left, right: the factors, `(out, rank)` and `(rank, in)`.
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
    progress: Progress = silent,
    *,
    narrowing: Narrowing | None = None,
    store: BlockStore = NO_STORE,
    loss: Loss = mean_loss_times_batch,
) -> list[RefinedBlock]:
    """Factorize targets in order of execution, each with statistics of the inputs that it gets after the earlier ones.

    With an anchor above 0, targets without a rank are corrected, too, and stay dense. With an anchor or refinement, all
    original dense weights stay in memory until the end.

    Targets that run several times, experts, and products of two layers with different input tensors are factorized
    first, with `statistics` and without an anchor. No point of the forward pass has all inputs of repeated targets or
    products, and a batch may send no token to an expert, or other tokens than the original model does.

    Args:
        targets: targets in order of execution, as `find_targets` returns them.
        ranks: target name → rank; None leaves the target dense.
        statistics: statistics of the original model.
        batches: calibration data: model inputs, each tensor `(batch, …)`.
        progress: shows how far the factorization has come, in groups of targets with the same input and, with
            refinement, blocks.
        narrowing: narrows MLPs, before their layers are factorized; None: no MLP.
        store: storage of refined blocks, from which a factorization that was killed goes on.
        loss: loss for a refinement that weighs errors by gradients.

    Returns:
        The refined blocks in order of execution.

    Raises:
        ValueError: a weight or its statistics are missing or not finite, a batch does not run a target, or there are
            too few batches or no blocks for refinement.
    """
    narrowing = narrowing or Narrowing(model, targets, {}, weighting, statistics)
    first = [target for target in targets if not _knows_its_inputs(target)]
    groups = _by_input(
        target
        for target in targets
        if _knows_its_inputs(target)
        and (ranks[target.name] is not None or target.name in narrowing.down_of or (order.anchor and target.sampled))
    )
    dense = DenseModules(model) if order.anchor or order.refine else None
    plan: list[Step] = [*groups]
    saved, moments = store.load(), dict[str, Tensor]()
    if order.refine:
        plan, batches = steps(model, targets, groups), split(batches, order.refine.batch_size)
        moments = _moments(model, plan, batches, order.refine, loss)
    if dense:
        dense.keep_blocks(block.name for block, _ in saved)
        dense.keep(first)
    for target in first:
        if target.name in narrowing.down_of:
            narrowing.narrow(target.name)
    factorize_at_once(model, first, ranks, weighting, statistics, narrowing=narrowing)
    if dense:
        plan = restore(model, dense, plan, ranks, narrowing.shape, [tensors for _, tensors in saved])
    refined = [block for block, _ in saved]
    remaining = [step for step in plan if not isinstance(step, Block)]
    batches = list(batches)
    readers = _readers(model, remaining, batches, order)
    blocks = [step.name for step in plan if isinstance(step, Block)]
    since: list[Target] = []
    with layerwise_forward(model, remaining, batches, dense, blocks, readers) as forward:
        for step in progress(plan, "Factorization in order", "step"):
            if isinstance(step, Block):
                assert order.refine
                calls, moment = forward.end_block(step.name), moments.get(step.name)
                refined.append(refine(model, step, calls, order.refine, moment))
                del calls  # frees their memory
                store.save(refined[-1], changed(model, step, since))
                since = []
                continue
            current = {**statistics, **forward.advance_to(step)}
            if dense:
                dense.keep(step)
            _correct_and_narrow(model, step, current, order, narrowing)
            factorize_at_once(model, step, ranks, weighting, current, narrowing=narrowing)
            since += step
    return refined


def _readers(
    model: PreTrainedModel, groups: Sequence[Sequence[Target]], batches: Sequence[Batch], order: InOrder
) -> Mapping[str, tuple[str, ...]]:
    """Return what `residual_readers` finds for the targets `groups`, if sums are to be corrected."""
    if not (order.anchor and order.sums and groups and batches):
        return {}
    names = [group[0].name for group in groups if len(group) == 1 and not isinstance(group[0], Product)]
    return residual_readers(model, first_examples(batches[0], 1), names)


def _knows_its_inputs(target: Target) -> bool:
    """Whether all inputs of `target` are known at some point of the forward pass."""
    return not (target.repeated or target.routed_by or len({layer.input_of for layer in target.layers}) > 1)


def _moments(
    model: PreTrainedModel, plan: Iterable[Step], batches: Sequence[Batch], settings: Refine, loss: Loss
) -> dict[str, Tensor]:
    """Return block → the gradient moment of its output, for a refinement that weighs errors with it; or else nothing.

    Raises:
        ValueError: no block can be refined.
    """
    blocks = [step.name for step in plan if isinstance(step, Block)]
    if not blocks:
        raise ValueError(
            "sequential.refine: no transformer layer can be trained, since each runs several times, shares weights "
            "with other parts or has no target: write refine: null"
        )
    return gradient_moments(model, blocks, batches, loss) if settings.error == "gradients" else {}


def _correct_and_narrow(
    model: PreTrainedModel, group: Sequence[Target], current: Statistics, order: InOrder, narrowing: Narrowing
) -> None:
    """Anchor the targets `group`, if the recipe asks for it, and narrow those that belong to narrowed MLPs.

    A down layer that is narrowed has other inputs than in the original model, so it is corrected while it is narrowed.
    """
    if order.anchor:
        whole = [target for target in group if target.name not in narrowing.widths]
        anchor_targets(model, whole, current, order.anchor, order.ridge)
    for target in group:
        if target.name in narrowing.down_of:
            narrowing.narrow(target.name, current if order.anchor else None, order.anchor, order.ridge)


def _by_input(targets: Iterable[Target]) -> list[list[Target]]:
    """Group the targets that read the same input tensor; groups and targets stay in order of execution.

    The first target of a group becomes the `input_of` of all its targets, because `targets` may lack the target that
    `input_of` named before.
    """
    groups: dict[str, list[Target]] = {}
    for target in targets:
        group = groups.setdefault(target.input_of, [])
        first = {"input_of": group[0].name if group else target.name}
        if isinstance(target, Product):
            target = target.model_copy(update={"other": target.other.model_copy(update=first)})
        group.append(target.model_copy(update=first))
    return list(groups.values())
