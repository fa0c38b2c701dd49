"""What language models write, for the page and the cards. It is text that nobody has checked: whoever shows it, escapes
it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from tasks.report.results import CandidateResults, Results

_WIDTH = 100  # characters of a line


def beginnings(results: Results) -> list[str]:
    """What all models read; empty where none is a language model."""
    return [one.beginning for one in results.dense.continuations]


def written(results: Results, candidates: Iterable[CandidateResults]) -> list[tuple[str, list[str]]]:
    """Of the dense model and each of `candidates` the name, and what it wrote behind each beginning."""
    models = [("dense", results.dense.continuations)]
    models += [(one.name, one.evaluation.continuations) for one in candidates]
    return [(name, [each.text for each in texts]) for name, texts in models]


def as_code(text: str) -> str:
    """`text` as an indented block of Markdown: nothing in it can end that, so all of it is shown as it is."""
    lines = (part for line in text.splitlines() for part in textwrap.wrap(line, _WIDTH) or [""])
    return "\n".join(f"    {line}" for line in lines)
