"""Refinement: after its targets are factorized, a transformer layer (a block) is trained to restore its dense outputs.

The block f, from its factors θ, reads the hidden states X̂ of the compressed model, in which the earlier blocks are
refined already. It learns what the original block f* returns on the hidden states X of the original model::

    minimize  Σ ‖f(X̂; θ) − f*(X)‖²  over θ: factors, biases, norms, and the layers that stayed dense.

The sum is over the tokens of the calibration data without padding. Then the next block reads what the refined one
returns. So a block makes up for what its layers, each by itself, could not: nonlinear functions between them, and the
error of earlier blocks.

Source: AA-SVD (arXiv 2604.02119), block-level local refinement. From its official code: AdamW at 1e-4 with weight decay
0.01, a warm-up over a tenth of the steps, then a cosine to a tenth, gradients clipped at norm 1.
Departs from the paper: steps take the examples in an order drawn anew for each pass, and some batches are held out of
the training. The block keeps the parameters of the pass with the smallest error on them, or stays as it was, so that
the held-out error never rises. The error is in units of the wanted outputs, Σ ‖f − f*‖² ÷ Σ ‖f*‖². A block starts from
anchored factors (eckart/factorization/error_compensation.py).
Two other errors can be chosen (ours). In language models a few tokens have outputs a thousand times as large as all
others, which the next block normalizes. So ``relative`` divides each token's ‖f − f*‖² by its ‖f*‖². And ``gradients``
weighs each output's error by the mean square g² of the loss's gradient by this output, Σ gᵢ² (f − f*)ᵢ².

In memory are the training of one block and its inputs and outputs in both models, for all calibration tokens. The
training computes in the model's dtype, from a copy of the parameters in float32 or better. In float16 the error is
scaled up for the backward pass, because gradients of a mean over thousands of tokens would underflow.

Not refined are blocks that run several times (ALBERT) or share parameters with other parts of the model, and targets
outside of blocks. Embeddings within a block are not trained: T5's later blocks also read the first one's relative
positions. Nor are routers (choice), because which experts a token gets has no gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from eckart.calibration.losses import Loss
from eckart.factorization.error_compensation import DenseModules
from eckart.factorization.layerwise_forward import BlockCall, hidden_states
from eckart.model.batches import Batch, batch_size, examples_of
from eckart.model.layers import head_rows_like, low_rank_like, narrowed_like
from eckart.model.module_context import frozen, hooked, with_gradient
from eckart.model.targets import Product, Target, in_selector
from eckart.precision import at_least_float32, sum_dtype
from eckart.training.learning_rate import Schedule, share_of_peak

if TYPE_CHECKING:
    from eckart.ranks.budget import Ranks  # the ranks import this package

WARMUP, LAST_RATE, WEIGHT_DECAY, LARGEST_NORM = 0.1, 0.1, 0.01, 1.0
"""AA-SVD's: share of the steps in which the rate rises, last rate ÷ peak rate, decay, and norm of clipped gradients."""


ErrorKind = Literal["squared", "relative", "gradients"]


class Refine(BaseModel):
    """Settings of the refinement of blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    passes: int = Field(5, ge=1, description="passes over the calibration examples for each block; AA-SVD takes 25")
    learning_rate: float = Field(1e-4, gt=0, description="peak learning rate of AdamW")
    schedule: Schedule = Field(
        "cosine",
        description="learning rate after a warm-up: constant; linear and cosine fall to a tenth of the peak",
    )
    batch_size: int = Field(8, ge=1, description="examples in each step; AA-SVD takes 32")
    error: ErrorKind = Field(
        "squared",
        description="error of a block's outputs. squared: as in AA-SVD; relative: each token's in units of its own "
        "square; gradients: each output's weighted by the mean square of the loss's gradient by it",
    )
    held_out: float = Field(
        0.125, gt=0, lt=1, description="share of the examples that choose the pass whose parameters a block keeps"
    )
    seed: int = Field(0, ge=0, description="seed of the order of the examples")


class RefinedBlock(BaseModel):
    """Result of the refinement of a block.

    Attributes:
        name: name of the block.
        before, after: error on held-out examples ÷ the error of outputs that are all zero.
        passes: number of passes after which the block was best; 0 if it stayed as it was.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    before: float
    after: float
    passes: int


