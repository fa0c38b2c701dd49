"""Names of targets, split into layer and kind and shortened for labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from eckart.model.targets import Target

_IN_A_LAYER = re.compile(r"(?:(?P<stack>.+?)\.)??(?P<layer>\d+)\.(?P<kind>.+)")


@dataclass(frozen=True)
class Place:
    """Where a target is: `encoder.layer.3.attention.query` is kind `attention.query` of layer 3 of `encoder.layer`."""

    stack: str
    layer: str
    kind: str


@dataclass(frozen=True)
class Layer:
    """Targets that run one after the other in one layer; without a label where names have no number."""

    label: str
    targets: tuple[Target, ...]


def place(name: str) -> Place:
    """A name without a number is all kind."""
    match = _IN_A_LAYER.fullmatch(name)
    return Place(match["stack"] or "", match["layer"], match["kind"]) if match else Place("", "", name)


def layers(targets: Sequence[Target]) -> list[Layer]:
    """The targets in groups, in order of execution; a second stack of layers shows in the labels."""
    stacks = short({place(target.name).stack for target in targets} - {""})
    found = []
    for (stack, layer), group in groupby(targets, lambda target: _layer_of(target)):
        label = f"{stacks[stack]} {layer}" if stack and len(stacks) > 1 else layer
        found.append(Layer(label, tuple(group)))
    return found


def kinds(targets: Iterable[Target]) -> dict[str, str]:
    """Name of a target → its kind in short."""
    places = {target.name: place(target.name).kind for target in targets}
    labels = short(set(places.values()))
    return {name: labels[kind] for name, kind in places.items()}


def short(names: set[str]) -> dict[str, str]:
    """Each dotted name by the shortest end that no other has; `dense`, BERT's word for any linear map, is dropped."""
    return {name: _ending(name, names - {name}).removesuffix(".dense") for name in names}


def _ending(name: str, others: set[str]) -> str:
    parts = name.split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
    return next((end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)), name)


def _layer_of(target: Target) -> tuple[str, str]:
    found = place(target.name)
    return found.stack, found.layer
