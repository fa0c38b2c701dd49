"""Rows of the tables that the page draws and a terminal prints."""

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
    """Small print: a share of the original model's value, or an interval; may have several lines."""
    order: float | None = None
    """The number by which the page sorts."""


@dataclass(frozen=True)
class Row:
    """A line of a table: its head, and a cell for each column."""

    name: str
    cells: Mapping[str, Cell]
    mark: str = ""
    """`*` for the best at its keep, `≈` for one that is not significantly different from it."""


def cell(value: float | None, text: Callable[[Any], str], below: str = "") -> Cell:
    """Return a cell that sorts by `value`; a dash without one."""
    return Cell(below=below) if value is None else Cell(text(value), below, value)


def terminal_table(title: str, first: str, rows: Sequence[Row]) -> Table:
    """Return rows as a table for a terminal, with the first line of the small print in parentheses."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    for head in rows[0].cells:
        table.add_column(head)
    for row in rows:
        lines = ((cell.value, cell.below.partition("\n")[0]) for cell in row.cells.values())
        table.add_row(row.name, *(f"{value} ({below})" if below else value for value, below in lines))
    return table


def printed(*tables: Table, width: int = 180) -> str:
    """Return tables as text of a fixed width without markup: the same in a terminal, a log and a test."""
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(*tables)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())
