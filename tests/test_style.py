"""House style that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.workspace import REPOSITORY

VAGUE = ("Of ", "What ", "Who ", "Whose ", "How ")
"""Beginnings of docstrings that do not say what a thing is or does."""
OLD_WORDS = re.compile(
    r"(?<!importance\.)\bevidence\b|\blinear maps?\b|\bcannot tell\b|\breports/rows\b", re.IGNORECASE
)
"""Words of earlier versions: calibration statistics, linear layer, not significantly different, reports/predictions."""


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of all docstrings, those of attributes included."""
    for path in sorted((REPOSITORY / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", node.value.value


@pytest.mark.parametrize("package", ["eckart", "tasks", "flows"])
def test_docstrings_begin_with_what_a_thing_is_or_does(package: str) -> None:
    vague = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings(package) if text.startswith(VAGUE)]
    assert vague == []


@pytest.mark.parametrize("folder", ["eckart", "tasks", "flows", "benchmarks", "examples", "deploy", "docs", "studies"])
def test_each_thing_has_one_name(folder: str) -> None:
    files = [file for file in sorted((REPOSITORY / folder).rglob("*")) if file.suffix in {".py", ".j2", ".md", ".yaml"}]
    assert files
    old = [
        f"{file.relative_to(REPOSITORY)}:{number}: {found.group()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if (found := OLD_WORDS.search(line))
    ]
    assert old == []
