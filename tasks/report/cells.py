"""Rows and cells of tables, for the web page and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Cell:
    value: str = "–"
    below: str = ""
    """Small print below the value, possibly in several lines, such as an interval or a share of the original value."""
    order: float | None = None
    """The number that the page sorts this column by."""


@dataclass(frozen=True)
class Row:
    """Row of a table.

    cells: title of the column → cell.
    """

    name: str
    cells: Mapping[str, Cell]
    mark: str = ""
    """`*` for the chosen or nearest candidate, `≈` for one that is not significantly different from it."""


def cell(value: float | None, text: Callable[[Any], str], below: str = "") -> Cell:
    """Return a cell that shows `text(value)` and is sorted by `value`; a dash if `value` is None."""
    return Cell(below=below) if value is None else Cell(text(value), below, value)


def terminal_table(title: str, first: str, rows: Sequence[Row]) -> Table:
    """Make a table for the terminal, whose first column has the title `first` and the names of the rows.

    A cell shows its value, and the first line of its small print in parentheses.
    """
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for head in rows[0].cells:
        table.add_column(head)
    for row in rows:
        lines = ((cell.value, cell.below.partition("\n")[0]) for cell in row.cells.values())
        table.add_row(row.name, *(f"{value} ({below})" if below else value for value, below in lines))
    return table


def printed(*tables: Table, width: int = 180) -> str:
    """Return tables as plain text. Its width is fixed, so that the text is the same in terminals, logs and tests."""
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(*tables)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())
