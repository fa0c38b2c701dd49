"""Measures of the weights after shaping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from eckart.model.targets import Target, weight_of


def share_left(modules: Iterable[nn.Module]) -> float:
    """Return the share of the weights of linear layers that are not zero."""
    weights = [weight_of(module) for module in modules]
    return sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)


def average_rank(model: nn.Module, targets: Sequence[Target]) -> float:
    """Return the mean numerical rank of the targets' weights, which pruning lowers (LPAF, section 3.2)."""
    return sum(numerical_rank(weight_of(model.get_submodule(target.name))) for target in targets) / len(targets)


def numerical_rank(weight: Tensor) -> int:
    """Count the singular values of `weight` `(out, in)` above ε ‖W‖_F, where ε is the machine epsilon of its dtype.

    Rounding changes each entry by at most ε/2 of its size, and so each singular value by at most ε/2 ‖W‖_F (Weyl):
    smaller values may be rounding alone. The bound is twice that, because the entries were also computed with rounding.
    """
    values = torch.linalg.svdvals(weight.cpu().double())
    return int((values > torch.finfo(weight.dtype).eps * values.norm()).sum())


def empty_rows(model: nn.Module, targets: Sequence[Target]) -> int:
    """Count the rows of the targets' weights `(out, in)` that are all zero; such rows lower the rank."""
    return sum(int((weight_of(model.get_submodule(target.name)) == 0).all(1).sum()) for target in targets)
