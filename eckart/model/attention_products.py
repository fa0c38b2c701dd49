"""Attention products: pairs of targets whose outputs only meet in inner products, found by running the model.

Queries and keys are such a pair if the model's output does not change when every head's queries are mixed by an
invertible G and its keys by G⁻ᵀ, because q kᵀ = (q G)(k G⁻ᵀ)ᵀ. That holds if positions are added to the tokens or to
the scores. It does not if something acts on queries or keys: rotary positions, norms, or relative positions that are
multiplied with them. Two cases are not found: keys that several query heads share, and query, key and value in one
layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.model.module_context import eval_mode
from eckart.model.probing import float_tensors
from eckart.model.targets import Product, Target, Targets

_ROUNDING = 0.02  # change that counts as rounding ÷ change if only one layer is mixed; wrong pairs are near 1
_FOLLOWING = 3  # layers that are compared: the value may run first, and it reads what query and key read


def find_products(model: PreTrainedModel, batch: Mapping[str, Tensor], single: Targets) -> Targets:
    """Join every two targets of `single` that are a product; only layers of one module, of the same width, are tried.

    Args:
        batch: model inputs, each `(batch, …)`.

    Raises:
        ValueError: no two targets are a product.
    """
    targets = {target.name: target for target in single.targets}
    with eval_mode(model), torch.no_grad():
        probe = _Probe(model, batch, single.targets)
        for first, second in combinations(single.targets, 2):
            same_module = first.name.rpartition(".")[0] == second.name.rpartition(".")[0]
            if not same_module or first.out_features != second.out_features:
                continue
            if any(isinstance(targets.get(name), Product | None) for name in (first.name, second.name)):
                continue  # one of them is in a product already
            if heads := probe.heads(first, second):
                targets[first.name] = Product(**first.model_dump(), heads=heads, other=second)
                del targets[second.name]
    if len(targets) == len(single.targets):
        raise ValueError(
            "no two targets are a product: queries and keys are one layer or no targets, something acts on them, such "
            f"as rotary positions, or the rounding of {model.dtype} hides it: write targets.products: false"
        )
    return single.model_copy(update={"targets": tuple(targets.values())})


class _Probe:
    """Runs a model with the outputs of two layers mixed within heads, and compares what it computes after them.

    It compares the outputs and what the following layers read: an output may be only two numbers, which a wrong mixture
    can leave unchanged by chance.
    """

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Tensor], targets: Sequence[Target]) -> None:
        self.model = model
        self.batch = batch
        self.order = [target.name for target in targets]
        self.last_width = 0
        """The width of the heads found last."""

    def heads(self, first: Target, second: Target) -> int | None:
        """Return the number of heads, as wide as possible, of which the two are a product; None if of none."""
        after = self.order.index(second.name) + 1
        readers = self.order[after : after + _FOLLOWING]
        unmixed = self._run({}, readers)

        def is_product(width: int) -> bool:
            mixture, inverse = _mixtures(first.out_features // width, width)
            alone, both = ({first.name: mixture}, {first.name: mixture, second.name: inverse})
            changes = [float((self._run(mixtures, readers) - unmixed).norm()) for mixtures in (alone, both)]
            return changes[1] <= _ROUNDING * changes[0] and changes[0] > 0

        if not is_product(1):
            return None
        for width in dict.fromkeys((self.last_width, *range(first.out_features, 1, -1))):
            if width and first.out_features % width == 0 and is_product(width):
                self.last_width = width
                return first.out_features // width
        return None

    def _run(self, mixtures: Mapping[str, Tensor], readers: Sequence[str]) -> Tensor:
        """Return all that the layers `readers` read and the model outputs, as one vector.

        Args:
            mixtures: layer → `(heads, width, width)`, by which its outputs are mixed.
        """
        values: list[Tensor] = []
        module = self.model.get_submodule
        hooks = [
            *(module(name).register_forward_hook(partial(_mix, mixture)) for name, mixture in mixtures.items()),
            *(module(name).register_forward_pre_hook(lambda _, args: values.append(args[0])) for name in readers),
        ]
        try:
            values += float_tensors(self.model(**self.batch))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([tensor.flatten().double().cpu() for tensor in values])


def _mix(mixture: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    heads = output.unflatten(-1, (len(mixture), -1, 1))
    return (mixture.to(output) @ heads).flatten(-3)


def _mixtures(heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw G and G⁻ᵀ `(heads, width, width)`: rotations that stretch each channel differently, up to twofold."""
    generator = torch.Generator().manual_seed(0)
    rotations = torch.linalg.qr(torch.randn(heads, width, width, generator=generator, dtype=torch.float64)).Q
    stretches = (2 * torch.rand(heads, width, 1, generator=generator, dtype=torch.float64) - 1).exp2()
    return stretches * rotations, rotations / stretches
