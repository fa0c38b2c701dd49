"""Colors, marks, ticks and files that all plots of matplotlib share."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib import style
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, NullLocator

from tasks.report.numbers import count

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
# Colors of texts, of less important lines, and of axes and grid. The page puts variables of its style sheet there.
INK, MUTED, RULE = "#1d2530", "#5d6876", "#dfe3e8"
_TEXTS = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor")
_STYLE: dict[str, Any] = {
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


def file_of(draw: Callable[[], Figure], kind: str, more: dict[str, Any], unsaid: Iterable[str], **how: Any) -> bytes:
    """Draw a figure and return its file; equal inputs give identical files.

    Args:
        more: settings of matplotlib besides the shared ones.
        unsaid: metadata that the file leaves out, such as its date.
        how: further arguments of `savefig`.
    """
    file = io.BytesIO()
    with style.context(["default", _STYLE | more]):
        draw().savefig(file, format=kind, metadata=dict.fromkeys(unsaid), **how)
    return file.getvalue()


def looks(labels: Iterable[str], **choices: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the look of each label: one of the choices for its color, its marker, …, which repeat after the last."""
    return {
        label: {name: values[number % len(values)] for name, values in choices.items()}
        for number, label in enumerate(labels)
    }


def set_ticks(axis: Axis, places: Locator, text: Callable[[float], str]) -> None:
    """Put ticks at some places only, and write their numbers in full.

    Matplotlib would put a common factor and offset at the end of the axis.
    """
    axis.set_major_locator(places)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def tick_number(value: float, digits: int = 6) -> str:
    """Format the number of a tick: 0.85, 9999, 22.7 k."""
    return f"{value:.{digits}g}" if value < 10_000 else count(value)
