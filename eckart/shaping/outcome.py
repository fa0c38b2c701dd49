"""What shaping left of the targets' weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from eckart.targets import Target, weight_of


def share_left(modules: Iterable[nn.Module]) -> float:
    """The share of the weights of linear maps that is not zero."""
    weights = [weight_of(module) for module in modules]
    return sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)


def average_rank(model: nn.Module, targets: Sequence[Target]) -> float:
    """Mean numerical rank of the targets' weights, at the tolerance of float64; pruning lowers it (LPAF, 3.2)."""
    weights = [weight_of(model.get_submodule(target.name)).cpu().double() for target in targets]
    return sum(int(torch.linalg.matrix_rank(weight)) for weight in weights) / len(weights)
