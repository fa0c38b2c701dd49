"""Residual connections: finds the hidden states that a layer's output is added to.

Error compensation can correct their error (eckart/factorization/error_compensation.py). They are found in a forward
pass of one example, in any architecture: one term of an addition is the output of the layer, the other was the input of
some module before. Where a norm or a factor comes between output and addition, as in Gemma 2 or Granite, nothing is
found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch
from eckart.model.module_context import eval_mode, hooked
from eckart.model.probing import shortened

_ADDING = {"add", "add_", "__add__", "__radd__", "__iadd__"}


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a module."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


@torch.no_grad()
def residual_readers(model: PreTrainedModel, batch: Batch, names: Collection[str]) -> dict[str, str]:
    """Return layer → module whose `first_input` are the hidden states that the layer's output is added to.

    Args:
        batch: model inputs, each `(batch, …)`. A few tokens of a long text are enough.
        names: the linear layers to look at; those without such a sum are missing from the result.
    """
    batch = shortened(model, batch)
    latest: dict[str, int] = {}
    """Module → address of its latest input."""
    outputs: dict[int, tuple[str, dict[int, str]]] = {}
    """Address of a layer's output → the layer, and the modules whose latest inputs are known when it runs."""
    seen: list[Tensor] = []  # kept, so that no later tensor has the address of an earlier one
    found: dict[str, str] = {}

    def read(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if (x := first_input(args, kwargs)) is not None:
            seen.append(x)
            latest[name] = x.data_ptr()

    def made(name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.append(output)
        outputs[output.data_ptr()] = name, {address: module for module, address in reversed(latest.items())}

    def added(a: Tensor, b: Tensor) -> None:
        for term, other in ((a, b), (b, a)):
            layer, readers = outputs.get(term.data_ptr(), ("", {}))
            if term.shape == other.shape and (reader := readers.get(other.data_ptr())):
                found[layer] = reader

    hooks = [model.get_submodule(name).register_forward_hook(partial(made, name)) for name in names]
    hooks += [
        module.register_forward_pre_hook(partial(read, name), with_kwargs=True)
        for name, module in model.named_modules()
        if name and name not in names
    ]
    with hooked(hooks), eval_mode(model), _Additions(added, seen):
        model(**batch)
    return found


class _Additions(TorchFunctionMode):
    """Calls `added` with the two terms of each addition of tensors, before it is computed."""

    def __init__(self, added: Callable[[Tensor, Tensor], None], seen: list[Tensor]) -> None:
        super().__init__()
        self.added, self.seen = added, seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        terms = args[:2]
        if getattr(func, "__name__", "") in _ADDING and all(isinstance(term, Tensor) for term in terms):
            self.seen.extend(terms)
            self.added(*terms)
        return func(*args, **(kwargs or {}))