class BlockStore:
    """Storage of refined blocks, from which a factorization that was killed goes on; this one keeps nothing."""

    def load(self) -> Sequence[tuple[RefinedBlock, Mapping[str, Tensor]]]:
        """Return what was saved, in the same order."""
        return []

    def save(self, block: RefinedBlock, tensors: Mapping[str, Tensor]) -> None:
        """Save a block's result, and the values of all modules that changed since the block before."""

    def remove(self) -> None:
        """Remove what was saved, once the factorized model is stored."""


NO_STORE = BlockStore()


# --- which blocks, and when ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A block to refine, and the name of the batch entry that masks its tokens, if there is one."""

    name: str
    mask: str | None


Step = list[Target] | Block
"""Targets that read the same tensor, to be factorized together; or a block to be refined after all of its targets."""


def steps(model: PreTrainedModel, targets: Sequence[Target], groups: Sequence[list[Target]]) -> list[Step]:
    """Return the groups of targets, each block after the last group that begins in it.

    Args:
        targets: all targets in order of execution.
        groups: groups of targets with the same input, in order of execution.
    """
    group_of = {group[0].name: group for group in groups}
    places = {target.name: _block_of(model, target.name) for target in targets}
    fit = {places[target.name] for target in targets if not target.repeated} - {None}
    result: list[Step] = []
    for name, members in groupby(targets, key=lambda target: places[target.name]):
        within = list(members)
        result += [group_of[target.name] for target in within if target.name in group_of]
        if name in fit and name is not None and not _shares_parameters(model, name):
            masks = [target.mask for target in within if target.mask]  # experts of a router may have none
            result.append(Block(name, masks[-1] if masks else None))
    return result


def _block_of(model: PreTrainedModel, name: str) -> str | None:
    """Return the name of the block around a target, its name up to a number; None if there is none.

    Where the first number only counts lists of blocks (Funnel), it is the name up to the next number.
    """
    for number in re.finditer(r"(?:^|\.)\d+(?=\.)", name):
        block = name[: number.end()]
        if not isinstance(model.get_submodule(block), nn.ModuleList | nn.ModuleDict):
            return block
    return None


def _shares_parameters(model: PreTrainedModel, block: str) -> bool:
    places = list(model.named_parameters(remove_duplicate=False))
    within = {parameter for name, parameter in places if name.startswith(f"{block}.")}
    return any(parameter in within for name, parameter in places if not name.startswith(f"{block}."))


def split(batches: Iterable[Batch], size: int) -> list[Batch]:
    """Cut batches into parts of at most `size` examples.

    Raises:
        ValueError: there is only one part, so that none can be held out.
    """
    parts: list[Batch] = [
        examples_of(batch, start, start + size) for batch in batches for start in range(0, batch_size(batch), size)
    ]
    if len(parts) < 2:
        raise ValueError(
            "sequential.refine: some calibration examples must be held out: give more of them, or lower batch_size"
        )
    return parts


# --- training --------------------------------------------------------------------------------------------------------


def refine(
    model: PreTrainedModel,
    block: Block,
    calls: Sequence[BlockCall],
    settings: Refine,
    moment: Tensor | None = None,
) -> RefinedBlock:
    """Train the parameters of `block` of `model` on `calls`, and return its held-out errors.

    Args:
        calls: the block's calls for at least two batches, some of which are held out.
        moment: mean squares `(out,)` of the loss's gradient by the block's outputs, for the error `gradients`.
    """
    parts = [_Part(call, block.mask, settings.error == "relative", moment) for call in calls]
    held = _held_out(len(parts), settings.held_out)
    tested = [parts[place] for place in held]
    learned = [part for place, part in enumerate(parts) if place not in held]
    training = _Training(model.get_submodule(block.name), settings)
    before = training.error(tested)
    result = RefinedBlock(name=block.name, before=before, after=before, passes=0)
    if not before:
        return result  # nothing has changed the block and its inputs
    plan = _plan(learned, settings, torch.Generator().manual_seed(settings.seed))
    level = sum(part.energy for part in learned) / sum(part.tokens for part in learned)
    total, best = sum(map(len, plan)), dict[str, Tensor]()
    for number, of_pass in enumerate(plan, 1):
        for together in of_pass:
            training.step(together, level, total)
        if (after := training.error(tested)) < result.after:
            result = result.model_copy(update={"after": after, "passes": number})
            best = training.copy()
    training.store(best)
    return result


