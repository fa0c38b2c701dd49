"""The rounding rule of every table and page: decimal, half away from zero, from all digits of the stored number."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal

_LARGE = 1e15  # a perplexity without a limit reaches 1e304, which has more digits than Decimal keeps


def rounded(value: float, decimals: int = 1, *, sign: bool = False) -> str:
    """Format a number with so many decimals: 83.25 is 83.3, as on paper, and not 83.2, as Python's formats have it.

    A float's error in its last digits does not decide: 100 × 0.8285 is 82.85. Zero has no sign. From 1e15 on, a number
    has two digits and an exponent.

    Args:
        sign: whether a positive number has a plus.
    """
    if not math.isfinite(value):
        return f"{value:+}" if sign else f"{value}"
    if abs(value) >= _LARGE:
        return f"{value:{'+' if sign else ''}.1e}".replace("e+", "e")
    number = Decimal(f"{value:.9f}").quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    if not number:
        number = abs(number)
    return f"{number:+,f}" if sign and number else f"{number:,f}"
