"""Ranks per layer as a heat map: where things stand; the template draws them."""

from __future__ import annotations

from dataclasses import dataclass

from eckart.model.targets import Target
from tasks.report.names import Layer, kinds, layers
from tasks.report.numbers import counted, percent
from tasks.report.results import CandidateResults, Results

_WIDTH = 1080.0  # of the drawing, at most, in pixels
_CELL = 34.0  # width of a cell, at most
_ROW = 26.0  # height of a cell
_GAP = 5.0  # between layers, at most
_TOP = 22.0  # for the numbers of the layers
_CHARACTER = 6.6  # width of one, on average
_ROOM = 24.0  # that a layer's number or a rank takes
_KIND_ROOM = 12.0  # that the name of a kind takes, turned by 60 degrees: the height of a line
_SINE, _COSINE = 0.87, 0.5  # of these 60 degrees


@dataclass(frozen=True)
class Label:
    x: float
    text: str


@dataclass(frozen=True)
class Cell:
    x: float
    share: float
    """Parameters of the target after ÷ before."""
    text: str
    title: str


@dataclass(frozen=True)
class Line:
    """The cells of one candidate."""

    y: float
    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class HeatMap:
    """All candidates at one keep, a row for each, over the targets in order of execution."""

    keep: str
    width: float
    height: float
    left: float
    bottom: float
    cell: float
    row: float
    layers: tuple[Label, ...]
    kinds: tuple[Label, ...]
    lines: tuple[Line, ...]

    @property
    def shows_ranks(self) -> bool:
        """Whether its cells have room for text."""
        return self.cell >= _ROOM


def heat_maps(results: Results) -> list[HeatMap]:
    """A heat map per keep, all of the same shape."""
    groups = layers(results.targets)
    shown = kinds(results.targets)
    longest = _CHARACTER * max(map(len, shown.values()))
    left = max(70.0, 12 + _CHARACTER * max(map(len, results.recipes)), _COSINE * longest)
    cell, gap = _widths(len(results.targets), len(groups), _WIDTH - left)
    starts = _starts(groups, left, cell, gap)
    below = _SINE * longest + 22 if cell >= _KIND_ROOM else 4
    bottom = _TOP + _ROW * len(results.recipes)
    return [
        HeatMap(
            keep=keep,
            width=max(starts.values()) + cell + 2,
            height=bottom + below,
            left=left,
            bottom=bottom,
            cell=cell,
            row=_ROW,
            layers=_layer_labels(groups, starts, cell),
            kinds=tuple(Label(x + cell / 2, shown[name]) for name, x in starts.items() if cell >= _KIND_ROOM),
            lines=_lines(results, keep, starts, cell),
        )
        for keep in results.keeps
    ]


def order_of_kinds(results: Results) -> list[str]:
    """The kinds as they follow each other within a layer, if all layers agree; for maps too dense for labels."""
    shown = kinds(results.targets)
    sequences = {tuple(shown[target.name] for target in group.targets) for group in layers(results.targets)}
    return list(sequences.pop()) if len(sequences) == 1 else []


def _widths(targets: int, groups: int, width: float) -> tuple[float, float]:
    """Of a cell and of the gap between layers, so that all fit into `width`."""
    gap = min(_GAP, 0.15 * width / groups)
    return min(_CELL, (width - gap * (groups - 1)) / targets), gap


def _starts(groups: list[Layer], left: float, cell: float, gap: float) -> dict[str, float]:
    """Name of a target → where its cells begin."""
    starts, x = {}, left
    for group in groups:
        for target in group.targets:
            starts[target.name] = x
            x += cell
        x += gap
    return starts


def _layer_labels(groups: list[Layer], starts: dict[str, float], cell: float) -> tuple[Label, ...]:
    """Every layer's number, or every second or third where they would touch."""
    labels: list[Label] = []
    free, end = 0.0, max(starts.values()) + cell + 2
    for group in groups:
        first, last = starts[group.targets[0].name], starts[group.targets[-1].name] + cell
        middle, half = (first + last) / 2, max(_ROOM, _CHARACTER * len(group.label) + 8) / 2
        if group.label and middle - half >= free and middle + half <= end + _GAP:
            labels.append(Label(middle, group.label))
            free = middle + half
    return tuple(labels)


def _lines(results: Results, keep: str, starts: dict[str, float], cell: float) -> tuple[Line, ...]:
    at_keep = [one for one in results.candidates if one.keep == keep]
    return tuple(
        Line(_TOP + _ROW * position, one.recipe, _cells(results, one, starts, cell))
        for position, one in enumerate(at_keep)
    )


def _cells(results: Results, one: CandidateResults, starts: dict[str, float], cell: float) -> tuple[Cell, ...]:
    cells = []
    for target in results.targets:
        rank, share = one.rank(target), one.share(target)
        text = "" if cell < _ROOM else "D" if rank is None else str(rank)
        cells.append(Cell(starts[target.name], share, text, f"{one.name}, {target.name}: {_size_of(one, target)}"))
    return tuple(cells)


def _size_of(one: CandidateResults, target: Target) -> str:
    """What is left of a target, in words."""
    rank, rows = one.rank(target), one.rows(target)
    if rank is None:
        return "stays dense"
    beside = f" and {counted(rows, 'sparse row')}" if rows else ""
    return f"rank {rank}{beside}, {percent(one.share(target))} of its parameters"
