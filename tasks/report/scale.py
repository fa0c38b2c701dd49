"""Scales of plots, even or finest at the original model's metric, with their ticks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

_EVEN = 0.2  # loss over dense, in nats, up to which a scale that is finest at dense is nearly even
_LOSS = 600.0  # over dense, in nats, at which such a scale ends: its exponential is a float yet
_TICKS_APART = 0.06  # of such a scale, at least, as a share of its length
_MARGIN = 0.05  # beyond the values at each end, as a share of a scale's length
_MANTISSAS = ((1.0,), (2.0, 5.0), (3.0, 4.0, 7.0), (1.5, 2.5), (1.2, 2.2, 3.5))  # of its ticks, the roundest first


@dataclass(frozen=True)
class EvenScale:
    """A linear scale from `bottom` to `top`."""

    bottom: float
    top: float

    def place(self, value: float) -> float:
        """Return 0 at the bottom and 1 at the top."""
        return (value - self.bottom) / (self.top - self.bottom)

    def ticks(self, most: int = 6) -> list[float]:
        """Return about `most` round numbers."""
        ticks = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(self.bottom, self.top)
        return [float(f"{tick:.10g}") for tick in ticks if self.bottom <= tick <= self.top]


@dataclass(frozen=True)
class ScaleOfDense:
    """A scale linear in the loss over dense, log(perplexity ÷ dense), while that is small, and logarithmic far from it.

    A plain logarithm would leave a tenth of the axis to all values near dense beside one perplexity of 10⁵.
    """

    dense: float
    bottom: float
    top: float

    def place(self, value: float) -> float:
        """Return 0 at the bottom and 1 at the top."""
        low, high, place = (float(self.stretched(end)) for end in (self.bottom, self.top, value))
        return (place - low) / (high - low)

    def stretched(self, value: Any) -> Any:
        """Return the places of an array for matplotlib, not scaled to 0 to 1."""
        above_0 = np.maximum(value, np.finfo(float).tiny)  # matplotlib asks for the place of 0, too
        return np.arcsinh(np.log(above_0 / self.dense) / _EVEN)

    def back(self, stretched: Any) -> Any:
        """Return the value at a place."""
        return self.dense * np.exp(np.minimum(_EVEN * np.sinh(stretched), _LOSS))

    def ticks(self) -> list[float]:
        """Return the roundest numbers that have room."""
        ticks: list[float] = []
        for mantissas in _MANTISSAS:
            for decade in range(math.floor(math.log10(self.bottom)), math.ceil(math.log10(self.top))):
                for tick in (mantissa * 10.0**decade for mantissa in mantissas):
                    apart = all(abs(self.place(tick) - self.place(other)) >= _TICKS_APART for other in ticks)
                    if self.bottom <= tick <= self.top and apart:
                        ticks.append(tick)
        return sorted(ticks)


def even(values: list[float]) -> EvenScale:
    """Return an even scale over all `values`, with a margin, also around a single one."""
    least, largest = min(values), max(values)
    margin = _MARGIN * (largest - least) or 0.05 * abs(largest) or 1.0
    return EvenScale(least - margin, largest + margin)


def of_dense(dense: float, values: list[float]) -> ScaleOfDense:
    """Return a scale that is finest at `dense`, over all `values`, with a margin."""
    plain = ScaleOfDense(dense, min(values), max(values))
    ends = [float(plain.stretched(end)) for end in (plain.bottom, plain.top)]
    margin = _MARGIN * (ends[1] - ends[0])
    return ScaleOfDense(dense, float(plain.back(ends[0] - margin)), float(plain.back(ends[1] + margin)))


def tick_texts(ticks: list[float]) -> list[str]:
    """Format all with the decimals of the tick that needs most: 0.80, 0.85."""
    decimals = max((len(f"{tick:g}".partition(".")[2]) for tick in ticks if "e" not in f"{tick:g}"), default=0)
    return [tick_text(tick) if "e" in f"{tick:g}" else f"{tick:,.{decimals}f}" for tick in ticks]


def tick_text(value: float) -> str:
    """Format a tick: 1,000, 0.85, 1e5."""
    return re.sub(r"e\+0*", "e", f"{value:,g}")
