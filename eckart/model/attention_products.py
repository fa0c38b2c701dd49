"""Attention products: finds pairs of targets, such as query and key, whose outputs only meet in inner products.

The model is run to find them. Query and key are such a pair if the model's output stays the same when an invertible
matrix G mixes the queries of every head and G⁻ᵀ mixes its keys, because q kᵀ = (q G)(k G⁻ᵀ)ᵀ. The output stays the same
if positions are added to the tokens or to the scores. It changes if something acts on queries or keys: rotary
positions, norms, or relative positions that are multiplied with them. Two cases are not found: keys that several query
heads share, and one layer that computes query, key and value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.model.batches import Batch
from eckart.model.module_context import eval_mode, hooked
from eckart.model.probing import float_tensors
from eckart.model.targets import Product, Target, Targets

_ROUNDING = 0.02
"""Largest (change of the model if both layers are mixed) ÷ (change if only one is) of a product; near 1 for others."""
_FOLLOWING = 3
"""Number of later layers whose inputs are compared; the first may be the value layer, whose input never changes."""


def find_products(model: PreTrainedModel, batch: Batch, single: Targets) -> Targets:
    """Return `single` with every two targets that form a product joined into one `Product`.

    Only pairs of layers with the same parent module and the same number of outputs are tried.

    Args:
        batch: model inputs, each `(batch, …)`.
        single: the model's targets, one linear layer each.

    Raises:
        ValueError: no two targets form a product.
    """
    targets = {target.name: target for target in single.targets}
    with eval_mode(model), torch.no_grad():
        probe = _Probe(model, batch, single.targets)
        for first, second in combinations([target for target in single.targets if not target.routed_by], 2):
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
            "no two targets are a product: queries and keys are one layer or no targets, several query heads share a "
            "key, something acts on them, such as rotary positions, or the rounding of "
            f"{model.dtype} hides it: write targets.products: false"
        )
    return single.model_copy(update={"targets": tuple(targets.values())})


class _Probe:
    """Runs a model with the outputs of two layers mixed within heads, and tests whether later values change.

    These values are the model's outputs and the inputs of the next layers. The model's outputs alone may be as few as
    two numbers, which could stay the same by chance although the two layers are not a product.
    """

    def __init__(self, model: PreTrainedModel, batch: Batch, targets: Sequence[Target]) -> None:
        self.model = model
        self.batch = batch
        self.order = [target.name for target in targets]
        self.last_width = 0
        """Width of the heads of the last product that was found; tried first for the next pair."""

    def heads(self, first: Target, second: Target) -> int | None:
        """Return the number of heads, each as wide as possible, if the two layers form a product; otherwise None."""
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
        """Run the model and return the inputs of the layers `readers` and the model's outputs as one vector.

        Args:
            mixtures: name of a layer → matrices `(heads, width, width)` that mix its outputs, one for each head.
        """
        values: list[Tensor] = []
        module = self.model.get_submodule
        hooks = [
            *(module(name).register_forward_hook(partial(_mix, mixture)) for name, mixture in mixtures.items()),
            *(module(name).register_forward_pre_hook(lambda _, args: values.append(args[0])) for name in readers),
        ]
        with hooked(hooks):
            values += float_tensors(self.model(**self.batch))
        return torch.cat([tensor.flatten().double().cpu() for tensor in values])


def _mix(mixture: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    heads = output.unflatten(-1, (len(mixture), -1, 1))
    return (mixture.to(output) @ heads).flatten(-3)


def _mixtures(heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Draw G and G⁻ᵀ of each head, `(heads, width, width)`; G rotates, then stretches each channel by ½ to 2."""
    generator = torch.Generator().manual_seed(0)
    rotations = torch.linalg.qr(torch.randn(heads, width, width, generator=generator, dtype=torch.float64)).Q
    stretches = (2 * torch.rand(heads, width, 1, generator=generator, dtype=torch.float64) - 1).exp2()
    return stretches * rotations, rotations / stretches
