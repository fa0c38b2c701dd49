"""Adapters of peft by the names of the original model's layers: `target_modules=["query", "value"]`.

peft replaces each module whose name matches by one with an adapter, if it is a linear layer. A factorized layer is two
of them, so the names of its factors take the place of its own:

- LoRA and its kin adapt both factors. An update of the whole layer could not be merged into two factors.
- (IA)³ scales outputs, or, in layers that it calls feed-forward, inputs. Outputs are those of the last factor, inputs
  those of the first, so outputs are scaled exactly as those of the dense layer would be. Two forms differ: in pivoted
  storage, only the outputs that are not pivots are scaled, and at rank 1 only the component.

A factorized layer that the config excludes has no adapter. Ranks and scales that the config gives a layer by its name
(`rank_pattern`, `alpha_pattern`) are those of its factors.

peft asks for no such thing, so its function that completes a config is wrapped, as soon as peft has been imported. So
is the method that injects an adapter, which then completes a copy of the caller's config.
"""

from __future__ import annotations

import copy
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from eckart.after_import import call_after_import
from eckart.model.layers import LowRankLayer, PlainLinear, tied_heads

_MODULE = "peft.tuners.tuners_utils"
_FUNCTION = "_maybe_include_all_linear_layers"


def expand(config: Any, model: nn.Module, matches: Callable[[Any, str], Any]) -> None:
    """Write the names of factors in place of those of factorized layers into a config of peft.

    Args:
        matches: function that tells whether the config means the module of this name.

    Raises:
        ValueError: the config is that of a trained adapter, and it means factorized layers, which were dense then.
    """
    low_rank = {name: module for name, module in model.named_modules() if isinstance(module, LowRankLayer)}
    every = copy.copy(config)
    every.target_modules = {*low_rank}
    excluded = tuple(f"{name}." for name in low_rank if not matches(every, name))
    meant = [name for name, _ in model.named_modules() if name and matches(config, name)]
    others = {name for name, module in model.named_modules() if isinstance(module, LowRankLayer | PlainLinear)}
    names = {name for name in meant if name not in others and not name.startswith(excluded)}
    layers = {name: low_rank[name] for name in meant if name in low_rank}
    if layers and getattr(config, "inference_mode", False):  # a config that is saved names the factors
        raise ValueError(
            f"the adapter was trained on another model: {next(iter(layers))} is factorized here. Merge it into "
            "the original before you compress it, or train a new one"
        )
    targets = names.union(*(_factors(name, layer) for name, layer in layers.items()))
    _warn_of_tied(model, targets)
    _expand_patterns(config, low_rank, targets)
    if targets == {*meant}:
        return
    inputs = getattr(config, "feedforward_modules", None)
    if inputs is None:
        config.target_modules = targets
        return
    scaled = {name for name in meant if any(name == end or name.endswith(f".{end}") for end in inputs)}
    ends = {name: _factors(name, layer)[0 if name in scaled else -1] for name, layer in layers.items()}
    config.target_modules = names | {*ends.values()}
    config.feedforward_modules = {ends.get(name, name) for name in scaled}


def _expand_patterns(config: Any, layers: Mapping[str, LowRankLayer], targets: set[str]) -> None:
    """Give each of `targets` what the config says of it, or of the factorized layer that it belongs to, by name.

    As in peft, the first key that means it counts, such as those of `rank_pattern`.
    """
    layer_of = {factor: name for name, layer in layers.items() for factor in _factors(name, layer)}
    for field, values in vars(config).items():
        if not field.endswith("_pattern") or not isinstance(values, dict):
            continue
        own, used = {}, set()
        for target in sorted(targets):
            names = target, layer_of.get(target, target)
            key = next((key for key in values if any(_means(key, name) for name in names)), None)
            if key is not None:
                own[re.escape(target)] = values[key]
                used.add(key)
        # peft warns of keys that mean no target
        setattr(config, field, own | {key: value for key, value in values.items() if key not in used})


def _means(key: str, name: str) -> bool:
    """Whether a key of a pattern means the module `name`: to peft, it is a regular expression for the name's end."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


def _warn_of_tied(model: nn.Module, names: set[str]) -> None:
    """Warn if an embedding that shares its factors with a head gets an adapter, as peft warns of shared weights."""
    for head, embedding in tied_heads(model).items():
        if any(name.startswith(f"{embedding}.") for name in names):
            warnings.warn(
                f"{embedding} shares its factors with {head}, so merging its adapter would change the head's outputs, "
                "too: leave it out, or do not merge",
                stacklevel=2,
            )


def _warn_of_copied(model: nn.Module, modules_to_save: Collection[str]) -> None:
    """Warn if an embedding that shares its factors with a head, or the head, is copied and trained."""
    for pair in tied_heads(model).items():
        if any(name == end or name.endswith(f".{end}") for name in pair for end in modules_to_save):
            warnings.warn(
                f"{pair[1]} shares its factors with {pair[0]}: with one of them in modules_to_save, the merged model "
                "cannot be saved. Leave it out, or keep the adapter in a folder of its own",
                stacklevel=2,
            )


def _factors(name: str, layer: LowRankLayer) -> list[str]:
    """Return the names of the layers that a factorized layer consists of, in their order, without sparse rows."""
    return [
        f"{name}.{part}"
        for part, module in layer.named_children()
        if part != "residual" and not isinstance(module, PlainLinear)
    ]


def _is_factorized(model: nn.Module) -> bool:
    return any(isinstance(module, LowRankLayer) for module in model.modules())


def _wrap(utilities: ModuleType) -> None:
    complete, inject = getattr(utilities, _FUNCTION), utilities.BaseTuner.inject_adapter
    injected: list[Any] = []  # configs of the adapters that are being injected

    def complete_with_factors(peft_config: Any, model: nn.Module) -> Any:
        if not _is_factorized(model):
            return complete(peft_config, model)
        own = any(config is peft_config for config in injected)
        config = complete(peft_config if own else copy.copy(peft_config), model)
        _warn_of_copied(model, getattr(config, "modules_to_save", None) or ())
        if getattr(config, "target_modules", None):
            expand(config, model, utilities.check_target_module_exists)
        return config

    @wraps(inject)
    def inject_adapter(tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        if not _is_factorized(model):
            return inject(tuner, model, adapter_name, *args, **kwargs)
        # The tuner keeps the completed config. The caller may use its own for another model.
        injected.append(copy.copy(tuner.peft_config[adapter_name]))
        tuner.peft_config[adapter_name] = injected[-1]
        try:
            return inject(tuner, model, adapter_name, *args, **kwargs)
        finally:
            injected.pop()

    utilities.BaseTuner.inject_adapter = inject_adapter
    for name, module in [*sys.modules.items()]:  # some have imported the function by its name
        if name.startswith("peft.") and getattr(module, _FUNCTION, None) is complete:
            setattr(module, _FUNCTION, complete_with_factors)


call_after_import(_MODULE, _wrap)
