"""Format numbers for people."""

from __future__ import annotations

_GAP = "\N{NO-BREAK SPACE}"  # a number and its unit stay on one line
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """Format with three digits and a unit: 22.7 M."""
    for size, unit in _UNITS:
        if value >= size * 0.9995:  # what would round to 1000 of a unit is 1 of the next
            return f"{_three_digits(value / size)}{_GAP}{unit}"
    return f"{value:.0f}"


def size(value: int) -> str:
    """Format bytes in powers of ten: 90.9 MB."""
    return f"{count(value)}B" if value >= 1000 else f"{value}{_GAP}B"


def percent(share: float) -> str:
    return f"{100 * share:.1f}{_GAP}%"


def times(factor: float) -> str:
    return f"{factor:.2f}{_GAP}×"


def times_between(low: float, high: float) -> str:
    """Format an interval of factors: 1.80 to 1.90."""
    return f"{low:.2f} to {high:.2f}"


def score(metric: float, spread: float | None = None) -> str:
    """Format a metric with three decimals: the standard error on fewer than 100,000 examples is larger than the last.

    A perplexity has fewer the larger it is: 8.127, 23.41, 1,204, 1.3e5. A `spread` follows it, to the same digit.
    """
    both = [metric] if spread is None else [metric, spread]
    return " ± ".join(_to_digit(value, abs(metric)) for value in both)


def _to_digit(value: float, size: float) -> str:
    """Format `value` to the last digit shown of a metric of `size`."""
    for limit, decimals in ((10, 3), (100, 2), (1000, 1), (100_000, 0)):
        if round(size, decimals) < limit:
            return f"{value:,.{decimals}f}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits  # the spread of perplexities near 1e300 is infinite


def between(low: float, high: float, metric: float) -> str:
    """Format an interval of differences of a `metric`, with signs and its digits: -0.031 to +0.006."""
    return " to ".join(_signed(end, abs(metric)) for end in (low, high))


def _signed(value: float, size: float) -> str:
    digits = _to_digit(abs(value), size)
    return digits if not float(digits.replace(",", "")) else f"{'-' if value < 0 else '+'}{digits}"


def rank(average: float) -> str:
    """Format a mean rank over targets, with one decimal."""
    return f"{average:,.1f}"


def counted(number: int, thing: str) -> str:
    """Format a count: 1 target, 2 targets."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
