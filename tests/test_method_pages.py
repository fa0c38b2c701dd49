"""The recipes that the pages on the methods show are what params.yaml accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ruamel.yaml import YAML

from eckart.recipe import merge
from tasks.config import validation
from tests.workspace import REPOSITORY

PAGES = REPOSITORY / "docs/explanation/methods"
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def read(text: str) -> dict[str, Any]:
    return YAML(typ="safe").load(text)


def blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a page and the content of a YAML block on it, for all pages and blocks."""
    for page in sorted(PAGES.glob("*.md")):
        for block in YAML_BLOCK.findall(page.read_text()):
            yield page.stem, read(block)


def in_params(block: dict[str, Any]) -> dict[str, Any]:
    """Return the params.yaml of the repository with `block` in it; its recipes are those of the study."""
    params = read((REPOSITORY / "params.yaml").read_text())
    names = list(block.get("recipes", {})) or params["study"]["recipes"]
    own = {"study": {"recipes": names, "control": "svd"}, "export": {"recipes": []}}
    return merge(merge(params, own), block)


@pytest.mark.parametrize(("page", "block"), blocks())
def test_recipes_on_a_page_are_valid(page: str, block: dict[str, Any]) -> None:
    assert validation.mistakes(in_params(block)) == []


def test_every_method_page_shows_a_recipe_and_is_linked_from_the_index() -> None:
    names = {path.stem for path in PAGES.glob("*.md")} - {"index"}
    shown = {page for page, _ in blocks()}
    linked = set(re.findall(r"\]\((\w+)\.md", (PAGES / "index.md").read_text()))
    assert (names - shown, names - linked) == (set(), set())
