"""Context managers that change a module for a while: eval mode, frozen parameters, another forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards each module, or its replacement, returns to its own mode."""
    modes = {name: module.training for name, module in model.named_modules()}
    try:
        model.eval()
        yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode without parameter gradients or a key-value cache; restore all afterwards."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    config = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    try:
        model.requires_grad_(False)
        if config is not None and caches is not None:
            config.use_cache = False
        with eval_mode(model):
            yield
    finally:
        if config is not None and caches is not None:
            config.use_cache = caches
        for name, parameter in model.named_parameters():  # by name, as they may have been replaced
            if name in trainable:
                parameter.requires_grad_(True)


@contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give `module` another forward; afterwards restore its own, which accelerate may have set on the instance."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
