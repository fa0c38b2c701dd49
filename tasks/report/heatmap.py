"""Ranks per layer as heat maps: tables whose cells are shaded by the share of parameters that is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eckart.model.targets import Target
from tasks.report.names import kinds, layers
from tasks.report.numbers import counted, percent
from tasks.report.results import CandidateResults, Results

_WIDTH = 960.0  # of all cells of a line, at most, in pixels
_CELL = 34.0  # width of a cell, at most
_CHARACTER = 6.6  # mean width
_RANK_ROOM = 24.0  # the width that a rank takes
_KIND_ROOM = 14.0  # the width that the name of a kind takes, written downwards


@dataclass(frozen=True)
class Cell:
    """A target of a candidate."""

    share: float
    """Parameters after ÷ before."""
    text: str
    title: str
    first: bool
    """Whether it is the first of its layer."""


@dataclass(frozen=True)
class HeatMap:
    """All candidates at one keep: recipe → its cells, in order of execution."""

    keep: str
    lines: dict[str, tuple[Cell, ...]]


@dataclass(frozen=True)
class Columns:
    """The columns that all heat maps share."""

    cell: float
    """Width in pixels."""
    layers: tuple[tuple[str, int], ...]
    """Label, empty where it has no room, and number of targets."""
    kinds: tuple[str, ...]
    """The kind of each target; empty where the cells are too narrow."""

    @property
    def shows_ranks(self) -> bool:
        return self.cell >= _RANK_ROOM


def columns(results: Results) -> Columns:
    """Return columns that fit into the page, however many targets there are."""
    cell = min(_CELL, _WIDTH / len(results.targets))
    names = kinds(results.targets).values() if cell >= _KIND_ROOM else ()
    return Columns(cell, tuple(_layers(results, cell)), tuple(names))


def heat_maps(results: Results) -> list[HeatMap]:
    """Return a heat map per keep."""
    firsts, shows_ranks = {group.targets[0] for group in layers(results.targets)}, columns(results).shows_ranks

    def cell(candidate: CandidateResults, target: Target) -> Cell:
        rank = candidate.rank(target)
        text = "" if not shows_ranks else "D" if rank is None else str(rank)
        title = f"{candidate.name}, {target.name}: {_kept(candidate, target)}"
        return Cell(candidate.share(target), text, title, target in firsts)

    def lines(keep: str) -> dict[str, tuple[Cell, ...]]:
        at_keep = [candidate for candidate in results.candidates if candidate.keep == keep]
        return {one.recipe: tuple(cell(one, target) for target in results.targets) for one in at_keep}

    return [HeatMap(keep, lines(keep)) for keep in results.keeps]


def order_of_kinds(results: Results) -> list[str]:
    """Return the kinds in their order within a layer, if all layers agree; for cells too narrow for labels."""
    shown = kinds(results.targets)
    sequences = {tuple(shown[target.name] for target in group.targets) for group in layers(results.targets)}
    return list(sequences.pop()) if len(sequences) == 1 else []


def _layers(results: Results, cell: float) -> Iterator[tuple[str, int]]:
    """Yield the label of every layer, or of every second or third where they would touch."""
    start = free = 0.0
    for group in layers(results.targets):
        width = cell * len(group.targets)
        room, middle = _CHARACTER * len(group.label) + 8, start + width / 2
        fits = middle - room / 2 >= free - cell / 2
        yield (group.label if fits else "", len(group.targets))
        free, start = middle + room / 2 if fits else free, start + width


def _kept(candidate: CandidateResults, target: Target) -> str:
    rank, rows = candidate.rank(target), candidate.rows(target)
    if rank is None:
        return "stays dense"
    beside = f" and {counted(rows, 'sparse row')}" if rows else ""
    return f"rank {rank}{beside}, {percent(candidate.share(target))} of its parameters"
