"""An axis scale for perplexities, which has the highest resolution near the original model's perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.artifacts.metrics import Metric

_EVEN = 0.2  # loss minus the dense loss, in nats, up to which the scale is nearly linear
_LOSS = 600.0  # loss minus the dense loss, in nats, at which the scale ends, so that perplexities do not overflow
_TICKS_APART = 0.06  # smallest distance between ticks, as a share of the axis
_MARGIN = 0.05  # at both ends of the axis, as a share of its length
_MANTISSAS = ((1.0,), (2.0, 5.0), (3.0, 4.0, 7.0), (1.5, 2.5), (1.2, 2.2, 3.5))  # of ticks, the roundest numbers first


def spans_widely(metric: Metric, values: Sequence[float]) -> bool:
    """Return whether values of a metric without an upper bound, such as perplexities, span a factor above ten."""
    return not metric.bounded and max(values) > 10 * min(values) > 0


@dataclass(frozen=True)
class ScaleOfDense:
    """Scale that is linear in d = log(perplexity ÷ dense perplexity) for small d, and logarithmic in d for large d.

    On a plain logarithmic scale with one perplexity of 10⁵, all values near dense would share a tenth of the axis.
    """

    dense: float

    def stretched(self, value: Any) -> Any:
        """Map perplexities to positions on the axis."""
        above_0 = np.maximum(value, np.finfo(float).tiny)  # matplotlib also transforms 0
        return np.arcsinh(np.log(above_0 / self.dense) / _EVEN)

    def back(self, stretched: Any) -> Any:
        """Map positions on the axis to perplexities."""
        return self.dense * np.exp(np.minimum(_EVEN * np.sinh(stretched), _LOSS))

    def limits(self, values: list[float]) -> tuple[float, float]:
        """Return the limits of an axis that shows all `values`, with a margin."""
        low, high = self.stretched(min(values)), self.stretched(max(values))
        margin = _MARGIN * (high - low)
        return float(self.back(low - margin)), float(self.back(high + margin))

    def ticks(self, bottom: float, top: float) -> list[float]:
        """Return ticks between `bottom` and `top`: the roundest numbers that are not too close to each other."""
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
