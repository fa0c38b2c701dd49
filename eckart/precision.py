"""The precision of sums."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_dtype(values: Tensor) -> torch.dtype:
    """Return the dtype for sums of `values`: float32 or better, because in bfloat16 a long sum would stop growing."""
    return torch.promote_types(values.dtype, torch.float32)


def at_least_float32(values: Tensor) -> Tensor:
    """Return floating-point `values` in float32, or as they are if they are more precise."""
    return values.to(sum_dtype(values))
