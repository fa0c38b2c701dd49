"""Comparison of values with their limits."""

from __future__ import annotations

ROUNDING = 1e-9
"""Tolerance for rounding: 0.842 - 0.832 must not be more than 0.01."""


def within(value: float, limit: float) -> bool:
    """Whether `value` is at most `limit`, apart from rounding."""
    return value <= limit + ROUNDING
