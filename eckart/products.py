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

from eckart.targets import Product, Target, Targets, eval_mode

_SAME = 0.01  # change of the answers that is rounding, ÷ their change where one map alone is mixed


def find_products(model: PreTrainedModel, batch: Mapping[str, Tensor], found: Targets) -> Targets:
    """`found`, where two targets that are a product are one. Maps of one module, of as many outputs, are tried.

    Args:
        batch: model inputs, each `(batch, …)`.

    Raises:
        ValueError: no two targets are a product.
    """
    targets = {target.name: target for target in found.targets}
    with eval_mode(model), torch.no_grad():
        probe = _Probe(model, batch)
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
    """What a model answers where the outputs of some maps are mixed within heads."""

    def __init__(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
        self.model = model
        self.batch = batch
        self.answers = self._answers({})
        self.width = 0
        """Of the heads that were found last."""

    def heads(self, one: Target, other: Target) -> int | None:
        """How many heads of largest width the two are a product of; None if of none."""
        if not self._is_product(one, other, 1):
            return None
        for width in dict.fromkeys((self.width, *range(one.out_features, 1, -1))):
            if width and one.out_features % width == 0 and self._is_product(one, other, width):
                self.width = width
                return one.out_features // width
        return None

    def _is_product(self, one: Target, other: Target, width: int) -> bool:
        mixed, back = _mixtures(one.out_features // width, width)
        alone = self._changed({one.name: mixed})
        return alone > 0 and self._changed({one.name: mixed, other.name: back}) <= _SAME * alone

    def _changed(self, mixtures: Mapping[str, Tensor]) -> float:
        return float((self._answers(mixtures) - self.answers).norm())

    def _answers(self, mixtures: Mapping[str, Tensor]) -> Tensor:
        """All numbers that the model gives, where each map's outputs are mixed by `(heads, d, d)`."""
        hooks = [
            self.model.get_submodule(name).register_forward_hook(partial(_mix, mixture))
            for name, mixture in mixtures.items()
        ]
        try:
            return torch.cat([values.flatten().double() for values in _floats(self.model(**self.batch))])
        finally:
            for hook in hooks:
                hook.remove()


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
