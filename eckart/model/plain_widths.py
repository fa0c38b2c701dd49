"""Plain layers for narrowed MLPs, so that the architecture's own config describes the model.

Its config has one number for the width of several MLPs. Narrower ones are filled up with neurons of zeros. These add
nothing to the outputs, because their columns of the down layer are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from math import ceil

import torch
from torch import Size, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.model.experts import Experts, unfuse_like, unfused_experts
from eckart.model.layers import narrowed_like, narrowed_shapes, set_weight, shape_of
from eckart.model.targets import weight_of

_MOST_SHARED = 8  # largest number of experts that a shared expert is as wide as
_ALIGNED = 8  # torch's product for experts takes rows of 16 bytes, in bfloat16 8 numbers


def restore_plain_widths(model: PreTrainedModel) -> tuple[dict[str, int], list[int]]:
    """Replace the layers of all narrowed MLPs of `model` by plain ones, and set their widths in its config.

    MLPs whose width is the same number of the config get that of the widest of them. If one of them is not narrowed, or
    no number in the config stands for their width alone, they get the width that they had before.

    Returns:
        Name in the text model's config of each number that was changed → its new value; and the former widths of the
        MLPs that got theirs back.
    """
    narrowed = narrowed_shapes(model)
    former = _skeleton(model, model.config)
    shapes = {name: shape_of(former.get_submodule(name)) for name in narrowed}
    downs = {name for name, (_, columns) in shapes.items() if narrowed[name][1] < columns}
    before = _neurons(shapes, downs)
    parts = {name: _parts(model, name, shapes[name][0], before[name]) for name in shapes.keys() - downs}
    changed, left, now = dict[str, int](), set(shapes), _sizes(former)
    for attribute, value in _numbers(model, {before[name] for name in downs}):
        layers = _layers_of(model, attribute, value, now, shapes, downs)
        if not layers or not layers <= left:
            continue
        width = max(ceil(narrowed[name][1] * value / before[name]) for name in layers & downs)
        if any(isinstance(_experts(model, name), Experts) for name in layers):
            width = ceil(width / _ALIGNED) * _ALIGNED
        if width < value:
            setattr(model.config.get_text_config(), attribute, width)
            changed[attribute] = width
            left -= layers
            shapes |= {name: _scaled(shapes[name], name in downs, width, value) for name in layers}
            now = _sizes(_skeleton(model, model.config))
    for name, shape in shapes.items():
        _fill_up(model, name, *shape, parts.get(name, 1))
    return changed, sorted({before[name] for name in left})


def _neurons(shapes: dict[str, tuple[int, int]], downs: set[str]) -> dict[str, int]:
    """Return the former number of neurons of the MLP of each layer.

    Args:
        shapes: former shapes of the layers, in the order of the model: a down layer ends its MLP.
        downs: names of the down layers.
    """
    neurons, found = next(columns for name, (_, columns) in shapes.items() if name in downs), dict[str, int]()
    for name, (_, columns) in reversed(shapes.items()):
        neurons = columns if name in downs else neurons
        found[name] = neurons
    return found


def _parts(model: PreTrainedModel, name: str, rows: int, neurons: int) -> int:
    """Return in how many parts the outputs of a layer are filled up: 2 if gate and up are a half each, else 1."""
    experts = _experts(model, name)
    return 1 if isinstance(experts, Experts) and experts.interleaved else rows // neurons


def _fill_up(model: PreTrainedModel, name: str, rows: int, columns: int, parts: int) -> None:
    """Replace a layer by a Linear or Conv1D of the shape `(rows, columns)`, whose further values are zeros.

    Args:
        parts: 2 if the layer computes gate and up, each in one half of its rows, which is filled up; else 1.
    """
    layer = model.get_submodule(name)
    weight, bias = weight_of(layer), getattr(layer, "bias", None)
    with torch.device("meta"):  # draws no random weights
        like = Conv1D(rows, columns) if isinstance(layer, Conv1D) else nn.Linear(columns, rows, bias=bias is not None)
    plain = like.to_empty(device=weight.device).to(weight.dtype).train(layer.training)
    filled = weight.new_zeros(rows, columns)
    within = filled.unflatten(0, (parts, -1))[:, : len(weight) // parts, : weight.shape[1]]
    within.copy_(weight.unflatten(0, (parts, -1)))
    set_weight(plain, filled)
    if bias is not None:
        with torch.no_grad():
            within = plain.get_parameter("bias").zero_().unflatten(0, (parts, -1))[:, : len(bias) // parts]
            within.copy_(bias.unflatten(0, (parts, -1)))
    model.set_submodule(name, plain)


def _numbers(model: PreTrainedModel, widths: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the numbers in the config of `model` that may be the former width of MLPs, or a part of it, with its value.

    Shared experts are as wide as several experts together. GPT-2's config need not state the number.
    """
    numbers = model.config.get_text_config().to_dict().items()
    for parts in range(1, _MOST_SHARED + 1):
        for width in sorted(widths):
            for name, value in numbers:
                if (value is None and parts == 1) or (type(value) is int and value * parts == width):
                    yield name, width // parts


def _layers_of(
    model: PreTrainedModel,
    attribute: str,
    value: int,
    now: Mapping[str, Size],
    shapes: Mapping[str, tuple[int, int]],
    downs: set[str],
) -> set[str]:
    """Return the layers whose width is the number `attribute` of the config; none if it also means something else.

    Args:
        value: its value, which it may leave out.
        now: shapes of all tensors by the config.
        shapes: shapes of the layers of narrowed MLPs, by the config.
    """
    probe = value // 2
    try:
        config = deepcopy(model.config)
        setattr(config.get_text_config(), attribute, probe)
        found = _sizes(_skeleton(model, config))
    except Exception:  # not a width of MLPs; the type of the error depends on the model family
        return set()
    layers = {name.rpartition(".")[0] for name in now if found.get(name) != now[name]}
    if found.keys() != now.keys() or not layers <= shapes.keys():
        return set()
    scaled = {name: _scaled(shapes[name], name in downs, probe, value) for name in layers}
    return layers if _sizes(_skeleton(model, model.config, scaled)) == found else set()


def _scaled(shape: tuple[int, int], is_down: bool, width: int, value: int) -> tuple[int, int]:
    """Return the shape that a layer of an MLP gets if the number of its neurons is `width` ÷ `value` of what it was."""
    rows, columns = shape
    return (rows, columns * width // value) if is_down else (rows * width // value, columns)


def _experts(model: PreTrainedModel, name: str) -> nn.Module:
    """Return the module above the expert of a layer; another module if the layer is not an expert's."""
    return model.get_submodule(".".join(name.split(".")[:-2]))


def _skeleton(
    model: PreTrainedModel, config: PreTrainedConfig, shapes: Mapping[str, tuple[int, int]] | None = None
) -> PreTrainedModel:
    """Return a model of the class of `model` without memory for its weights, whose experts are taken apart as in it.

    Args:
        shapes: name of layer → another shape that it gets.
    """
    with torch.device("meta"):
        same = type(model)(deepcopy(config))
    for name in unfused_experts(model):
        unfuse_like(same, name)
    for name, shape in (shapes or {}).items():
        same.set_submodule(name, narrowed_like(same.get_submodule(name), *shape))
    return same


def _sizes(model: PreTrainedModel) -> dict[str, Size]:
    return {name: values.shape for name, values in model.state_dict().items()}
