"""Format numbers for tables and text."""

from __future__ import annotations

from tasks.report.rounding import rounded

_GAP = "\N{NO-BREAK SPACE}"  # keeps a number and its unit on one line
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """Format a number with three digits and a metric prefix: 22.7 M."""
    for size, unit in _UNITS:
        if value >= size * 0.9995:  # 999.6 k is shown as 1.00 M, not as 1000 k
            digits = value / size
            decimals = 2 if digits < 9.995 else 1 if digits < 99.95 else 0
            return f"{rounded(digits, decimals)}{_GAP}{unit}"
    return rounded(value, 0)


def size(value: int) -> str:
    """Format a number of bytes, with prefixes for powers of 1000: 90.9 MB."""
    return f"{count(value)}B" if value >= 1000 else f"{value}{_GAP}B"


def percent(share: float) -> str:
    return f"{rounded(100 * share)}{_GAP}%"


def times(factor: float) -> str:
    return f"{rounded(factor, 2)}{_GAP}×" if factor < 1000 else f"{score(factor)}{_GAP}×"


def times_between(low: float, high: float) -> str:
    """Format an interval of factors: 1.80 to 1.90."""
    return f"{rounded(low, 2)} to {rounded(high, 2)}"


def score(metric: float, spread: float | None = None) -> str:
    """Format a metric with three decimals, which is finer than the standard error on fewer than 100,000 examples.

    Values of 10 or more, such as perplexities, have fewer decimals: 8.127, 23.41, 1,204, 1.3e5. If there is a `spread`,
    it follows as `± spread`, with the same number of decimals.
    """
    both = [metric] if spread is None else [metric, spread]
    return " ± ".join(_to_digit(value, abs(metric)) for value in both)


def _to_digit(value: float, size: float) -> str:
    """Format `value` with as many decimals as a metric of the magnitude `size` has."""
    for limit, decimals in ((10, 3), (100, 2), (1000, 1), (100_000, 0)):
        if size < limit and float(rounded(size, decimals).replace(",", "")) < limit:
            return rounded(value, decimals)
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits  # the spread of perplexities near 1e300 is infinite


def between(low: float, high: float, metric: float) -> str:
    """Format an interval of differences, with signs and the decimals of `metric`: -0.031 to +0.006."""
    return f"{signed(low, metric)} to {signed(high, metric)}"


def signed(value: float, metric: float) -> str:
    """Format a difference, with its sign and the decimals of `metric`: +0.006."""
    digits = _to_digit(abs(value), abs(metric))
    return digits if not float(digits.replace(",", "")) else f"{'-' if value < 0 else '+'}{digits}"


def counted(number: int, thing: str) -> str:
    """Format a number of things, with a plural s: 1 target, 2 targets."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
