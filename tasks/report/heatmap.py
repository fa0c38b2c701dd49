"""Heat maps of ranks: tables with a cell for each target, shaded by the share of its parameters that is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eckart.model.targets import Target
from tasks.report.numbers import counted, percent
from tasks.report.results import CandidateResults, Results
from tasks.report.target_names import layers, short, split_name

_WIDTH = 930.0  # largest width of a row of cells, in pixels
_CELL = 34.0  # largest width of a cell
_CHARACTER = 6.6  # mean width of a character
_RANK_ROOM = 24.0  # smallest width of a cell in which its rank is written
_KIND_ROOM = 14.0  # smallest width of a column whose title is written (vertically)


@dataclass(frozen=True)
class Cell:
    """Cell of a heat map: one target of a candidate."""

    share: float
    """Parameters after ÷ before the factorization; above 1 if factors and residual are larger than the dense weight."""
    text: str
    title: str
    first: bool
    """Whether the target is the first of its layer."""


@dataclass(frozen=True)
class Columns:
    """The columns that all heat maps share."""

    cell: float
    """Width of a cell in pixels."""
    layers: tuple[tuple[str, int], ...]
    """Label and number of targets of each layer. The label is empty if there is no room for it."""
    kinds: tuple[str, ...]
    """The kind of each target, such as `query`; () if the cells are too narrow."""

    @property
    def shows_ranks(self) -> bool:
        return self.cell >= _RANK_ROOM


def columns(results: Results) -> Columns:
    """Return the columns for all targets, as narrow as needed to fit on the page."""
    cell = min(_CELL, _WIDTH / len(results.targets))
    groups = layers(results.targets)
    room = max(_CHARACTER * len(label) + 8 for label, _ in groups)
    step = math.ceil(room / min(cell * len(targets) for _, targets in groups)) if len(groups) > 1 else 1
    labels = ((label if position % step == 0 else "", len(targets)) for position, (label, targets) in enumerate(groups))
    kinds = [split_name(target.name)[2] for target in results.targets]
    names = short({*kinds})
    return Columns(cell, tuple(labels), tuple(names[kind] for kind in kinds) if cell >= _KIND_ROOM else ())


def heat_maps(results: Results) -> dict[str, dict[str, list[Cell]]]:
    """Return the heat maps: keep → recipes → cells, in the order in which the targets are executed.

    Recipes whose cells are all equal share a line, under their names.
    """
    firsts, shows_ranks = {targets[0] for _, targets in layers(results.targets)}, columns(results).shows_ranks

    def cell(candidate: CandidateResults, target: Target) -> Cell:
        after = candidate.evaluation.targets[target.name]
        share, kept = after.parameters / target.parameters, "stays dense"
        fewer = "loses neurons, " if target.name in candidate.decision.narrowed else ""
        if after.rank is not None:
            beside = f" and {counted(after.rows, 'sparse row')}" if after.rows else ""
            kept = f"{fewer}rank {after.rank}{beside}, {percent(share)} of its parameters"
        elif fewer:
            kept = f"{fewer}{percent(share)} of its parameters left"
        without = "N" if fewer else "D"
        text = "" if not shows_ranks else without if after.rank is None else str(after.rank)
        return Cell(share, text, f"{target.name}: {kept}", target in firsts)

    maps: dict[str, dict[str, list[Cell]]] = {}
    for keep in results.keeps:
        lines: dict[tuple[Cell, ...], list[str]] = {}
        for candidate in results.at(keep):
            lines.setdefault(tuple(cell(candidate, target) for target in results.targets), []).append(candidate.recipe)
        maps[keep] = {", ".join(recipes): list(cells) for cells, recipes in lines.items()}
    return maps