class _Part:
    """A call of the block, with its number of tokens and the error of outputs that are all zero."""

    def __init__(self, call: BlockCall, mask: str | None, relative: bool, moment: Tensor | None) -> None:
        self.call = call
        shape = call.wanted.shape[:-1]
        given = None if mask is None else call.batch.get(mask)
        self.padding: Tensor | None = None
        """Which tokens are padding, `(batch, tokens, 1)`; None if the mask has not the shape of the outputs."""
        if given is not None and given.numel() == shape.numel():
            self.padding = (given == 0).view(*shape, 1).to(call.wanted.device)
        self.tokens = shape.numel() if self.padding is None else int((~self.padding).sum())
        self.examples = batch_size(call.batch)
        self.weights = moment
        if relative:
            squares = at_least_float32(call.wanted).square().sum(-1, keepdim=True)
            self.weights = 1 / squares.clamp(min=torch.finfo(squares.dtype).tiny)
        self.energy = float(self.error(torch.zeros_like(call.wanted)))

    def error(self, outputs: Tensor) -> Tensor:
        """Return the error of outputs `(batch, tokens, out)`, a sum over all tokens that are not padding."""
        difference = at_least_float32(outputs) - at_least_float32(self.call.wanted)
        if self.padding is not None:
            difference = difference.masked_fill(self.padding, 0)
        return (difference.square() if self.weights is None else difference.square() * self.weights).sum()


