"""Rank searches: how the budget is shared out among the targets. One file each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field
from torch import Tensor

from eckart.budget import Ranks
from eckart.ranks import uniform, waterfill
from eckart.ranks.hypernetwork import Hypernetwork
from eckart.ranks.threshold import Threshold
from eckart.ranks.tolerance import Tolerance
from eckart.targets import Target

ByFormula = uniform.Uniform | waterfill.Waterfill
"""Searches that need nothing but spectra."""

RankSearch = Annotated[ByFormula | Hypernetwork | Tolerance | Threshold, Field(discriminator="kind")]


def search(method: ByFormula, targets: Sequence[Target], spectra: Mapping[str, Tensor], keep: float) -> Ranks:
    """Ranks for `targets` that keep at most `keep` of their parameters.

    Args:
        spectra: target name → weighted singular values, descending `(min(out, in),)`.

    Raises:
        ValueError: `keep` leaves some target no rank.
    """
    match method:
        case uniform.Uniform():
            return uniform.search(targets, keep)
        case waterfill.Waterfill():
            return waterfill.search(targets, spectra, keep)
