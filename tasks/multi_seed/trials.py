"""Trials: a small hyperparameter search before a study, so that each recipe is compared at its best.

A trial is a variant of a recipe. All trials run first, in a study of their own with one keep and one seed. Then each
recipe is replaced by its trial with the best metric on validation examples.
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
from tasks.config import schema, validation

SUFFIX = "trials"
"""Suffix of the names of the workspace and MLflow experiment of trials."""

Change = dict[str, Any]
"""The changes that a trial makes to its recipe; {} to run the recipe unchanged."""


class Trials(schema.Section):
    """Settings of trials: the key `trials` of a study's file.

    recipes: recipe → the changes to try.
    """

    keep: schema.Share
    seed: schema.Seed
    recipes: Annotated[dict[str, Annotated[tuple[Change, ...], Field(min_length=1)]], Field(min_length=1)]


@dataclass(frozen=True)
class Trial:
    """Result of a trial: a recipe run with a change."""

    recipe: str
    change: Change
    validation: float
    """The metric of the recovered model on validation examples."""
    chosen: bool


def study(content: Mapping[str, Any], asked: Trials) -> dict[str, Any]:
    """Return the parameters of a study that runs the trials. `content`: parameters of the study after the trials."""
    recipes = {
        name: merge(content["recipes"][recipe], change)
        for recipe in asked.recipes
        for name, change in _named(asked, recipe)
    }
    own = {
        "recipes": list(recipes),
        "keeps": [asked.keep],
        "name": f"{content['study']['name']}-{SUFFIX}",
        "figures": {},
    }
    return {
        **content,
        "seed": asked.seed,
        "study": {**content["study"], **own},
        "recipes": {**content["recipes"], **recipes},
        "export": {"recipes": []},
    }


def _named(asked: Trials, recipe: str) -> Iterator[tuple[str, Change]]:
    """Yield (name, change) of each trial of a recipe. A trial without a change has the recipe's name and stages."""
    for number, change in enumerate(asked.recipes[recipe], start=1):
        yield f"{recipe}_trial{number}" if change else recipe, change


def mistakes(content: Mapping[str, Any], asked: Trials) -> Iterator[str]:
    """Yield a message for each mistake in the trials, with its place in the study's file.

    `content` has all parameters of the study, including defaults.
    """
    unused = [recipe for recipe in asked.recipes if recipe not in content["study"]["recipes"]]
    if unused:
        yield from (
            f"trials.recipes.{recipe}: is none of study.recipes; remove it, or add it there" for recipe in unused
        )
        return
    for line in validation.mistakes(study(content, asked)):
        for recipe in asked.recipes:
            for number, (name, change) in enumerate(_named(asked, recipe)):
                if change and line.startswith(f"recipes.{name}."):
                    line = line.replace(f"recipes.{name}.", f"trials.recipes.{recipe}.{number}.", 1)
        yield line


def results(asked: Trials, metric: MetricName, workspace: Path) -> tuple[Trial, ...]:
    """Return the results of all trials, in the order of the study's file, with the best trial of each recipe chosen.

    In a tie, the first trial is chosen. `workspace` is the folder of the finished study that ran the trials.
    """
    trials: list[Trial] = []
    for recipe, changes in asked.recipes.items():
        files = [EVALUATIONS / f"{candidate_name(name, str(asked.keep))}.json" for name, _ in _named(asked, recipe)]
        scores = [Evaluation.model_validate_json((workspace / file).read_text()).validation.metric for file in files]
        chosen = scores.index(max(scores, key=METRICS[metric].goodness))
        tried = zip(changes, scores, strict=True)
        trials += [Trial(recipe, change, score, chosen=place == chosen) for place, (change, score) in enumerate(tried)]
    return tuple(trials)


def best(content: Mapping[str, Any], tried: Sequence[Trial]) -> dict[str, Any]:
    """Return the parameters of a study, with the change of the chosen trial applied to each recipe."""
    return merge(content, {"recipes": {trial.recipe: trial.change for trial in tried if trial.chosen}})
