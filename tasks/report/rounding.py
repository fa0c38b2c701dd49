"""The rounding rule of every table and page: decimal, half away from zero, from all digits of the stored number."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal


def rounded(value: float, decimals: int = 1, *, sign: bool = False) -> str:
    """Format a number with so many decimals: 83.25 is 83.3, as on paper, and not 83.2, as Python's formats have it.

    A float's error in its last digits does not decide: 100 × 0.8285 is 82.85. Zero has no sign.

    Args:
        sign: whether a positive number has a plus.
    """
    if not math.isfinite(value):
        return f"{value:+}" if sign else f"{value}"
    number = Decimal(f"{value:.9f}").quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    if not number:
        number = abs(number)
    return f"{number:+,f}" if sign and number else f"{number:,f}"
