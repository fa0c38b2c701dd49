"""Which two targets are one, their product: queries and keys of attention, found by running the model.

Two maps are a product if the model answers the same whenever every head's outputs of the one are mixed by an invertible
G and those of the other by G⁻ᵀ: then nothing is made of them but inner products, head by head. That is so where
positions are added to the tokens or to the scores, and not where something acts on queries or keys: rotary positions,
norms, relative positions that are multiplied with them. Nor is it found for key heads that several query heads share,
and for query, key and value in one map.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.model.module_context import eval_mode
from eckart.model.targets import Product, Target, Targets

_SAME = 0.02  # change that is rounding, ÷ the change where one map alone is mixed: wrong ones are near 1
_BEHIND = 3  # maps: a value map may run first, which reads what query and key read


def find_products(model: PreTrainedModel, batch: Mapping[str, Tensor], found: Targets) -> Targets:
    """`found`, where two targets that are a product are one. Maps of one module, of as many outputs, are tried.

    Args:
        batch: model inputs, each `(batch, …)`.

    Raises:
        ValueError: no two targets are a product.
    """
    targets = {target.name: target for target in found.targets}
    with eval_mode(model), torch.no_grad():
        probe = _Probe(model, batch, found.targets)
        for one, other in combinations(found.targets, 2):
            beside = one.name.rpartition(".")[0] == other.name.rpartition(".")[0]
            if not beside or one.out_features != other.out_features or not {one.name, other.name} <= set(targets):
                continue
            if isinstance(targets[one.name], Product) or isinstance(targets[other.name], Product):
                continue
            if heads := probe.heads(one, other):
                targets[one.name] = Product(**one.model_dump(), heads=heads, other=other)
                del targets[other.name]
    if len(targets) == len(found.targets):
        raise ValueError(
            "no two targets are a product: queries and keys are one map or no targets, or something acts on them, such "
            f"as rotary positions; or the rounding of {model.dtype} hides it: write targets.products: false"
        )
    return found.model_copy(update={"targets": tuple(targets.values())})


class _Probe:
    """What a model makes of two maps whose outputs are mixed within heads: its answers, and what maps behind them read.

    Answers may be two numbers, which a wrong mixture can leave as they are by chance; what the next maps read are many.
    """

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Tensor], targets: Sequence[Target]) -> None:
        self.model = model
        self.batch = batch
        self.order = [target.name for target in targets]
        self.width = 0
        """Of the heads that were found last."""

    def heads(self, one: Target, other: Target) -> int | None:
        """How many heads of largest width the two are a product of; None if of none."""
        behind = self.order.index(other.name) + 1
        read = self.order[behind : behind + _BEHIND]
        unmixed = self._made({}, read)

        def is_product(width: int) -> bool:
            mixed, back = _mixtures(one.out_features // width, width)
            alone, both = ({one.name: mixed}, {one.name: mixed, other.name: back})
            changes = [float((self._made(mixtures, read) - unmixed).norm()) for mixtures in (alone, both)]
            return changes[1] <= _SAME * changes[0] and changes[0] > 0

        if not is_product(1):
            return None
        for width in dict.fromkeys((self.width, *range(one.out_features, 1, -1))):
            if width and one.out_features % width == 0 and is_product(width):
                self.width = width
                return one.out_features // width
        return None

    def _made(self, mixtures: Mapping[str, Tensor], read: Sequence[str]) -> Tensor:
        """All numbers that the maps `read` read and the model answers, where outputs are mixed by `(heads, d, d)`."""
        seen: list[Tensor] = []
        module = self.model.get_submodule
        hooks = [
            *(module(name).register_forward_hook(partial(_mix, mixture)) for name, mixture in mixtures.items()),
            *(module(name).register_forward_pre_hook(lambda _, args: seen.append(args[0])) for name in read),
        ]
        try:
            seen += _floats(self.model(**self.batch))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([values.flatten().double().cpu() for values in seen])


def _mix(mixture: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    heads = output.unflatten(-1, (len(mixture), -1, 1))
    return (mixture.to(output) @ heads).flatten(-3)


def _mixtures(heads: int, width: int) -> tuple[Tensor, Tensor]:
    """G and G⁻ᵀ `(heads, width, width)`, drawn: rotations that stretch each channel differently, up to twofold."""
    generator = torch.Generator().manual_seed(0)
    rotations = torch.linalg.qr(torch.randn(heads, width, width, generator=generator, dtype=torch.float64)).Q
    stretches = (2 * torch.rand(heads, width, 1, generator=generator, dtype=torch.float64) - 1).exp2()
    return stretches * rotations, rotations / stretches


def _floats(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    parts: Sequence[Any] = tuple(output.values()) if isinstance(output, Mapping) else output
    for part in parts if isinstance(parts, tuple | list) else ():
        yield from _floats(part)
