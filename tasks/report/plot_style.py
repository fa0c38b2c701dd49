"""Colors, marks and settings of matplotlib that all plots share."""

from __future__ import annotations

from typing import Any

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
# Colors of texts, of less important lines, and of axes and grid. The page puts variables of its style sheet there.
INK, MUTED, RULE = "#1d2530", "#5d6876", "#dfe3e8"
_TEXTS = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor")
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on every machine
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
    **dict.fromkeys(_TEXTS, INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), RULE),
}
