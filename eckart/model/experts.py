"""Mixtures of experts: takes apart the tensors in which transformers keeps all experts of a layer.

transformers stores the weights of a layer's experts as two tensors, `(experts, out, in)` or its transpose, in a module
whose class was made by its decorator `use_experts_implementation`. That decorator states what differs between
families: the orientation, whether there are biases, and `_apply_gate`, the activation with its clamps. `unfuse` puts
`Experts` in place of such a module: each expert has two nn.Linear, which are targets like any other linear layer
(eckart/model/targets.py). An expert reads only the tokens that a router sends to it
(eckart/calibration/routed_tokens.py).

`fuse` is the way back, for a model without factors.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.model.layers import LowRankLayer

if TYPE_CHECKING:
    from eckart.model.targets import Target

Module = TypeVar("Module", bound=nn.Module)

_TOKENS = 8  # random tokens on which a fused module and its experts are compared
_ROUNDING = {True: 1e-4, False: 5e-2}
"""Whether weights are in float32 or float64 → largest relative difference that counts as rounding."""


class Experts(nn.Module):
    """The experts of a layer, one child each: tokens `(tokens, in)` → sums of the chosen experts' outputs.

    Child `3` is the expert with number 3. Its layers are `gate_up` (or `up`, without a gate) and `down`.

    Attributes:
        count: number of experts.
        up: name of the first layer of each expert.
        interleaved: whether the outputs 2j and 2j + 1 of a `gate_up` of 2n outputs belong to neuron j; else j and
            n + j do.
    """

    def __init__(self, fused: nn.Module, share: bool = False) -> None:
        """Take the weights from `fused`, a module for which `is_fused` is true.

        Args:
            share: whether the layers use the memory of the fused tensors; by default, they get copies.
        """
        super().__init__()
        shell = copy.copy(fused)
        shell.__dict__["_parameters"] = {}
        self._shell = (shell,)  # knows the activation; the tuple hides it from modules() and named_modules()
        self.count = len(fused.get_parameter("down_proj"))
        self.up = "gate_up" if fused.has_gate else "up"
        self.interleaved = self.up == "gate_up" and not getattr(fused, "is_concatenated", True)
        for number in range(self.count):
            expert = nn.Module()
            for layer in (self.up, "down"):
                expert.add_module(layer, _linear(fused, f"{layer}_proj", number, share))
            self.add_module(str(number), expert)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of expert outputs for each token.

        Args:
            hidden_states: `(tokens, in)`.
            top_k_index: numbers of each token's experts `(tokens, k)`.
            top_k_weights: their weights `(tokens, k)`.
        """
        # a graph cannot have as many tokens for an expert as a router chooses
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self._all_tokens(hidden_states, top_k_index, top_k_weights)
        order, counts = by_expert(top_k_index, self.count)
        parts = hidden_states[order // top_k_index.shape[1]].split(counts)
        outputs = [self._run(number, rows) for number, rows in enumerate(parts) if len(rows)]
        weighted = torch.cat(outputs) * top_k_weights.flatten()[order, None]
        sums = torch.empty_like(weighted).index_copy(0, order, weighted).unflatten(0, top_k_index.shape).sum(1)
        return sums.to(hidden_states.dtype)

    def _all_tokens(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Let every expert read every token, and leave out of the sum what the router did not choose."""
        total = torch.zeros_like(hidden_states)
        for number in range(self.count):
            weight = (top_k_weights * (top_k_index == number)).sum(1, keepdim=True)
            total = total + (self._run(number, hidden_states) * weight).to(total.dtype)
        return total

    def neurons(self, outputs: Tensor) -> Tensor:
        """Return the neurons `(tokens, n)` of an expert, the inputs of `down`, from the outputs of its first layer."""
        shell: Any = self._shell[0]
        result: Tensor = (shell._apply_gate if shell.has_gate else shell.act_fn)(outputs)
        return result

    def _run(self, number: int, rows: Tensor) -> Tensor:
        neurons = self.neurons(self.get_submodule(f"{number}.{self.up}")(rows))
        result: Tensor = self.get_submodule(f"{number}.down")(neurons)
        return result

    def fused(self) -> nn.Module:
        """Return the module that this one replaced, with the present weights in its tensors.

        Raises:
            ValueError: a layer is factorized.
        """
        module = copy.copy(self._shell[0])
        module.__dict__["_parameters"] = {}
        for layer in (self.up, "down"):
            linears = [self.get_submodule(f"{number}.{layer}") for number in range(self.count)]
            if any(isinstance(linear, LowRankLayer) for linear in linears):
                raise ValueError("experts with factors cannot become one tensor: merge their factors first")
            weight = torch.stack([linear.get_parameter("weight").detach() for linear in linears])
            trained = any(linear.get_parameter("weight").requires_grad for linear in linears)
            weight = weight.mT.contiguous() if module.is_transposed else weight
            module.register_parameter(f"{layer}_proj", nn.Parameter(weight, trained))
            if module.has_bias:
                bias = torch.stack([linear.get_parameter("bias").detach() for linear in linears])
                module.register_parameter(f"{layer}_proj_bias", nn.Parameter(bias, trained))
        return module


def by_expert(top_k_index: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Sort the places of `top_k_index` `(tokens, k)` by expert, and by token among those of one expert.

    Returns:
        order `(tokens · k,)`, whose entries ÷ k are the tokens, and the number of places of each expert.
    """
    chosen = top_k_index.flatten()
    return chosen.argsort(stable=True), torch.bincount(chosen, minlength=experts).tolist()


def _linear(fused: nn.Module, name: str, number: int, share: bool) -> nn.Linear:
    """Return expert `number`'s part of the tensor `name` of `fused` as a linear layer."""
    stored = fused.get_parameter(name)
    weight = stored.detach()[number]
    weight = weight.T if fused.is_transposed else weight
    with torch.device("meta"):  # draws no random weights
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(fused.has_bias))
    layer.weight = nn.Parameter(weight if share else weight.clone(memory_format=torch.contiguous_format))
    if fused.has_bias:
        bias = fused.get_parameter(f"{name}_bias").detach()[number]
        layer.bias = nn.Parameter(bias if share else bias.clone())
    return layer.requires_grad_(stored.requires_grad).train(fused.training)


def is_fused(module: nn.Module) -> bool:
    """Whether `module` holds experts in tensors that `Experts` can take apart, and nothing else that is trained."""
    if not all(hasattr(module, name) for name in ("is_transposed", "has_gate", "has_bias", "_apply_gate")):
        return False
    names = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    names |= {f"{name}_bias" for name in names} if module.has_bias else set()
    return {name for name, _ in module.named_parameters()} == names and not any(True for _ in module.buffers())


def unfuse(model: PreTrainedModel, targets: Iterable[Target] | None = None) -> None:
    """Replace modules of fused experts in `model` by `Experts`, with the same outputs up to rounding.

    A module stays as it is if a device map has offloaded it, or if its outputs would change: its class computes
    something else than a gate between two linear layers.

    Args:
        targets: replace only the modules to which these belong, in a model that was loaded again; None: all.
    """
    names = None if targets is None else {target.routed_by for target in targets}
    for name, module in _fused(model, names):
        if _computes_alike(module, experts := Experts(module)):
            model.set_submodule(name, experts)


def unfused(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` that shares all tensors with it, after `unfuse`; `model` itself if nothing is fused."""
    if not any(map(is_fused, model.modules())):
        return model
    same = sharing_copy(model)
    for name, module in _fused(same):
        if _computes_alike(module, experts := Experts(module, share=True)):
            same.set_submodule(name, experts)
    return same


def sharing_copy(module: Module) -> Module:
    """Return a copy of `module`, whose layers can be replaced separately, but which shares all tensors with it."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, tensors)  # takes them for copies that it has made already


def fuse(model: PreTrainedModel) -> None:
    """Replace all `Experts` of `model` by the modules of fused experts that they came from.

    Raises:
        ValueError: an expert is factorized.
    """
    for name in unfused_experts(model):
        experts = model.get_submodule(name)
        assert isinstance(experts, Experts)
        model.set_submodule(name, experts.fused())


def unfuse_like(model: PreTrainedModel, name: str) -> None:
    """Replace the fused experts `name` by `Experts` without values, for weights that are loaded later."""
    model.set_submodule(name, Experts(model.get_submodule(name), share=True))


def unfused_experts(model: nn.Module) -> list[str]:
    """Return the names of the `Experts` of `model`."""
    return [name for name, module in model.named_modules() if isinstance(module, Experts)]


def routed_layers(model: nn.Module) -> dict[str, str]:
    """Return the layers of all `Experts` of `model`: name of an expert's layer → name of the Experts."""
    return {
        f"{name}.{number}.{layer}": name
        for name, experts in model.named_modules()
        if isinstance(experts, Experts)
        for number in range(experts.count)
        for layer in (experts.up, "down")
    }


def _fused(model: PreTrainedModel, names: Collection[str | None] | None = None) -> list[tuple[str, nn.Module]]:
    """Return the modules of fused experts that are in memory, with their names; only those in `names`, if given."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if (names is None or name in names)
        and is_fused(module)
        and not any(parameter.is_meta for parameter in module.parameters())
    ]


@torch.no_grad()
def _computes_alike(fused: nn.Module, experts: Experts) -> bool:
    """Return whether two modules give the same outputs for random tokens, up to rounding."""
    weight = next(experts.parameters())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_TOKENS, weight.shape[1], generator=generator).to(weight)
    index = torch.rand(_TOKENS, experts.count, generator=generator).topk(min(2, experts.count)).indices
    weights = torch.rand(index.shape, generator=generator).to(weight)
    try:
        expected, given = (module(hidden, index.to(weight.device), weights).double() for module in (fused, experts))
    except Exception:  # the class takes other arguments; the type of the error depends on it
        return False
    exact = weight.dtype in (torch.float32, torch.float64)
    return bool((given - expected).norm() <= _ROUNDING[exact] * expected.norm())
