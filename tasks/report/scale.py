"""A scale of perplexities that is finest at the original model's, with its ticks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

_EVEN = 0.2  # loss over dense, in nats, up to which the scale is nearly even
_LOSS = 600.0  # over dense, in nats, at which it ends: its exponential is a float yet
_TICKS_APART = 0.06  # at least, as a share of its length
_MARGIN = 0.05  # beyond the values at each end, as a share of its length
_MANTISSAS = ((1.0,), (2.0, 5.0), (3.0, 4.0, 7.0), (1.5, 2.5), (1.2, 2.2, 3.5))  # of its ticks, the roundest first


@dataclass(frozen=True)
class ScaleOfDense:
    """A scale linear in the loss over dense, log(perplexity ÷ dense), while that is small, and logarithmic far from it.

    A plain logarithm would leave a tenth of the axis to all values near dense beside one perplexity of 10⁵.
    """

    dense: float

    def stretched(self, value: Any) -> Any:
        """Return the places of an array."""
        above_0 = np.maximum(value, np.finfo(float).tiny)  # matplotlib asks for the place of 0, too
        return np.arcsinh(np.log(above_0 / self.dense) / _EVEN)

    def back(self, stretched: Any) -> Any:
        """Return the values at places."""
        return self.dense * np.exp(np.minimum(_EVEN * np.sinh(stretched), _LOSS))

    def limits(self, values: list[float]) -> tuple[float, float]:
        """Return the ends of an axis over all `values`, with a margin."""
        low, high = self.stretched(min(values)), self.stretched(max(values))
        margin = _MARGIN * (high - low)
        return float(self.back(low - margin)), float(self.back(high + margin))

    def ticks(self, bottom: float, top: float) -> list[float]:
        """Return the roundest numbers that have room."""
        apart = _TICKS_APART * (self.stretched(top) - self.stretched(bottom))
        ticks: list[float] = []
        for mantissas in _MANTISSAS:
            for decade in range(math.floor(math.log10(bottom)), math.ceil(math.log10(top))):
                for tick in (mantissa * 10.0**decade for mantissa in mantissas):
                    room = all(abs(self.stretched(tick) - self.stretched(other)) >= apart for other in ticks)
                    if bottom <= tick <= top and room:
                        ticks.append(tick)
        return sorted(ticks)


def tick_text(value: float) -> str:
    """Format a tick: 1,000, 0.85, 1e5."""
    return re.sub(r"e\+0*", "e", f"{value:,g}")
