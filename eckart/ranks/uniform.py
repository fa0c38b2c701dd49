"""Uniform: every target keeps the same share of its parameters, r = ⌊keep · out · in / (out + in)⌋."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from eckart.budget import Rank, Ranks, allowance, step
from eckart.targets import Target


class Uniform(BaseModel):
    """The same keep for every target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["uniform"]


def search(targets: Sequence[Target], keep: float) -> Ranks:
    """Ranks at the same `keep` everywhere; dense only where `keep` pays for it."""
    return {target.name: _rank(target, keep) for target in targets}


def _rank(target: Target, keep: float) -> Rank:
    allowed = allowance([target], keep)
    if allowed >= target.parameters:
        return None
    rank = allowed // step(target)
    if rank < 1:
        raise ValueError(f"keep={keep:g} leaves {target.name} no rank: raise keep or exclude it")
    return rank
