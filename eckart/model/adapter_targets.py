"""Adapters of peft by the names of the original model's layers: `target_modules=["query", "value"]`.

peft replaces each module whose name matches by one with an adapter, if it is a linear layer. A factorized layer is two
of them, so the names of its factors take the place of its own:

- LoRA and its kin adapt both factors. An update of the whole layer could not be merged into two factors.
- (IA)³ scales outputs, or, in layers that it calls feed-forward, inputs. Outputs are those of the last factor, inputs
  those of the first, so outputs are scaled exactly as those of the dense layer would be. Two forms differ: in pivoted
  storage, only the outputs that are not pivots are scaled, and at rank 1 only the component.

peft asks for no such thing, so its function that completes a config is wrapped, as soon as peft has been imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from eckart.after_import import call_after_import
from eckart.model.layers import LowRankLayer, PlainLinear

_MODULE = "peft.tuners.tuners_utils"
_FUNCTION = "_maybe_include_all_linear_layers"


def expand(config: Any, model: nn.Module, matches: Callable[[Any, str], Any]) -> None:
    """Write the names of factors in place of those of factorized layers into a config of peft.

    Args:
        matches: function that tells whether the config means the module of this name.
    """
    meant = {name: module for name, module in model.named_modules() if name and matches(config, name)}
    layers = {name: module for name, module in meant.items() if isinstance(module, LowRankLayer)}
    if not layers:
        return
    names = {name for name in meant if name not in layers}
    inputs = getattr(config, "feedforward_modules", None)
    if inputs is None:
        config.target_modules = names.union(*(_factors(name, layer) for name, layer in layers.items()))
        return
    scaled = {name for name in meant if any(name == end or name.endswith(f".{end}") for end in inputs)}
    ends = {name: _factors(name, layer)[0 if name in scaled else -1] for name, layer in layers.items()}
    config.target_modules = names | {*ends.values()}
    config.feedforward_modules = {ends.get(name, name) for name in scaled}


def _factors(name: str, layer: LowRankLayer) -> list[str]:
    """Return the names of the layers that a factorized layer consists of, in their order, without sparse rows."""
    return [
        f"{name}.{part}"
        for part, module in layer.named_children()
        if part != "residual" and not isinstance(module, PlainLinear)
    ]


def _wrap(utilities: ModuleType) -> None:
    complete = getattr(utilities, _FUNCTION)

    def complete_with_factors(peft_config: Any, model: nn.Module) -> Any:
        config = complete(peft_config, model)
        if getattr(config, "target_modules", None):
            expand(config, model, utilities.check_target_module_exists)
        return config

    setattr(utilities, _FUNCTION, complete_with_factors)


call_after_import(_MODULE, _wrap)
