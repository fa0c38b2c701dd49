"""Numbers as a person reads them."""

from __future__ import annotations

_GAP = "\N{NO-BREAK SPACE}"  # a number and its unit stay on one line
_METRICS = {
    "f1": "F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """Three digits and a unit: 22.7 M."""
    for size, unit in _UNITS:
        if value >= size * 0.9995:  # what would round to 1000 of a unit is 1 of the next
            return f"{_three_digits(value / size)}{_GAP}{unit}"
    return f"{value:.0f}"


def size(value: int) -> str:
    """Bytes, in powers of ten: 90.9 MB."""
    return f"{count(value)}B" if value >= 1000 else f"{value}{_GAP}B"


def percent(share: float) -> str:
    return f"{100 * share:.1f}{_GAP}%"


def times(factor: float) -> str:
    return f"{factor:.2f}{_GAP}×"


def score(metric: float) -> str:
    """Three decimals: the standard error of a test split below 100,000 rows is larger than their last."""
    return f"{metric:.3f}"


def metric_name(metric: str) -> str:
    """As it stands in a sentence."""
    return _METRICS.get(metric, metric)


def rank(average: float) -> str:
    """One decimal: it is a mean over targets."""
    return f"{average:,.1f}"


def counted(number: int, thing: str) -> str:
    """1 target, 2 targets."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
