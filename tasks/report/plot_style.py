"""Settings of matplotlib that all plots of a report share."""

from __future__ import annotations

from typing import Any


def plot_style(ink: str, rule: str) -> dict[str, Any]:
    """Return settings of matplotlib for plots in the color `ink`, with lines of the grid in the color `rule`."""
    texts = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor")
    return {
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "svg.fonttype": "none",
        "text.parse_math": False,
        **dict.fromkeys(texts, ink),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), rule),
    }
