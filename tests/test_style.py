"""House style that a program can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.workspace import REPOSITORY

VAGUE = ("Of ", "What ", "Who ", "Whose ", "How ")
"""Beginnings of docstrings that do not say what a thing is or does."""


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
