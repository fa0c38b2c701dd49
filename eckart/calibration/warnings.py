"""Warnings about calibration data, such as too few tokens, idle experts or padding that changes outputs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.losses import Loss
from eckart.calibration.routed_tokens import unreached
from eckart.calibration.statistics import StatisticKind, Statistics, collect
from eckart.model.batches import ATTENTION, Batch, columns, row_of
from eckart.model.module_context import eval_mode, hooked
from eckart.model.targets import Target

_NEGLIGIBLE = 0.05  # no warning if layers with too few tokens have no more than this share of the parameters
_SCALE = 256.0  # factor of the loss in the test for underflow, so that gradients in float16 do not underflow
_UNDERFLOW = 0.01  # largest relative change of a statistic by this factor without a warning
# statistics of gradients, the smallest first
_BY_SIZE: tuple[StatisticKind, ...] = ("fisher", "taylor", "output_gradients", "gradients")
_SELECTED = 1e-4  # largest relative change of outputs by a target without a gradient that causes no warning
_SOUNDS = re.compile("(input_)?features?_(attention_)?mask")  # names of masks of sounds
_PADDED = 4  # number of padded examples that are tested
_TOLERATED = {True: 0.01, False: 0.1}
"""Whether a model is in float32 or float64 → largest relative change of its outputs by padding without a warning."""


def few_tokens_warning(targets: Iterable[Target], statistics: Statistics, examples: int) -> str | None:
    """Return a warning if targets read fewer tokens than they have input features, which makes C_in singular.

    (choice) There is no warning if these targets have at most a twentieth of all targets' parameters, such as a pooler,
    which reads only one token per example.

    Args:
        examples: number of examples from which the statistics were gathered.
    """
    tokens, moments = statistics.get("tokens", {}), statistics.get("inputs", {})
    layers = [layer for target in targets for layer in target.layers if layer.input_of in moments]
    layers = [layer for layer in layers if not layer.looks_up]
    seen = {layer.name: round(float(tokens[layer.input_of]) * examples) for layer in layers}
    few = [layer for layer in layers if seen[layer.name] < layer.in_features]
    if sum(layer.parameters for layer in few) <= _NEGLIGIBLE * sum(layer.parameters for layer in layers):
        return None
    worst = min(few, key=lambda layer: seen[layer.name] / layer.in_features)
    return (
        f"{len(few)} of {len(layers)} linear layers read fewer tokens than they have input features, such as "
        f"{worst.name} {seen[worst.name]:,} for {worst.in_features:,}: give more calibration examples"
    )


def no_gradient_warning(
    model: PreTrainedModel, batch: Batch, targets: Sequence[Target], statistics: Statistics
) -> str | None:
    """Return a warning if the loss has no gradient in some targets.

    Outputs depend on layers that select tokens, although these have no gradient. They do not depend on a pooler that
    the head ignores, nor on a layer that only works on other inputs, such as longer texts.

    Args:
        batch: model inputs for which the outputs of each of these targets are set to zero in turn.
    """
    sums = [statistics[kind] for kind in _BY_SIZE if kind in statistics]
    keys = {target.name: (target.name, f"{target.name}.output") for target in targets}
    present = {name: [values[key] for values in sums for key in both if key in values] for name, both in keys.items()}
    idle = [name for name, values in present.items() if values and not any(bool(value.any()) for value in values)]
    if not idle:
        return None
    try:
        with torch.no_grad(), eval_mode(model):
            whole = _first_output(model(**batch))
            changes = {name: _relative_change(_output_without(model, batch, name), whole) for name in idle}
    except Exception:  # the model does not take these examples, or returns nothing to compare
        changes = {}
    consequence = "Where errors are weighted by gradients, they keep almost no rank: exclude"
    if selecting := [name for name, change in changes.items() if change > _SELECTED]:
        return (
            f"{len(selecting)} of {len(targets)} layers change the outputs, but the loss has no gradient in them, as "
            f"in layers that select tokens, such as {selecting[0]}. {consequence} them"
        )
    return (
        f"the loss of the calibration data does not depend on {len(idle)} of {len(targets)} layers, such as {idle[0]}. "
        f"{consequence} those that other inputs need, such as longer texts"
    )


def _output_without(model: PreTrainedModel, batch: Batch, name: str) -> Tensor:
    """Return a model's first output if the layer `name` returns zeros."""
    with hooked([model.get_submodule(name).register_forward_hook(lambda _, __, outputs: outputs * 0)]):
        return _first_output(model(**batch))


