"""The details that the page opens for a candidate: numbers, ranks, card and commands, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.report.names import kinds, layers
from tasks.report.results import CandidateResults, Results
from tasks.report.scatter import Scatter
from tasks.report.table import Row, reference_rows, row


def details(results: Results, scatter: Scatter, cards: Mapping[str, str]) -> dict[str, Any]:
    """Return `targets` with their places in the table of ranks, and `models` by name, in the study's order."""
    models: dict[str, Any] = {row.name: {"facts": _facts(results, row)} for row in reference_rows(results)[:2]}
    models |= {one.name: _candidate(results, one, cards[one.name]) for one in results.candidates}
    for name, content in models.items():
        content["x"] = {axis.key: axis.places[name] for axis in scatter.axes}
    return {"targets": _targets(results), "models": models}


def _candidate(results: Results, candidate: CandidateResults, card: str) -> dict[str, Any]:
    return {
        "facts": _facts(results, row(results, candidate)),
        "commands": _commands(candidate.name),
        "ranks": [candidate.rank(target) for target in results.targets],
        "rows": [candidate.rows(target) for target in results.targets] if results.has_sparse_rows else [],
        "shares": [round(candidate.share(target), 3) for target in results.targets],
        "card": card,
    }


def _facts(results: Results, row: Row) -> list[tuple[str, str]]:
    """Return the content of a row of the table in pairs."""
    difference = f" ({row.of_dense.below} vs. original)" if row.of_dense.below else ""
    speed = f" ({row.speedup.below})" if row.speedup.below else ""
    return [
        (results.metric.title, row.recovered + difference),
        ("before recovery", row.factorized),
        ("size", f"{row.bytes.value}, {row.bytes.below} of the original"),
        ("parameters", f"{row.model.value}, {row.model.below}"),
        ("MACs per token", f"{row.macs.value}, {row.macs.below}"),
        ("speed", row.speedup.value + speed),
    ]


def _commands(name: str) -> list[tuple[str, str]]:
    return [
        ("Reproduce it", f"eckart reproduce {name}"),
        ("Write it as ONNX", f"eckart export {name} {name}.onnx"),
        ("Upload it to the Hugging Face hub", f"eckart publish {name} USER/NAME"),
    ]


def _targets(results: Results) -> dict[str, Any]:
    """Return the table's rows (layers), columns (kinds), and each target's name, shape, row and column."""
    groups, shown = layers(results.targets), kinds(results.targets)
    columns = list(dict.fromkeys(shown[target.name] for target in results.targets))
    cells = [
        [target.name, f"{target.out_features} × {target.in_features}", place, columns.index(shown[target.name])]
        for place, group in enumerate(groups)
        for target in group.targets
    ]
    return {"layers": [group.label for group in groups], "kinds": columns, "cells": cells}
