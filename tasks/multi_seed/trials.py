"""Trials: variants of a study's recipes, run first at one keep and with one seed, so that each recipe runs at its best.

They are recipes of a study of their own. Validation rows choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from eckart.recipe import merge
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import EVALUATIONS
from tasks.artifacts.results_schema import Evaluation
from tasks.config import schema

SUFFIX = "trials"
"""End of the names of their workspace and MLflow experiment."""

Change = dict[str, Any]
"""The differences of a trial from its recipe; empty for the recipe as it is."""


class Trials(schema.Section):
    """The key `trials` of a study's file."""

    keep: schema.Share
    seed: schema.Seed
    recipes: Annotated[dict[str, Annotated[tuple[Change, ...], Field(min_length=1)]], Field(min_length=1)]


@dataclass(frozen=True)
class Trial:
    """A recipe with a change, and its result."""

    recipe: str
    change: Change
    validation: float
    """The metric of the recovered model."""
    chosen: bool


def study(content: Mapping[str, Any], asked: Trials) -> dict[str, Any]:
    """Return the parameters of the study that runs the trials.

    Args:
        content: those of the study that asks for them.
    """
    recipes = {
        name: merge(content["recipes"][recipe], change)
        for recipe in asked.recipes
        for name, change in _named(asked, recipe)
    }
    own = {"recipes": list(recipes), "keeps": [asked.keep], "name": f"{content['study']['name']}-{SUFFIX}"}
    return {
        **content,
        "seed": asked.seed,
        "study": {**content["study"], **own},
        "recipes": {**content["recipes"], **recipes},
        "export": {"recipes": []},
    }


def _named(asked: Trials, recipe: str) -> Iterator[tuple[str, Change]]:
    """Yield each trial of a recipe with its name; one without a change keeps the recipe's name, to share its stages."""
    for number, change in enumerate(asked.recipes[recipe], start=1):
        yield f"{recipe}_trial{number}" if change else recipe, change


def mistakes(content: Mapping[str, Any], asked: Trials) -> Iterator[str]:
    """Yield mistakes in the trials of a study whose parameters, `content`, have none."""
    for recipe, changes in asked.recipes.items():
        if recipe not in content["study"]["recipes"]:
            yield f"trials.recipes.{recipe}: is none of study.recipes; remove it, or add it there"
            continue
        tried = [merge(content["recipes"][recipe], change) for change in changes]
        if any(recipe_tried in tried[:position] for position, recipe_tried in enumerate(tried)):
            yield f"trials.recipes.{recipe}: has a trial twice; remove one"
        for name, change in _named(asked, recipe):
            if change and name in content["recipes"]:
                yield f"trials.recipes.{recipe}: a trial would be named {name}, which is a recipe; rename the recipe"


def in_file(line: str, asked: Trials) -> str:
    """Return a mistake in the parameters of `study` with its place in the study's file."""
    for recipe in asked.recipes:
        for number, (name, change) in enumerate(_named(asked, recipe)):
            if change and line.startswith(f"recipes.{name}."):
                return line.replace(f"recipes.{name}.", f"trials.recipes.{recipe}.{number}.", 1)
    return line


def results(asked: Trials, metric: MetricName, workspace: Path) -> tuple[Trial, ...]:
    """Return the result of each trial, in the order of the study's file; of equal ones the first is chosen.

    Args:
        metric: of the task.
        workspace: in which the study of the trials has finished.
    """
    trials: list[Trial] = []
    for recipe in asked.recipes:
        scores = [_validation(workspace, name, asked.keep) for name, _ in _named(asked, recipe)]
        chosen = scores.index(max(scores, key=METRICS[metric].goodness))
        tried = zip(asked.recipes[recipe], scores, strict=True)
        trials += [Trial(recipe, change, score, chosen=place == chosen) for place, (change, score) in enumerate(tried)]
    return tuple(trials)


def _validation(workspace: Path, recipe: str, keep: float) -> float:
    path = workspace / EVALUATIONS / f"{candidate_name(recipe, str(keep))}.json"
    return Evaluation.model_validate_json(path.read_text()).validation.metric


def best(content: Mapping[str, Any], tried: Sequence[Trial]) -> dict[str, Any]:
    """Return the parameters of a study with the chosen changes of its recipes."""
    return merge(content, {"recipes": {trial.recipe: trial.change for trial in tried if trial.chosen}})