def unreached_warning(targets: Iterable[Target], statistics: Statistics) -> str | None:
    """Return a warning if no token reached some experts, which then stay dense."""
    names = unreached(targets, statistics)
    if not names:
        return None
    return (
        f"{len(names)} linear layers of experts that no calibration token reached stay dense, such as {names[0]}: give "
        "more calibration examples"
    )


def padding_warning(model: PreTrainedModel, batches: Iterable[Batch]) -> str | None:
    """Return a warning if padding changes the model's output for one of the first four padded examples of `batches`.

    For instance, padding on the left changes the output of GPT-2, because GPT-2 counts positions from the first column.
    """
    examples = list(islice((example for batch in batches for example in _padded_examples(batch)), _PADDED))
    changes = [(_change_by_padding(model, example), number) for number, example in enumerate(examples)]
    change, number = max(changes, default=(0.0, 0))
    if change <= _TOLERATED[model.dtype in (torch.float32, torch.float64)]:
        return None
    left = examples[number][ATTENTION][0, 0] == 0 and "position_ids" not in examples[number]
    positions = "position_ids" in inspect.signature(model.forward).parameters
    on_the_right = "pad on the right, or give position_ids" if positions else "pad on the right"
    advice = on_the_right if left else "give batches of examples of one length"
    return f"padding changes the outputs of {type(model).__name__}, by {change:.0%} for one example: {advice}"


def hidden_sounds_warning(batches: Iterable[Batch]) -> str | None:
    """Return a warning if a mask hides parts of sounds, as Qwen2-Audio's does; layers that read sounds have no mask."""
    masks = {name: mask for batch in batches for name, mask in batch.items() if _SOUNDS.fullmatch(name)}
    if not (hiding := [name for name, mask in masks.items() if not mask.all()]):
        return None
    return (
        f"{hiding[0]} hides parts of sounds, but these count in the statistics of layers that read sounds: exclude "
        "such layers, or give sounds of one length"
    )


def _change_by_padding(model: PreTrainedModel, example: Batch) -> float:
    """Return the relative change of a model's first output by the padding of an example; 0 if there is no telling."""
    mask = example[ATTENTION]
    places = mask[0].nonzero().flatten()
    try:
        with torch.no_grad(), eval_mode(model):
            padded = _first_output(model(**columns(example, ATTENTION, torch.arange(mask.shape[1]))))
            alone = _first_output(model(**columns(example, ATTENTION, places)))
        if padded.shape != alone.shape:  # the model has an output for each token
            padded = padded.index_select(1, places)
        return _relative_change(padded, alone)
    except Exception:  # the model does not take this length, or returns nothing to compare
        return 0.0


def underflow_warning(
    model: PreTrainedModel, batch: Batch, targets: Sequence[Target], kinds: Collection[StatisticKind], loss: Loss
) -> str | None:
    """Return a warning if gradients of a model in float16 underflow; None for other dtypes.

    To test this, the loss is multiplied by a factor: gradients grow by the factor then, their squares by its square.

    Args:
        targets: targets whose gradient statistics are tested.
        kinds: statistics to gather, some of them of gradients. The smallest of these is tested.
    """
    if model.dtype != torch.float16:
        return None
    kind = next(kind for kind in _BY_SIZE if kind in kinds)
    growth = _SCALE if kind == "gradients" else _SCALE**2

    def gathered(factor: float) -> Mapping[str, Tensor]:
        return collect(model, [batch], targets, [kind], lambda *args: factor * loss(*args))[kind]

    small = gathered(1.0)
    try:
        large = gathered(_SCALE)
    except ValueError:  # the scaled gradients overflow, so the others do not underflow
        return None
    changes = {
        name: _relative_change(values, large[name] / growth) for name, values in small.items() if large[name].any()
    }
    name = max(changes, key=lambda name: changes[name], default=None)
    if name is None or changes[name] <= _UNDERFLOW:
        return None
    return (
        f"gradients underflow in float16, so their statistics are off, those of {name} by {changes[name]:.0%}: "
        "load the model in bfloat16 or float32"
    )


def _padded_examples(batch: Batch) -> Iterator[Batch]:
    """Yield each example that has padding, as a batch."""
    mask = batch.get(ATTENTION)
    if mask is None or mask.dim() != 2:
        return
    counts = mask.ne(0).sum(1)
    for row in ((counts > 0) & (counts < mask.shape[1])).nonzero().flatten().tolist():
        yield row_of(batch, row)


def _first_output(outputs: Any) -> Tensor:
    """Return the first output with at least two dimensions, `(batch, …)`."""
    return next(value for value in outputs.values() if isinstance(value, Tensor) and value.dim() > 1).float()


def _relative_change(changed: Tensor, reference: Tensor) -> float:
    return float((changed - reference).norm() / reference.norm())
