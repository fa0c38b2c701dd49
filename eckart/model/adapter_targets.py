"""Adapters of peft by the names of the original model's layers: `target_modules=["query", "value"]`.

peft replaces each module whose name matches by one with an adapter, if it is a linear layer. A factorized layer is two
of them, so the names of its factors take the place of its own:

- LoRA and its kin adapt both factors. An update of the whole map would have no place to go when it is merged.
- (IA)³ scales outputs, or, in layers that it calls feed-forward, inputs. Outputs are those of the last factor, inputs
  those of the first, so the map is scaled exactly as the dense layer would be. Two forms differ: in pivoted storage,
  only the outputs that are no pivots are scaled, and at rank 1 only the component.

peft asks for no such thing, so its function that completes a config is wrapped, as soon as peft has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn

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


class _AfterImport(MetaPathFinder):
    """Finder of modules that lets others find peft's, and wraps its function when it is imported."""

    def find_spec(self, name: str, *places: Any) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        others = (finder.find_spec(name, *places) for finder in sys.meta_path[sys.meta_path.index(self) + 1 :])
        spec: Any = next(filter(None, others), None)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def run_and_wrap(module: ModuleType) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            _wrap(module)

        spec.loader.exec_module = run_and_wrap
        return spec


if _MODULE in sys.modules:
    _wrap(sys.modules[_MODULE])
else:
    sys.meta_path.insert(0, _AfterImport())
