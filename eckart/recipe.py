"""Recipes: frozen settings of a compression (source, shaping, weighting, rank search, residual, storage, recovery).

Every setting has a default, so a recipe states only the settings that differ from the defaults. For example,
`{"weighting": "inputs"}` is a complete recipe; the bare word stands for `{"kind": "inputs"}`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eckart.factorization.factorize import InOrder
from eckart.factorization.weightings import Plain, Weighting
from eckart.model.targets import Storage
from eckart.published_recipes import PUBLISHED
from eckart.ranks import RankSearch
from eckart.ranks.uniform import Uniform
from eckart.recipe_parts import Contradiction, Method, Source
from eckart.recovery import Recovery
from eckart.recovery.finetune import Finetune
from eckart.residual import Residual
from eckart.shaping import Shaping

PARTS = ("shaping", "weighting", "ranks", "residual", "recovery")
"""Names of the parts of a recipe that have a `kind`."""

RENAMED = {"rows": "examples"}
"""Setting of an earlier version → its name now."""


class Recipe(BaseModel):
    """Settings of a compression: which errors matter, how ranks are chosen, and how the model recovers.

    Raises:
        pydantic.ValidationError: a part is unknown or out of its range. This is a ValueError; it names all mistakes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Source = Field(
        "teacher",
        description="model to compress. teacher: the original model; base: the base model, which also learns the task",
    )
    shaping: Shaping | None = Field(
        None, description="training that prunes the weights before the factorization; null: none"
    )
    weighting: Weighting = Field(Plain(), description="error that the factorization minimizes")
    ranks: RankSearch = Field(Uniform(), description="how the rank of each target is chosen within the budget")
    residual: Residual | None = Field(None, description="what is stored in addition to the factors; null: nothing")
    storage: Storage = Field(
        "factors", description="form of a target of rank r. factors: r (out + in) parameters; pivoted: r (out + in − r)"
    )
    sequential: InOrder | None = Field(
        None,
        description="factorize layer by layer, each on its inputs in the model compressed so far; null: all at once, "
        "on the inputs in the original model",
    )
    recovery: Recovery = Field(Finetune(), description="fine-tuning after the factorization")

    @property
    def methods(self) -> list[Method]:
        """The recipe's methods: all parts but source, storage and sequential, without those that are None."""
        return [part for name in PARTS if (part := getattr(self, name)) is not None]


def recipes(own: Mapping[str, Any] | None = None, recovery: Mapping[str, Any] | str | None = None) -> dict[str, Any]:
    """Return the built-in recipes and those of `own` as plain dicts, with all defaults filled in.

    Args:
        own: name → settings that differ from the built-in recipe with this name, or from the defaults if there is none.
        recovery: recovery settings for all recipes; a recipe's own settings override them. A recipe with another kind
            of recovery takes only those of these settings that its kind also has.

    Returns:
        Name → recipe. The recipes are not validated: mistakes in `own` or `recovery` stay in the result.
    """
    own, common = own or {}, _expanded("recovery", recovery or {})
    names = dict.fromkeys([*PUBLISHED, *own])
    return {
        name: _complete(PUBLISHED[name].parts if name in PUBLISHED else {}, own.get(name, {}), common) for name in names
    }


def complete(parts: Mapping[str, Any]) -> Any:
    """Return the recipe `parts` with all defaults filled in. It is not validated: mistakes stay in the result."""
    return _complete({}, parts, {})


