"""Context managers that change a model temporarily: eval mode, frozen parameters, hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(hooks: Collection[RemovableHandle]) -> Iterator[None]:
    """Remove `hooks`, which are registered already, on exit."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; on exit, restore the mode of each module, or of the module that replaced it.

    BigBird's sparse attention is restored, too: a forward pass of few tokens switches it to full attention for good.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    switching: list[Any] = [module for module in model.modules() if hasattr(module, "set_attention_type")]
    attention = [(module, module.attention_type) for module in switching]
    try:
        model.eval()
        yield
    finally:
        for module, kind in attention:
            module.set_attention_type(kind)
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, with frozen parameters and no key-value cache; on exit, restore all of these.

    Parameters of a layer that has taken another's place are trainable if that layer's weight or bias was.
    """
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    # Parts of a model, such as the language model beside a vision tower, have configs of their own.
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    caches = {key: config.use_cache for key, config in configs.items() if getattr(config, "use_cache", None)}
    try:
        model.requires_grad_(False)
        for key in caches:
            configs[key].use_cache = False
        with eval_mode(model):
            yield
    finally:
        for key, cached in caches.items():
            configs[key].use_cache = cached
        for name, parameter in model.named_parameters():  # by name: parameters may have been replaced
            kind = "bias" if name.endswith("bias") else "weight"
            above = accumulate(name.split(".")[:-1], "{}.{}".format)
            names = [name, *(f"{layer}.{kind}" for layer in above)]
            parameter.requires_grad_(next((trainable[other] for other in names if other in trainable), True))
