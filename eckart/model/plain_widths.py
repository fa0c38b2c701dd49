"""Plain layers for narrowed MLPs, all of one width, so that the architecture's own config describes the model.

Narrower MLPs are filled up with neurons of zeros. These add nothing to the outputs, because their columns of the down
layer are zero.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Size, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from eckart.model.layers import narrowed_shapes, replace, set_weight, shape_of
from eckart.model.targets import weight_of


def restore_plain_widths(model: PreTrainedModel) -> str | None:
    """Replace the layers of all narrowed MLPs of `model` by plain ones of one width, and set that width in its config.

    The width is that of the widest MLP. If no number in the config stands for it, or an MLP is not narrowed, all get
    the width that they had before they were narrowed.

    Returns:
        The name in the text model's config of the number that was changed; None if the MLPs got their former width.
    """
    narrowed, former = narrowed_shapes(model), _skeleton(model, model.config)
    shapes = {name: shape_of(former.get_submodule(name)) for name in narrowed}
    widths: dict[int, int] = {}  # former width → width of the widest MLP
    for name, (_, before) in shapes.items():  # the down layers have as many inputs as there are neurons
        if (now := narrowed[name][1]) < before:
            widths[before] = max(now, widths.get(before, 0))
    parts = {name: 1 if rows == narrowed[name][0] or rows in widths else 2 for name, (rows, _) in shapes.items()}
    if len(widths) == 1:
        ((before, widest),) = widths.items()
        for name, shape in shapes.items():
            rows, columns = (
                side * widest // before if now < side else side for side, now in zip(shape, narrowed[name], strict=True)
            )
            _fill_up(model, name, rows, columns, parts[name])
        if (attribute := _attribute(model, before, widest)) is not None:
            setattr(model.config.get_text_config(), attribute, widest)
            return attribute
    for name, shape in shapes.items():
        _fill_up(model, name, *shape, parts[name])
    return None


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


def _attribute(model: PreTrainedModel, before: int, width: int) -> str | None:
    """Return the number in the config of `model` that gives a model of its shapes when changed to `width`.

    Args:
        before: value of the number, if it is not None: GPT-2's config need not state it.
    """
    wanted = _sizes(model)
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


def _skeleton(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of the class of `model` without memory for its weights."""
    with torch.device("meta"):
        return type(model)(deepcopy(config))


def _sizes(model: PreTrainedModel) -> dict[str, Size]:
    return {name: values.shape for name, values in model.state_dict().items()}