def trains_dense(recipe: Mapping[str, Any]) -> bool:
    """Whether the recovery of a complete recipe can also train a dense model, as a control of the factorized one."""
    return any(method.for_dense for method in _members(Recovery) if recipe["recovery"]["kind"] in _kinds(method))


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `old`, updated with `new`: mappings merge key by key, any other value replaces the old one.

    A mapping with another `kind` replaces the old mapping as a whole, because keys of one kind mean nothing to another.
    If one value is a bare word and the other a mapping, the word stands for `{"kind": word}`.
    """
    result = dict(copy.deepcopy(old))
    for key, value in new.items():
        before = result.get(key)
        if isinstance(value, str) and isinstance(before, dict) and "kind" in before:
            value = {"kind": value}
        if isinstance(before, str) and isinstance(value, dict) and key in PARTS:
            before = {"kind": before}
        if isinstance(value, dict) and isinstance(before, dict) and value.get("kind") in (None, before.get("kind")):
            result[key] = merge(before, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _complete(built_in: Mapping[str, Any], own: Any, recovery: Mapping[str, Any]) -> Any:
    if not isinstance(own, Mapping):
        return own
    stated = merge(_expanded("", built_in), _expanded("", own))
    own_recovery = stated.pop("recovery", {})
    recipe = merge(Recipe().model_dump(mode="json"), stated) | {"recovery": _with_common(own_recovery, recovery)}
    try:
        return Recipe.model_validate_json(json.dumps(recipe, default=repr), strict=True).model_dump(mode="json")
    except ValidationError:
        return recipe


def _with_common(stated: Any, common: Mapping[str, Any]) -> Any:
    """Return the recovery settings `stated` in a recipe, plus those of the `common` settings that its kind has."""
    if not isinstance(stated, Mapping):
        return stated
    kind = stated.get("kind", common.get("kind", "finetune"))
    fields = {name for method in _members(Recovery) if kind in _kinds(method) for name in method.model_fields}
    return merge({**{name: value for name, value in common.items() if name in fields}, "kind": kind}, stated)


def _expanded(name: str, value: Any) -> Any:
    """Return the recipe or setting `value` called `name`; a bare word given for a part becomes `{"kind": word}`."""
    if isinstance(value, str) and name in PARTS:
        return {"kind": value}
    return {key: _expanded(key, part) for key, part in value.items()} if isinstance(value, Mapping) else value


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Yield each contradiction between parts of `recipe`, with the path of a part and what to write there instead."""
    for method in recipe.methods:
        yield from method.contradictions(recipe)
    yield from _rate_contradictions(recipe)
    if recipe.source == "base":
        for part in (recipe.weighting, recipe.ranks):
            if part.statistics:
                yield "source", f"is base, but {part.kind} reads statistics of the teacher; write teacher"
        if recipe.ranks.asks_frozen and recipe.shaping is None:
            yield (
                "source",
                f"is base, but {recipe.ranks.kind} reads the loss of a model that has learned the task; write teacher, "
                "or add a shaping",
            )
    if recipe.sequential is not None:
        yield from _order_contradictions(recipe)


def _rate_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    for part in PARTS:
        method: Method | None = getattr(recipe, part)
        for place, training in method.trainings.items() if method else ():
            if training.schedule == "constant" and training.last_rate:
                path = ".".join(filter(None, (part, place, "last_rate")))
                yield path, "has no effect, because the schedule is constant; write 0.0, or linear or cosine there"


def _order_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    if "inputs" not in recipe.weighting.statistics:
        weightings = [method.model_construct(kind=kind) for method in _members(Weighting) for kind in _kinds(method)]
        fitting = [weighting.kind for weighting in weightings if "inputs" in weighting.statistics]
        yield (
            "sequential",
            f"needs a weighting by inputs, which {recipe.weighting.kind} is not; write null, or take one of "
            f"the weightings {', '.join(fitting)}",
        )
    if recipe.ranks.leaves_low_rank:
        yield "sequential", f"has no effect, because {recipe.ranks.kind} already leaves low-rank weights; write null"
    if recipe.sequential and recipe.sequential.sums and not recipe.sequential.anchor:
        yield "sequential.sums", "has no effect, because sequential.anchor is 0; write a larger anchor, or sums: false"
    if recipe.residual is not None:
        yield "sequential", "has no effect, because factors and residual add up to the weight; write null"


def captions() -> dict[str, str]:
    """Return the captions that the report shows for the training measures of all methods: name of measure → caption."""
    families = (Shaping, RankSearch, Residual, Recovery)
    return {name: text for family in families for method in _members(family) for name, text in method.captions.items()}


def _members(family: Any) -> tuple[type[Method], ...]:
    """Return the method classes of `family`, which is a union of them or, if there is only one, the class itself."""
    union, *_ = get_args(family) or (family,)
    return get_args(union) or (union,)


def _kinds(method: type[Method]) -> tuple[str, ...]:
    """Return the values of `kind` that select a method in params.yaml."""
    return get_args(method.model_fields["kind"].annotation)
