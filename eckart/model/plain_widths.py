"""Plain layers for narrowed MLPs, so that the architecture's own config describes the model.

Its config has one width for all MLPs that had the same number of neurons. Narrower ones are filled up with neurons of
zeros. These add nothing to the outputs, because their columns of the down layer are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Size, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.model.experts import Experts, unfuse_like, unfused_experts
from eckart.model.layers import narrowed_like, narrowed_shapes, replace, set_weight, shape_of
from eckart.model.targets import weight_of


def restore_plain_widths(model: PreTrainedModel) -> dict[int, str | None]:
    """Replace the layers of all narrowed MLPs of `model` by plain ones, and set their width in its config.

    MLPs that had the same number of neurons get the width of the widest of them. If no number in the config stands for
    it, or one of them is not narrowed, they get the width that they had before.

    Returns:
        Former width → name in the text model's config of the number that was changed; None if they got it back.
    """
    narrowed, former = narrowed_shapes(model), _skeleton(model, model.config)
    shapes = {name: shape_of(former.get_submodule(name)) for name in narrowed}
    downs = {name for name, (_, columns) in shapes.items() if narrowed[name][1] < columns}
    before = _neurons(shapes, downs)
    parts = {name: _parts(model, name, shapes[name][0], before[name]) for name in shapes.keys() - downs}
    changed: dict[int, str | None] = {}
    for neurons in dict.fromkeys(before.values()):
        same = {name: shape for name, shape in shapes.items() if before[name] == neurons}
        widest = max(narrowed[name][1] for name in same.keys() & downs)
        plain = {
            name: (rows, widest) if name in downs else (rows * widest // neurons, columns)
            for name, (rows, columns) in same.items()
        }
        changed[neurons] = attribute = _attribute(model, neurons, widest, plain)
        if attribute:
            setattr(model.config.get_text_config(), attribute, widest)
            shapes |= plain
    for name, shape in shapes.items():
        _fill_up(model, name, *shape, parts.get(name, 1))
    return changed


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
    parents = name.split(".")[:-2]
    above = model.get_submodule(".".join(parents))
    return 1 if isinstance(above, Experts) and above.interleaved else rows // neurons


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
    replace(model, name, plain)


def _attribute(model: PreTrainedModel, before: int, width: int, shapes: Mapping[str, tuple[int, int]]) -> str | None:
    """Return the number in the config of `model` that, changed to `width`, gives these layers `shapes`, and no others.

    Args:
        before: value of the number, if it is not None: GPT-2's config need not state it.
    """
    wanted = _sizes(_skeleton(model, model.config, shapes))
    for name, value in model.config.get_text_config().to_dict().items():
        if value is None or (type(value) is int and value == before):
            try:
                config = deepcopy(model.config)
                setattr(config.get_text_config(), name, width)
                found = _sizes(_skeleton(model, config))
            except Exception:  # not a width of MLPs; the type of the error depends on the model family
                continue
            if found == wanted:
                return name
    return None


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
        replace(same, name, narrowed_like(same.get_submodule(name), *shape))
    return same


def _sizes(model: PreTrainedModel) -> dict[str, Size]:
    return {name: values.shape for name, values in model.state_dict().items()}
