"""Measures of the weights that shaping left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from eckart.model.targets import Target, weight_of


def share_left(modules: Iterable[nn.Module]) -> float:
    """Return the share of the weights of linear layers that is not zero."""
    weights = [weight_of(module) for module in modules]
    return sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)


def average_rank(model: nn.Module, targets: Sequence[Target]) -> float:
    """Return the mean numerical rank of the targets' weights; pruning lowers it (LPAF, 3.2)."""
    return sum(numerical_rank(weight_of(model.get_submodule(target.name))) for target in targets) / len(targets)


def numerical_rank(weight: Tensor) -> int:
    """Count the singular values of `weight` `(out, in)` above ε ‖W‖_F, with ε of the type that it is stored in.

    Rounding moves an entry by ε/2 of it at most, so no singular value by more than ε/2 ‖W‖_F (Weyl): what lies below
    may be rounding alone. The other half is for how the entries were computed.
    """
    values = torch.linalg.svdvals(weight.cpu().double())
    return int((values > torch.finfo(weight.dtype).eps * values.norm()).sum())


def empty_rows(model: nn.Module, targets: Sequence[Target]) -> int:
    """Count the rows of the targets' weights `(out, in)` that are all zero, by which pruning lowers the rank."""
    return sum(int((weight_of(model.get_submodule(target.name)) == 0).all(1).sum()) for target in targets)
