"""Training and eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode; each module, or what has taken its place, comes back to the one it was in."""
    modes = {name: module.training for name, module in model.named_modules()}
    try:
        model.eval()
        yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
