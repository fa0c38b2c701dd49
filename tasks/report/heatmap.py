"""Ranks per layer as heat maps: tables whose cells are shaded by the share of parameters that is kept."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from eckart.model.targets import Target
from tasks.report.numbers import counted, percent
from tasks.report.results import CandidateResults, Results

_WIDTH = 960.0  # of all cells of a line, at most, in pixels
_CELL = 34.0  # width of a cell, at most
_CHARACTER = 6.6  # mean width
_RANK_ROOM = 24.0  # the width that a rank takes
_KIND_ROOM = 14.0  # the width that the name of a kind takes, written downwards
_IN_A_LAYER = re.compile(r"(?:(?P<stack>.+?)\.)??(?P<layer>\d+)\.(?P<kind>.+)")


@dataclass(frozen=True)
class Cell:
    """A target of a candidate."""

    share: float
    """Parameters after ÷ before; above 1 where factors and residual exceed the dense weight."""
    text: str
    title: str
    first: bool
    """Whether it is the first of its layer."""


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
    groups = layers(results.targets)
    room = max(_CHARACTER * len(label) + 8 for label, _ in groups)
    step = math.ceil(room / min(cell * len(targets) for _, targets in groups)) if len(groups) > 1 else 1
    labels = ((label if position % step == 0 else "", len(targets)) for position, (label, targets) in enumerate(groups))
    kinds = [place(target.name)[2] for target in results.targets]
    names = short({*kinds})
    return Columns(cell, tuple(labels), tuple(names[kind] for kind in kinds) if cell >= _KIND_ROOM else ())


def heat_maps(results: Results) -> dict[str, dict[str, list[Cell]]]:
    """Return the cells of each candidate in order of execution: keep → recipe → cells."""
    firsts, shows_ranks = {targets[0] for _, targets in layers(results.targets)}, columns(results).shows_ranks

    def cell(candidate: CandidateResults, target: Target) -> Cell:
        after = candidate.evaluation.targets[target.name]
        share, kept = after.parameters / target.parameters, "stays dense"
        if after.rank is not None:
            beside = f" and {counted(after.rows, 'sparse row')}" if after.rows else ""
            kept = f"rank {after.rank}{beside}, {percent(share)} of its parameters"
        text = "" if not shows_ranks else "D" if after.rank is None else str(after.rank)
        return Cell(share, text, f"{candidate.name}, {target.name}: {kept}", target in firsts)

    maps: dict[str, dict[str, list[Cell]]] = {keep: {} for keep in results.keeps}
    for candidate in results.candidates:
        maps[candidate.keep][candidate.recipe] = [cell(candidate, target) for target in results.targets]
    return maps


def place(name: str) -> tuple[str, str, str]:
    """Split the name of a target into stack, layer and kind; a name without a number is all kind.

    `encoder.layer.3.attention.query` is `attention.query` of layer 3 of `encoder.layer`.
    """
    match = _IN_A_LAYER.fullmatch(name)
    return (match["stack"] or "", match["layer"], match["kind"]) if match else ("", "", name)


def layers(targets: Sequence[Target]) -> list[tuple[str, list[Target]]]:
    """Group the targets by layer, in order of execution; labels name the stack where there are several."""
    stacks = short({place(target.name)[0] for target in targets} - {""})
    groups = groupby(targets, lambda target: place(target.name)[:2])
    return [
        (f"{stacks[stack]} {layer}" if stack and len(stacks) > 1 else layer, list(group))
        for (stack, layer), group in groups
    ]


def short(names: set[str]) -> dict[str, str]:
    """Return the shortest unique ending of each dotted name, without `dense`, BERT's word for any linear layer."""

    def ending(name: str) -> str:
        parts, others = name.split("."), names - {name}
        endings = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        return next((end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)), name)

    return {name: ending(name).removesuffix(".dense") for name in names}
