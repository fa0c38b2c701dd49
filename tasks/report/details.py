"""What the page opens of a candidate: its numbers, ranks, curves, card and commands, as the script reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.report.names import kinds, layers
from tasks.report.results import CandidateResults, Curve, Results
from tasks.report.scale import even, tick_texts
from tasks.report.scatter import Scatter
from tasks.report.table import dense_rows, row

_WIDTH, _HEIGHT = 600.0, 160.0  # of the field of a curve, in pixels


def details(results: Results, scatter: Scatter, cards: Mapping[str, str]) -> dict[str, Any]:
    """For JSON: `targets`, where each stands in the table of ranks, and `models`, by name, in the study's order."""
    references = {one.name: {"facts": _facts(results, one)} for one in dense_rows(results)}
    models = references | {one.name: _candidate(results, one, cards[one.name]) for one in results.candidates}
    for name, content in models.items():
        content["x"] = {axis.key: axis.places[name] for axis in scatter.axes}
    return {"targets": _targets(results), "models": models}


def _candidate(results: Results, one: CandidateResults, card: str) -> dict[str, Any]:
    return {
        "facts": _facts(results, row(results, one)),
        "commands": _commands(one.name),
        "ranks": [one.rank(target) for target in results.targets],
        "rows": [one.rows(target) for target in results.targets] if results.has_sparse_rows else [],
        "shares": [round(one.share(target), 3) for target in results.targets],
        "curves": list(_curves(one)),
        "card": card,
    }


def _facts(results: Results, one: Any) -> list[tuple[str, str]]:
    """What a row of the table says, in pairs."""
    apart = f" ({one.of_dense.difference} from dense)" if one.of_dense.difference else ""
    speed = f" ({one.speedup.interval})" if one.speedup.interval else ""
    return [
        (results.metric.title, one.recovered + apart),
        *([("before recovery", one.factorized)] if one.factorized else []),
        ("size", f"{one.bytes.value}, {one.bytes.share} of dense"),
        ("parameters", f"{one.model.value}, {one.model.share}"),
        ("MACs per token", f"{one.macs.value}, {one.macs.share}"),
        ("speed", one.speedup.median + speed),
    ]


def _commands(name: str) -> list[tuple[str, str]]:
    return [
        ("Make it again", f"eckart reproduce {name}"),
        ("Write it as ONNX", f"eckart export {name} {name}.onnx"),
        ("Bring it to the Hugging Face hub", f"eckart publish {name} USER/NAME"),
    ]


def _targets(results: Results) -> dict[str, Any]:
    """Rows are layers and columns kinds, both in order of execution; of each target its name, shape, row and column."""
    groups, shown = layers(results.targets), kinds(results.targets)
    columns = list(dict.fromkeys(shown[target.name] for target in results.targets))
    cells = [
        [target.name, f"{target.out_features} × {target.in_features}", place, columns.index(shown[target.name])]
        for place, group in enumerate(groups)
        for target in group.targets
    ]
    return {"layers": [group.label for group in groups], "kinds": columns, "cells": cells}


def _curves(one: CandidateResults) -> Iterator[dict[str, Any]]:
    for title, curve in (("before the factorization", one.search_curve), ("recovery", one.curve)):
        if curve:
            yield {"title": f"Task loss of {title}" if title == "recovery" else f"Task loss {title}", **_drawn(curve)}


def _drawn(curve: Curve) -> dict[str, Any]:
    """The line of a curve and the ticks of its axes, on a field of 600 × 160 pixels."""
    steps, losses = [float(point.step) for point in curve], [point.compared_loss for point in curve]
    across, up = even(steps), even(losses)
    points = (
        (_WIDTH * across.place(step), _HEIGHT * (1 - up.place(loss))) for step, loss in zip(steps, losses, strict=True)
    )
    counted, marked = [tick for tick in across.ticks() if tick == round(tick) and tick >= 0], up.ticks(4)
    return {
        "line": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
        "steps": [[round(_WIDTH * across.place(tick), 1), f"{tick:,.0f}"] for tick in counted],
        "losses": [
            [round(_HEIGHT * (1 - up.place(tick)), 1), text]
            for tick, text in zip(marked, tick_texts(marked), strict=True)
        ],
    }
