"""Context managers that change a model temporarily: eval mode, frozen parameters, hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig


@contextmanager
def hooked(hooks: Collection[RemovableHandle]) -> Iterator[None]:
    """Remove `hooks`, which are registered already, on exit."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def kept_config(model: nn.Module) -> Iterator[None]:
    """Restore on exit what transformers changes in configs, and would leave in the folder of the model.

    The Trainer switches the key-value cache off, and a classifier writes its kind of problem when it computes a loss.
    """
    names = ("use_cache", "problem_type")
    before = [
        (vars(config), {name: vars(config)[name] for name in names if name in vars(config)})
        for config in _configs(model)
    ]
    try:
        yield
    finally:
        for values, own in before:
            for name in names:
                values.pop(name, None)
            values.update(own)


def without_cache(model: nn.Module) -> None:
    """Switch the key-value cache of `model` off, which only text generation needs."""
    for config in _configs(model):
        if getattr(config, "use_cache", None):
            config.use_cache = False


def _configs(model: nn.Module) -> list[Any]:
    """Return all configs: parts of a model, such as the one beside a vision tower, have their own."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; on exit, restore its configs and the mode of each module, or of its replacement.

    BigBird's sparse attention is restored, too: a forward pass of few tokens switches it to full attention for good.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    switching: list[Any] = [module for module in model.modules() if hasattr(module, "set_attention_type")]
    attention = [(module, module.attention_type) for module in switching]
    try:
        model.eval()
        with kept_config(model):
            yield
    finally:
        for module, kind in attention:
            module.set_attention_type(kind)
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)


def with_gradient(output: Tensor) -> Tensor:
    """Return a module's `output` as part of a graph, so that it has a gradient even if all before it is frozen."""
    return output if output.requires_grad else output.detach().requires_grad_().clone()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, with frozen parameters and no key-value cache; on exit, restore all of these.

    Parameters of a layer that has taken another's place are trainable if that layer's weight or bias was.
    """
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    try:
        with eval_mode(model):
            model.requires_grad_(False)
            without_cache(model)
            yield
    finally:
        for name, parameter in model.named_parameters():  # by name: parameters may have been replaced
            kind = "bias" if name.endswith("bias") else "weight"
            above = accumulate(name.split(".")[:-1], "{}.{}".format)
            names = [name, *(f"{layer}.{kind}" for layer in above)]
            parameter.requires_grad_(next((trainable[other] for other in names if other in trainable), True))
