"""Find the layers whose weight a model uses outside their `forward`, by running it with stand-ins for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eckart.model.batches import Batch
from eckart.model.layers import replaced, shape_of
from eckart.model.probing import float_tensors


def used_outside(model: nn.Module, batch: Batch, calls: Mapping[str, int]) -> dict[str, str]:
    """Find the layers that cannot be replaced, because the model uses more of them than their `forward`.

    Reading the weight's dtype or device (T5) does not count as use.

    Args:
        calls: name of each layer to check → how often it runs for `batch`.

    Returns:
        Name of each layer that cannot be replaced → reason.
    """
    expected = _has_nan(model(**batch))
    failed, readers = _try_replacing(model, batch, calls, expected)
    if failed is None:
        return {}
    names = readers or list(calls)
    reasons = {name: _try_replacing(model, batch, {name: calls[name]}, expected)[0] for name in names}
    return {name: reason for name, reason in reasons.items() if reason} or dict.fromkeys(calls, failed)


class _StandIn(nn.Module):
    """Stands in for a layer and gives the same outputs, but its weight is nan: this shows whether other code uses it.

    Such code could not use a low-rank layer, because a low-rank layer has no dense weight.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.bias = getattr(module, "bias", None)
        self.out_features, self.in_features = shape_of(module)
        self.weight_was_read = False
        self.calls = 0

    @property
    def weight(self) -> Tensor:
        self.weight_was_read = True
        return torch.full_like(self.module.get_parameter("weight"), math.nan)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.module(x)


def _try_replacing(
    model: nn.Module, batch: Batch, calls: Mapping[str, int], expected: Sequence[bool]
) -> tuple[str | None, list[str]]:
    """Run the model with stand-ins for the layers in `calls`.

    Args:
        expected: whether each output of the model has a nan without stand-ins.

    Returns:
        The problem, or None if all layers can be replaced; and the layers to test one by one, because their weight was
        read or their `forward` was bypassed.
    """
    stand_ins = {name: _StandIn(model.get_submodule(name)).eval() for name in calls}
    try:
        with replaced(model, stand_ins):
            has_nan = _has_nan(model(**batch))
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        return f"cannot be replaced: {error}", []
    bypassed = [name for name, stand_in in stand_ins.items() if stand_in.calls != calls[name]]
    if bypassed:
        return "is not called through its name in the model", bypassed
    readers = [name for name, stand_in in stand_ins.items() if stand_in.weight_was_read]
    return (None if has_nan == expected else "its weight is used outside its forward"), readers


def _has_nan(output: Any) -> list[bool]:
    """Return, for each floating-point tensor of a model's output, whether any entry is nan."""
    return [bool(tensor.isnan().any()) for tensor in float_tensors(output)]
