"""Targets: the linear maps of a model that can be factorized, found by probing the model with a real batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from accelerate.utils import align_module_device
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


class Target(BaseModel):
    """A linear map y = x Wᵀ + b that is to be factorized; W is always `(out, in)`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    out_features: int
    in_features: int
    input_of: str
    """The first target that reads the same tensor (query for key and value); itself if it is the first."""

    @property
    def parameters(self) -> int:
        """Weights of the dense map; the bias stays as it is and is not counted."""
        return self.out_features * self.in_features


class Targets(BaseModel):
    """What probing found: the targets in order of execution, and why each other linear map is none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    targets: tuple[Target, ...]
    excluded: dict[str, str]


def is_linear(module: nn.Module) -> bool:
    """Exact types only: a subclass may use its weight in a way of its own."""
    return type(module) in (nn.Linear, Conv1D)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear map as `(out, in)`. A GPT-2 Conv1D stores the transpose.

    One that a device map left on the CPU or the disk is brought to where its module runs.
    """
    with align_module_device(module):
        weight = module.get_parameter("weight").detach()
    return weight.T if isinstance(module, Conv1D) else weight


def find_targets(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    heads: bool = False,
) -> Targets:
    """Find the targets of `model`.

    A linear map is a target if its forward runs exactly once for `batch`, its weight belongs to it alone, its
    name matches a pattern of `include` and none of `exclude`, and it is no head (a module outside
    `model.base_model`), unless `heads`.

    Args:
        batch: model inputs, each `(batch, …)`.
        include, exclude: shell patterns over module names, such as `*.attention.*`.

    Raises:
        ValueError: no linear map is a target; the message gives the reason for each.
    """
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    calls, inputs = _probe(model, linear, batch)
    owners = _weight_owners(model)
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""

    targets: list[Target] = []
    excluded: dict[str, str] = {}
    first_reader: dict[int, str] = {}
    order = {name: position for position, name in enumerate(calls)}
    for name in sorted(linear, key=lambda name: order.get(name, len(order))):
        others = [owner for owner in owners[id(linear[name].weight)] if owner != name]
        if not any(fnmatchcase(name, pattern) for pattern in include):
            excluded[name] = "matches no include pattern"
        elif any(fnmatchcase(name, pattern) for pattern in exclude):
            excluded[name] = "matches an exclude pattern"
        elif not heads and not name.startswith(base):
            excluded[name] = "is a head"
        elif others:
            excluded[name] = f"shares its weight with {', '.join(others)}"
        elif calls[name] != 1:
            excluded[name] = f"its forward ran {calls[name]} times for one batch"
        else:
            rows, columns = weight_of(linear[name]).shape
            reader = first_reader.setdefault(id(inputs[name]), name)
            targets.append(Target(name=name, out_features=rows, in_features=columns, input_of=reader))
    if not targets:
        reasons = "; ".join(f"{name} {reason}" for name, reason in excluded.items()) or "it has no linear map"
        raise ValueError(f"the model has no targets: {reasons}")
    return Targets(targets=tuple(targets), excluded=excluded)


def _probe(
    model: PreTrainedModel, linear: Mapping[str, nn.Module], batch: Mapping[str, Tensor]
) -> tuple[Counter[str], dict[str, Tensor]]:
    """How often each linear map runs for `batch`, in order of first execution, and what it reads."""
    calls: Counter[str] = Counter()
    inputs: dict[str, Tensor] = {}  # holds the tensors, so that no two share an id

    def record(name: str, args: tuple[Tensor, ...]) -> None:
        calls[name] += 1
        inputs[name] = args[0]

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: record(name, args))
        for name, module in linear.items()
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            model(**batch)
    finally:
        for module, mode in modes.items():
            module.training = mode
        for hook in hooks:
            hook.remove()
    return calls, inputs


def _weight_owners(model: nn.Module) -> dict[int, list[str]]:
    """Every weight's modules by name, tied ones (an embedding and its head) included."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return owners
