"""The pages on the methods: params.yaml accepts their recipes, and their numbers are those of the studies they link."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from ruamel.yaml import YAML

from benchmarks import result_files
from eckart.recipe import merge
from tasks.artifacts.metrics import METRICS
from tasks.config import validation
from tasks.report.rounding import rounded
from tests.workspace import REPOSITORY

PAGES = REPOSITORY / "docs/explanation/methods"
NAMES = sorted(path.stem for path in PAGES.glob("*.md"))
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


SIGNED = r"[+-]\d+(?:\.\d+)?|0\.0"
WITH_INTERVAL = re.compile(rf"({SIGNED})(?: points)? \(({SIGNED}) to ({SIGNED})\)")
WITH_SPREAD = re.compile(r"([+-]?\d+\.\d) ± (\d+\.\d)")


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", (PAGES / f"{page}.md").read_text().replace("−", "-"))


def linked_studies(text: str) -> list[str]:
    return sorted(
        name
        for name in {*re.findall(r"results/([\w-]+)\.md", text)}
        if (result_files.RESULTS / f"{name}.pairs.csv").exists()
    )


@cache
def differences(study: str) -> frozenset[tuple[float, ...]]:
    """Return the difference, low and high end, and spread of each pair in both directions, × 100 if it is bounded."""
    factor = 100 if METRICS[result_files.read(study).metric.iloc[0]].bounded else 1
    table = result_files.read(f"{study}.pairs")
    spread = table.spread if "spread" in table else 0 * table.difference
    there = zip(table.difference, table.low, table.high, spread, strict=True)
    pairs = [tuple(factor * value for value in values) for values in there]
    return frozenset(pairs + [(-mean, -high, -low, sd) for mean, low, high, sd in pairs])


@cache
def means(study: str) -> frozenset[str]:
    """Return the mean ± spread of all models and of all differences, as tables have them."""
    table = result_files.read(study)
    factor = 100 if METRICS[table.metric.iloc[0]].bounded else 1
    found = {f"{rounded(mean, sign=sign)} ± {rounded(sd)}" for mean, _, _, sd in differences(study) for sign in (0, 1)}
    for _, own in table.groupby(["task", "recipe", "keep"]):
        for column in ("dense", "control", "factorized", "recovered"):
            found.add(result_files.mean_and_spread(own[column], factor))
    return frozenset(found)


@pytest.mark.parametrize("page", NAMES)
def test_differences_with_an_interval_are_those_of_a_study_that_the_page_links(page: str) -> None:
    text = text_of(page)
    known = {values[:3] for study in linked_studies(text) for values in differences(study)}
    for numbers in WITH_INTERVAL.findall(text):
        decimals = 1 if any("." in number for number in numbers) else 0
        printed = {tuple(rounded(value, decimals, sign=True) for value in values) for values in known}
        assert numbers in printed, f"no study that {page}.md links has {numbers}"


@pytest.mark.parametrize("page", NAMES)
def test_means_with_a_spread_are_those_of_a_study_that_the_page_links(page: str) -> None:
    text = text_of(page)
    known = {number for study in linked_studies(text) for number in means(study)}
    assert {" ± ".join(numbers) for numbers in WITH_SPREAD.findall(text)} <= known
