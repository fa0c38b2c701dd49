"""Measures of the weights after shaping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from eckart.model.targets import weight_of


def share_left(modules: Iterable[nn.Module]) -> float:
    """Return the share of the weights of linear layers that are not zero."""
    weights = [weight_of(module) for module in modules]
    return sum(int(weight.count_nonzero()) for weight in weights) / sum(weight.numel() for weight in weights)


def average_rank(modules: Sequence[nn.Module]) -> float:
    """Return the mean numerical rank of the weights of linear layers, which pruning lowers (LPAF, section 3.2)."""
    return sum(numerical_rank(weight_of(module)) for module in modules) / len(modules)


def numerical_rank(weight: Tensor) -> int:
    """Count the singular values of `weight` `(out, in)` above ε ‖W‖_F, where ε is the machine epsilon of its dtype.

    Rounding changes each entry by at most ε/2 of its size, and so each singular value by at most ε/2 ‖W‖_F (Weyl):
    smaller values may be only rounding. The bound is twice that, because the entries were also computed with rounding.
    """
    values = torch.linalg.svdvals(weight.cpu().double())
    return int((values > torch.finfo(weight.dtype).eps * values.norm()).sum())


def empty_rows(modules: Iterable[nn.Module]) -> int:
    """Count the rows of the weights `(out, in)` of linear layers that are all zero; such rows lower the rank."""
    return sum(int((weight_of(module) == 0).all(1).sum()) for module in modules)
