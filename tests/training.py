"""The training loop with settings by name, as tests give them."""

from __future__ import annotations

from typing import Any

from eckart.training.optimizer_settings import Optimization
from tasks.config.schema import Trainer
from tasks.training import loop


def train(*arguments: Any, seed: int = 0, **options: Any) -> int:
    """Call the training loop with an `Optimization` and a `Trainer` made of those of `options` that are theirs."""
    optimization, trainer = (
        kind(**{name: options.pop(name) for name in kind.model_fields if name in options})
        for kind in (Optimization, Trainer)
    )
    return loop.train(*arguments, optimization, trainer, seed=seed, **options)
