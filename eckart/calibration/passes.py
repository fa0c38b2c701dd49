"""Divide targets into several passes over the calibration data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from eckart.model.targets import Target


@dataclass(frozen=True)
class Pass:
    """The targets of one pass over the calibration data.

    Attributes:
        then: first target of the next pass; the forward passes of this one may stop before it. None if there is no
            next pass, or if the forward passes must run to the end.
    """

    targets: tuple[Target, ...]
    then: Target | None


def layer_of(target: Target) -> str:
    """Return the target's name up to its first number, such as `model.layers.3`; "" if it has none."""
    numbered = re.match(r"(.*?\.)?\d+(?![^.])", target.name)
    return numbered[0] if numbered else ""


def passes(targets: Sequence[Target], layers_at_once: int | None) -> list[Pass]:
    """Divide targets into passes over a few transformer layers each, as statistics of all layers may not fit in memory.

    A layer consists of all targets with the same name up to the first number, such as `model.layers.3`. Targets without
    a number between two such layers form a layer, too. All passes together give bit for bit the statistics of a single
    pass.

    Args:
        targets: the targets in order of execution.
        layers_at_once: number of layers in a pass; None: all layers in one pass.
    """
    if layers_at_once is None:
        return [Pass(tuple(targets), None)]
    by_layer: dict[str, list[Target]] = {}
    last_numbered = ""
    for target in targets:
        layer = layer_of(target)
        last_numbered = layer or last_numbered
        by_layer.setdefault(layer or f"after {last_numbered}", []).append(target)
    layers, step = list(by_layer.values()), layers_at_once
    groups = [list(chain.from_iterable(layers[start : start + step])) for start in range(0, len(layers), step)]
    following = [group[0] for group in groups[1:]]
    return [Pass(tuple(group), then) for group, then in zip(groups, [*following, None], strict=True)]
