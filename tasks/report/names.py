"""Split names of targets into layer and kind, and shorten them for labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from eckart.model.targets import Target

_IN_A_LAYER = re.compile(r"(?:(?P<stack>.+?)\.)??(?P<layer>\d+)\.(?P<kind>.+)")


@dataclass(frozen=True)
class Place:
    """The place of a target: `encoder.layer.3.attention.query` is `attention.query` of layer 3 of `encoder.layer`."""

    stack: str
    layer: str
    kind: str


@dataclass(frozen=True)
class Layer:
    """The targets of a layer in order of execution; without a label where names have no number."""

    label: str
    targets: tuple[Target, ...]


def place(name: str) -> Place:
    """Split a name; one without a number is all kind."""
    match = _IN_A_LAYER.fullmatch(name)
    return Place(match["stack"] or "", match["layer"], match["kind"]) if match else Place("", "", name)


def layers(targets: Sequence[Target]) -> list[Layer]:
    """Group the targets by layer, in order of execution; labels name the stack where there are several."""
    stacks = short({place(target.name).stack for target in targets} - {""})
    groups = []
    for (stack, layer), group in groupby(targets, _layer_of):
        label = f"{stacks[stack]} {layer}" if stack and len(stacks) > 1 else layer
        groups.append(Layer(label, tuple(group)))
    return groups


def kinds(targets: Iterable[Target]) -> dict[str, str]:
    """Return the short kind of each target, by name."""
    places = {target.name: place(target.name).kind for target in targets}
    labels = short(set(places.values()))
    return {name: labels[kind] for name, kind in places.items()}


def short(names: set[str]) -> dict[str, str]:
    """Return the shortest unique ending of each dotted name, without `dense`, BERT's word for any linear layer."""
    return {name: _ending(name, names - {name}).removesuffix(".dense") for name in names}


def _ending(name: str, others: set[str]) -> str:
    parts = name.split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
    return next((end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)), name)


def _layer_of(target: Target) -> tuple[str, str]:
    where = place(target.name)
    return where.stack, where.layer
