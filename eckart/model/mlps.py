"""Finds the MLPs of a model whose neurons can be left out: y = down(f(x Wᵀ)), where f acts on each neuron singly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.model.batches import Batch, row_of
from eckart.model.experts import Experts
from eckart.model.layers import narrowed_like, replaced, shape_of
from eckart.model.module_context import eval_mode, hooked
from eckart.model.probing import shortened
from eckart.model.targets import Product, Target, Tied, weight_of

_TOKENS = 32  # enough to see which neurons depend on each other


class Mlp(BaseModel):
    """An MLP: targets that compute its neurons from the same input, and the target that reads the neurons.

    Attributes:
        up: names of the targets whose outputs make up the neurons: one, or two in a gated MLP.
        down: name of the target that reads the neurons.
        neurons: number of neurons n, the inputs of `down`. Each of `up` has n outputs, or 2n if it computes both gate
            and up.
        interleaved: whether, of 2n outputs, 2j and 2j + 1 belong to neuron j; else j and n + j do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    up: tuple[str, ...]
    down: str
    neurons: int
    interleaved: bool = False

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of all targets of the MLP."""
        return (*self.up, self.down)

    def outputs_of(self, neurons: Tensor, size: int) -> Tensor:
        """Return which of the `size` outputs of one of `up` belong to `neurons`."""
        return outputs_of(neurons, size // self.neurons, self.neurons, self.interleaved)


def find_mlps(model: PreTrainedModel, targets: Sequence[Target], batch: Batch) -> list[Mlp]:
    """Return the MLPs among `targets` whose neurons do not depend on each other, in order of execution.

    This is tested by forward passes of two copies of an example. In the second copy, half of the outputs of `up` are
    set to zero. The other neurons must stay the same. One forward pass tests all layers of a kind: if they pass, none
    of them disturbs the next. Another tests whether the code between these layers takes fewer neurons: the values of an
    attention do not depend on each other either, but its heads have a fixed width.

    An expert of a mixture is an MLP, too. What it reads depends on the router, so it is tested by itself.

    Args:
        targets: the targets in order of execution.
        batch: model inputs, each `(batch, …)`.
    """
    candidates = list(_candidates(targets))
    kinds: dict[str, list[Mlp]] = {}
    for mlp in candidates:
        kinds.setdefault(re.sub(r"\b\d+\b", "#", mlp.down), []).append(mlp)
    example = shortened(model, row_of(batch, 0), _TOKENS)
    twice = {name: torch.cat([values, values]) for name, values in example.items()}
    independent = [_independent(model, kind, twice) for kind in kinds.values()]
    found = {mlp.down: mlp for kind in independent if kind and _run_narrower(model, kind, example) for mlp in kind}
    found |= {mlp.down: mlp for mlp in _experts(model, targets)}
    return _apart(found[target.name] for target in targets if target.name in found)


def _apart(mlps: Iterable[Mlp]) -> list[Mlp]:
    """Return the MLPs without those that share a layer with one before, as three layers in a row do."""
    kept: list[Mlp] = []
    layers: set[str] = set()
    for mlp in mlps:
        if layers.isdisjoint(mlp.layers):
            kept.append(mlp)
            layers.update(mlp.layers)
    return kept


def _experts(model: PreTrainedModel, targets: Sequence[Target]) -> Iterator[Mlp]:
    """Yield the experts of mixtures whose neurons do not depend on each other."""
    routed = {target.name: target for target in targets if target.routed_by and not target.repeated}
    for down in routed.values():
        experts = model.get_submodule(down.routed_by or "")
        assert isinstance(experts, Experts)
        up = f"{down.name.rpartition('.')[0]}.{experts.up}"
        if up == down.name or up not in routed:
            continue
        mlp = Mlp(up=(up,), down=down.name, neurons=down.in_features, interleaved=experts.interleaved)
        if _takes_neurons_singly(experts, mlp, routed[up].out_features):
            yield mlp


@torch.no_grad()
def _takes_neurons_singly(experts: Experts, mlp: Mlp, size: int) -> bool:
    """Whether some neurons of the expert `mlp` come out the same from their own ones of the `size` outputs alone."""
    outputs = torch.randn(4, size, generator=torch.Generator().manual_seed(0))
    some = torch.arange(0, mlp.neurons, 3)
    return torch.allclose(experts.neurons(outputs[:, mlp.outputs_of(some, size)]), experts.neurons(outputs)[:, some])


@torch.no_grad()
def _independent(model: PreTrainedModel, mlps: Sequence[Mlp], twice: Batch) -> list[Mlp]:
    """Return those of `mlps` that pass the test of `find_mlps` on `twice`, two copies of an example."""
    tests, hooks = {mlp.down: _Test(mlp) for mlp in mlps}, []
    for mlp in mlps:
        test = tests[mlp.down]
        hooks += [model.get_submodule(name).register_forward_hook(test.after_up) for name in mlp.up]
        hooks.append(model.get_submodule(mlp.down).register_forward_pre_hook(test.before_down))
    with hooked(hooks), eval_mode(model):
        model(**twice)
    return [mlp for mlp in mlps if tests[mlp.down].passed]


@torch.no_grad()
def _run_narrower(model: PreTrainedModel, mlps: Sequence[Mlp], example: Batch) -> bool:
    """Return whether `model` runs if each of `mlps` has only a few neurons, a number coprime to the present one."""
    smaller: dict[str, nn.Module] = {}
    for mlp in mlps:
        few = next((number for number in range(2, mlp.neurons) if gcd(number, mlp.neurons) == 1), 1)
        for name in mlp.layers:
            module = model.get_submodule(name)
            rows, columns = shape_of(module)
            shape = (rows, few) if name == mlp.down else (few * rows // mlp.neurons, columns)
            layer = narrowed_like(module, *shape)
            smaller[name] = layer.to_empty(device=weight_of(module).device)
            for parameter in layer.parameters():
                parameter.zero_()
    try:
        with eval_mode(model), replaced(model, smaller):
            model(**example)
    except Exception:  # the type of the error depends on the model family
        return False
    return True


def _candidates(targets: Sequence[Target]) -> Iterator[Mlp]:
    """Yield targets with the shapes of an MLP: those that read one tensor, and the next target, which reads another."""
    plain = [_plain(target) for target in targets]
    for place, down in enumerate(targets):
        last, up = targets[place - 1], list[str]()
        for before, fits in zip(targets[:place][::-1], plain[:place][::-1], strict=True):
            if not fits or (before.out_features, before.input_of) != (last.out_features, last.input_of):
                break
            up.insert(0, before.name)
        fits = plain[place] and last.out_features in (down.in_features, 2 * down.in_features)
        if up and fits and last.input_of != down.input_of:
            yield Mlp(up=tuple(up), down=down.name, neurons=down.in_features)


def _plain(target: Target) -> bool:
    return (
        not (isinstance(target, Product | Tied) or target.repeated or target.looks_up or target.of_vocabulary)
        and target.sampled
        and not target.routed_by  # what an expert reads depends on the router
    )


class _Test:
    """Hooks on the targets of an MLP for a forward pass of two copies of an example."""

    def __init__(self, mlp: Mlp) -> None:
        generator = torch.Generator().manual_seed(0)
        self.cut = torch.zeros(mlp.neurons, dtype=torch.bool)
        self.cut[torch.randperm(mlp.neurons, generator=generator)[: mlp.neurons // 2]] = True
        self.calls = 0
        self.passed = False

    def after_up(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        cut = self.cut.repeat(output.shape[-1] // len(self.cut))
        _second(output).masked_fill_(cut.to(output.device), 0)
        return output

    def before_down(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compare the neurons of both copies, and go on with those of the first."""
        x, self.calls = args[0].clone(), self.calls + 1
        cut = self.cut.to(x.device)
        first, second = x[: len(x) // 2].flatten(0, -2), _second(x).flatten(0, -2)
        same = torch.allclose(first[:, ~cut], second[:, ~cut], rtol=1e-3, atol=1e-6 * float(first.abs().max()))
        self.passed = self.calls == 1 and same and not torch.equal(first[:, cut], second[:, cut])
        _second(x).copy_(x[: len(x) // 2])
        return (x, *args[1:])


def _second(values: Tensor) -> Tensor:
    """Return the part of `values` `(…, features)` that belongs to the second copy of the example."""
    return values[len(values) // 2 :]


def outputs_of(neurons: Tensor, parts: int, total: int, interleaved: bool) -> Tensor:
    """Return the outputs that belong to `neurons`, of a layer that has `parts` outputs for each of `total` neurons.

    Args:
        interleaved: whether outputs of the same neuron are neighbors; else each part has its own `total` outputs.
    """
    part = torch.arange(parts)
    if interleaved:
        return (parts * neurons.unsqueeze(1) + part).flatten()
    return (total * part.unsqueeze(1) + neurons).flatten()


class Width(BaseModel):
    """Width to which an MLP is narrowed.

    Attributes:
        up: names of the targets that compute the neurons.
        kept: the neurons that stay, ascending.
        loss: predicted loss of leaving out the other neurons.
        interleaved: as in `Mlp`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    up: tuple[str, ...]
    kept: tuple[int, ...]
    loss: float
    interleaved: bool = False

    @property
    def neurons(self) -> int:
        """Number of neurons that stay."""
        return len(self.kept)

    def features(self, size: int, neurons: int) -> Tensor:
        """Return which of the `size` outputs or inputs of one of the MLP's layers belong to the neurons that stay.

        Args:
            neurons: number of neurons of the original MLP.
        """
        return outputs_of(torch.tensor(self.kept), size // neurons, neurons, self.interleaved)


Widths = Mapping[str, Width]
"""Name of the down target of each MLP that is narrowed → its width."""


def narrowed(targets: Sequence[Target], widths: Widths) -> tuple[Target, ...]:
    """Return `targets` with the shapes that they have after the MLPs are narrowed to `widths`."""
    members = {target.name: target for target in targets}
    outputs = {
        name: members[name].out_features * width.neurons // members[down].in_features
        for down, width in widths.items()
        for name in width.up
    }
    return tuple(
        target.model_copy(
            update={
                "out_features": outputs.get(target.name, target.out_features),
                "in_features": widths[target.name].neurons if target.name in widths else target.in_features,
            }
        )
        if target.name in outputs or target.name in widths
        else target
        for target in targets
    )
