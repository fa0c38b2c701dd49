"""Continuations written by language models, for the page and the cards. The text is unchecked: escape it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from tasks.report.results import CandidateResults, Results

_WIDTH = 100  # characters of a line


def beginnings(results: Results) -> list[str]:
    """Return the beginnings that all models read; none where they are no language models."""
    return [continuation.beginning for continuation in results.dense.continuations]


def written(results: Results, candidates: Iterable[CandidateResults]) -> list[tuple[str, list[str]]]:
    """Return the name and continuations of the original model and of each candidate."""
    models = [("dense", results.dense.continuations)]
    models += [(candidate.name, candidate.evaluation.continuations) for candidate in candidates]
    return [(name, [continuation.text for continuation in continuations]) for name, continuations in models]


def as_code(text: str) -> str:
    """Format `text` as an indented block of Markdown, which nothing in it can end."""
    lines = (part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH) or [""])
    return "\n".join(f"    {line}" for line in lines)