class _Training:
    """AdamW on a copy of a block's parameters, in float32 or better."""

    def __init__(self, block: nn.Module, settings: Refine) -> None:
        self.block, self.settings, self.steps = block, settings, 0
        tables = {
            parameter
            for module in block.modules()
            if isinstance(module, nn.Embedding)
            for parameter in module.parameters()
        }
        modules = {name for name, _ in block.named_modules()}
        self.stored = {
            name: parameter
            for name, parameter in block.named_parameters()
            if parameter.is_floating_point() and parameter not in tables and not in_selector(name, modules)
        }
        self.trained = {
            name: parameter.detach().to(sum_dtype(parameter), copy=True).requires_grad_()
            for name, parameter in self.stored.items()
        }
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=settings.learning_rate, weight_decay=WEIGHT_DECAY)
        small = {parameter.device.type for parameter in self.stored.values() if parameter.dtype == torch.float16}
        self.scaler = torch.amp.GradScaler(min(small, default="cpu"), enabled=bool(small))

    def missed(self, part: _Part) -> Tensor:
        """Return the error of the block on a call."""
        parameters = {name: values.to(self.stored[name].dtype) for name, values in self.trained.items()}
        outputs = functional_call(self.block, parameters, part.call.args, part.call.kwargs)
        return part.error(hidden_states(outputs))

    @torch.no_grad()
    def error(self, parts: Sequence[_Part]) -> float:
        return float(sum(float(self.missed(part)) for part in parts) / sum(part.energy for part in parts))

    @torch.enable_grad()
    def step(self, parts: Sequence[_Part], level: float, total: int) -> None:
        """Take one of `total` steps on the mean error of the tokens of `parts`, in units of `level`."""
        self.steps += 1
        tokens = sum(part.tokens for part in parts)
        self.optimizer.zero_grad()
        for part in parts:
            self.scaler.scale(self.missed(part) / (level * tokens)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.trained.values(), LARGEST_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(total) * self.settings.learning_rate
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _rate(self, total: int) -> float:
        return share_of_peak(self.settings.schedule, self.steps, total, ceil(WARMUP * total), LAST_RATE)

    def copy(self) -> dict[str, Tensor]:
        return {name: values.detach().clone() for name, values in self.trained.items()}

    @torch.no_grad()
    def store(self, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into the block."""
        for name, value in values.items():
            self.stored[name].copy_(value)


def _held_out(count: int, share: float) -> set[int]:
    """Return the places of the held-out ones among `count` batches, evenly spread: batches may be sorted by length."""
    return {place for place in range(count) if int((place + 1) * share) > int(place * share)} or {count - 1}


def _plan(learned: Sequence[_Part], settings: Refine, generator: torch.Generator) -> list[list[list[_Part]]]:
    """Return the parts of each step of each pass, in an order drawn anew for each pass."""
    orders = [torch.randperm(len(learned), generator=generator).tolist() for _ in range(settings.passes)]
    return [list(_joined([learned[place] for place in order], settings.batch_size)) for order in orders]


def _joined(parts: Iterable[_Part], size: int) -> Iterator[list[_Part]]:
    """Join neighboring parts as long as they have at most `size` examples together."""
    joined: list[_Part] = []
    for part in parts:
        if joined and sum(other.examples for other in joined) + part.examples > size:
            yield joined
            joined = []
        joined.append(part)
    yield joined


# --- gradients -------------------------------------------------------------------------------------------------------


def gradient_moments(
    model: PreTrainedModel, blocks: Iterable[str], batches: Iterable[Batch], loss: Loss
) -> dict[str, Tensor]:
    """Return the mean squares `(out,)` of the loss's gradient by the outputs of each block, in units of their mean.

    They are gathered in one pass over the calibration data.

    Args:
        model: the original model.
        loss: loss for the gradients; if it returns several losses, their squares are summed.

    Raises:
        ValueError: a block has no gradient.
    """
    sums: dict[str, Tensor] = {}

    def after(name: str, _: nn.Module, __: Any, output: Any) -> Any:
        hidden = with_gradient(hidden_states(output))  # parameters are frozen, so the graph starts at the first block
        hidden.register_hook(partial(add, name))
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    def add(name: str, gradient: Tensor) -> None:
        squares = at_least_float32(gradient).square().flatten(0, -2).sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

    names = list(blocks)
    hooks = [model.get_submodule(name).register_forward_hook(partial(after, name)) for name in names]
    with hooked(hooks), frozen(model), torch.enable_grad():
        for batch in batches:
            losses = loss(model, batch).reshape(-1).unbind()
            for number, scalar in enumerate(losses, 1):
                scalar.backward(retain_graph=number < len(losses))
    if idle := [name for name in names if name not in sums or not sums[name].any()]:
        raise ValueError(f"{idle[0]}: the loss has no gradient by its outputs: write refine.error: relative")
    return {name: values / values.mean() for name, values in sums.items()}


# --- going on after a kill -------------------------------------------------------------------------------------------


def changed(model: PreTrainedModel, block: Block, since: Iterable[Target]) -> dict[str, Tensor]:
    """Return the parameters and buffers of `block` and of the layers of `since`: name in `model` → values."""
    names = [block.name, *(layer.name for target in since for layer in target.layers)]
    return {f"{name}.{key}": values for name in names for key, values in model.get_submodule(name).state_dict().items()}


def restore(
    model: PreTrainedModel,
    dense: DenseModules,
    plan: Sequence[Step],
    ranks: Ranks,
    narrowed_shape: Callable[[str], tuple[int, int] | None],
    saved: Sequence[Mapping[str, Tensor]],
) -> list[Step]:
    """Put `saved` tensors into `model`, after replacing the layers that have them, and return the rest of the plan.

    Args:
        dense: gets the layers that are replaced; has the original blocks already.
        plan: all steps.
        narrowed_shape: function that returns the shape of a layer of a narrowed MLP, or None for other layers.
        saved: results of `changed`, for the first blocks of the plan.
    """
    ends = [place for place, step in enumerate(plan, 1) if isinstance(step, Block)]
    start = ends[len(saved) - 1] if saved else 0
    for target in (target for step in plan[:start] if not isinstance(step, Block) for target in step):
        dense.keep([target])
        for layer in target.layers:
            module, shape = model.get_submodule(layer.name), narrowed_shape(layer.name)
            module = narrowed_like(module, *shape) if shape else module
            model.set_submodule(layer.name, _like(module, target, ranks[target.name]))
    for tensors in saved:
        model.load_state_dict(tensors, strict=False)
    return [*plan[start:]]


def _like(module: nn.Module, target: Target, rank: int | None) -> nn.Module:
    """Return a layer of the shape that `module` gets at this rank, with any values."""
    if rank is None:
        return deepcopy(module)
    return head_rows_like(module, target.heads, rank) if isinstance(target, Product) else low_rank_like(module, rank)
