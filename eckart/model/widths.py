"""Widths of narrowed MLPs, apart from the code that needs torch: stages that only read results import them fast."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class Width(BaseModel):
    """Width to which an MLP is narrowed.

    Attributes:
        up: names of the targets that compute the neurons.
        neurons: number of neurons that stay.
        group: number of neurons that a round of the selection took (eckart/factorization/neuron_selection.py).
        loss: predicted loss.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    up: tuple[str, ...]
    neurons: int
    group: int
    loss: float


Widths = Mapping[str, Width]
"""Name of the down target of each MLP that is narrowed → its width."""
