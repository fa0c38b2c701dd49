"""What a module is for a while: in eval mode, frozen, or with another forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode; each module, or what has taken its place, comes back to the one it was in."""
    modes = {name: module.training for name, module in model.named_modules()}
    try:
        model.eval()
        yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Eval mode, no parameter gradients, and no keys and values kept for generation; all restored afterwards."""
    wanted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
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
        for name, parameter in model.named_parameters():  # by name: others may have taken their places
            if name in wanted:
                parameter.requires_grad_(True)


@contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Have `module` compute `forward`; then again its own, which may be one that accelerate has set on it."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
