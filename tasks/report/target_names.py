"""Names of targets in reports: split into stack, layer and kind, and shortened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from eckart.model.targets import Target

_IN_A_LAYER = re.compile(r"(?:(?P<stack>.+?)\.)??(?P<layer>\d+)\.(?P<kind>.+)")


def split_name(name: str) -> tuple[str, str, str]:
    """Split the name of a target into stack, layer and kind. A name without a number is a kind only.

    `encoder.layer.3.attention.query` gives `encoder.layer`, `3` and `attention.query`.
    """
    match = _IN_A_LAYER.fullmatch(name)
    return (match["stack"] or "", match["layer"], match["kind"]) if match else ("", "", name)


def kind_in_layer(name: str) -> tuple[str, str, str]:
    """Return stack, layer and kind of a target. Experts of a layer are of one kind, such as `experts.*.up_proj`."""
    stack, layer, kind = split_name(name)
    return stack, layer, re.sub(r"(?<![^.])\d+(?![^.])", "*", kind)


def layers(targets: Sequence[Target]) -> list[tuple[str, list[Target]]]:
    """Group the targets by layer, in order of execution. Labels include the stack if there are several stacks."""
    stacks = short({split_name(target.name)[0] for target in targets} - {""})
    groups = groupby(targets, lambda target: split_name(target.name)[:2])
    return [
        (f"{stacks[stack]} {layer}" if stack and len(stacks) > 1 else layer, list(group))
        for (stack, layer), group in groups
    ]


def short(names: set[str]) -> dict[str, str]:
    """Shorten each dotted name to its shortest unique ending, without `.dense`, BERT's name of many linear layers."""

    def ending(name: str) -> str:
        parts, others = name.split("."), names - {name}
        endings = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
        return next((end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)), name)

    return {name: ending(name).removesuffix(".dense") for name in names}
