"""Residual connections: finds the hidden states that a layer's output is added to.

Error compensation can correct their error (eckart/factorization/error_compensation.py). They are found in a forward
pass of one example, in any architecture: one term of an addition is the output of the layer, or a sum with it, and the
other was the input of some module before. Where attention and MLP run side by side, as in GPT-NeoX, an output has
several such terms. Where a norm or a factor comes between output and addition, as in Gemma 2 or Granite, nothing is
found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from eckart.model.batches import Batch
from eckart.model.module_context import eval_mode, hooked
from eckart.model.probing import shortened

_ADDING = {"add", "add_", "__add__", "__radd__", "__iadd__"}


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a module."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


@dataclass
class _Layer:
    """A layer in a forward pass.

    Attributes:
        known: address → module whose latest input it is when the layer runs.
        terms: those of `known` that its output is added to.
    """

    known: Mapping[int, str]
    terms: dict[int, str] = field(default_factory=dict)


@torch.no_grad()
def residual_readers(model: PreTrainedModel, batch: Batch, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return layer → modules whose `first_input` are the terms that the layer's output is added to.

    Args:
        batch: model inputs, each `(batch, …)`. A few tokens of a long text are enough.
        names: the linear layers to look at; those without such a sum are missing from the result.
    """
    batch = shortened(model, batch)
    latest: dict[str, int] = {}
    """Module → address of its latest input."""
    seen: list[Tensor] = []  # kept, so that no later tensor has the address of an earlier one
    layers: dict[str, _Layer] = {}
    parts: dict[int, set[str]] = {}
    """Address of an output or a sum → the layers whose outputs are in it."""

    def read(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if (x := first_input(args, kwargs)) is not None:
            seen.append(x)
            latest[name] = x.data_ptr()

    def made(name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        seen.append(output)
        layers[name] = _Layer({address: module for module, address in reversed(latest.items())})
        parts[output.data_ptr()] = {name}

    def added(a: Tensor, b: Tensor, total: Tensor) -> None:
        seen.extend((a, b, total))
        if a.shape != b.shape:
            return
        first, second = a.data_ptr(), b.data_ptr()
        for term, other in ((first, second), (second, first)):
            for layer in map(layers.__getitem__, parts.get(term, ())):
                if module := layer.known.get(other):
                    layer.terms[other] = module
        parts[total.data_ptr()] = parts.get(first, set()) | parts.get(second, set())

    hooks = [model.get_submodule(name).register_forward_hook(partial(made, name)) for name in names]
    hooks += [
        module.register_forward_pre_hook(partial(read, name), with_kwargs=True)
        for name, module in model.named_modules()
        if name and name not in names
    ]
    with hooked(hooks), eval_mode(model), _Additions(added):
        model(**batch)
    return {name: tuple(layers[name].terms.values()) for name in _each_error_once(layers, parts)}


def _each_error_once(layers: Mapping[str, _Layer], parts: Mapping[int, Set[str]]) -> list[str]:
    """Return the layers with terms, without those whose error a later layer of the same sum would correct again.

    The later layer does not know what they have corrected: in Falcon, no module reads the attention's output.

    Args:
        parts: address of a sum → the layers whose outputs are in it.
    """
    once = list[str]()

    def again(name: str, later: str) -> bool:
        shared = layers[name].terms.keys() & layers[later].terms.keys()
        known = any(name in parts.get(term, ()) for term in layers[later].terms)
        return bool(shared) and not known and any({name, later} <= part for part in parts.values())

    for name in reversed([name for name, layer in layers.items() if layer.terms]):
        if not any(again(name, later) for later in once):
            once.append(name)
    return once[::-1]


class _Additions(TorchFunctionMode):
    """Calls `added` with the two terms and the result of each addition of tensors."""

    def __init__(self, added: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.added = added

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in _ADDING and all(isinstance(term, Tensor) for term in args[:2]):
            self.added(args[0], args[1], result)
        return result
