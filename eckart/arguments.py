"""Check the arguments of `eckart.compress`, before the minutes that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, cast

import torch
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from eckart.calibration.embeddings import is_sentence_transformer
from eckart.model.quantized_or_adapted import MERGE_FIRST, check_base
from eckart.model.targets import has_other_forward
from eckart.ranks.budget import allowance
from eckart.recipe import RENAMED, Recipe, complete, contradictions, recipes

Score = Callable[[PreTrainedModel], float]
"""A function that measures a model; higher is better."""


def check_model(model: Any) -> None:
    """Check that `model` is one that can be copied and calibrated as it is.

    Raises:
        ValueError: it is not; the message says what to give, or what to do.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}{_advice_on(model)}")
    if not getattr(model.config, "return_dict", True):
        raise ValueError("the model's config has return_dict=False, so its outputs have no names: set it to True")
    if replaced := next((name or "the model" for name, part in model.named_modules() if has_other_forward(part)), ""):
        raise ValueError(
            f"the forward of {replaced} was replaced, such as by torch.compile or by a Trainer with bf16=True, so a "
            "copy of the model may run the original, or round: give the model as from_pretrained loads it, or undo "
            "that, such as by accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    if torch.is_inference_mode_enabled() or any(weight.is_inference() for weight in model.parameters()):
        raise ValueError("most recipes need gradients: load the model and call this outside of torch.inference_mode()")
    if any(map(torch.is_autocast_enabled, {"cpu", "cuda", model.device.type} - {"meta"})):
        raise ValueError("torch.autocast() would round the statistics and the factors: call this outside of it")
    check_base(model)


def _advice_on(model: Any) -> str:
    """Return what to give instead of `model`, which is not a model of transformers."""
    if hasattr(model, "merge_and_unload"):
        return f", with adapters: {MERGE_FIRST}"
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    if (name := next((name for name, part in parts if isinstance(part, PreTrainedModel)), None)) is None:
        return ": give a transformers model, as from_pretrained loads it"
    if name == "_orig_mod":  # torch.compile's, which goes on with the original if another model takes this place
        return (
            ": compress the model that it compiles, and compile the result: "
            "small, report = eckart.compress(model._orig_mod, batches); model = torch.compile(small)"
        )
    inner = "model" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))
    loss = ", loss=eckart.embedding_loss(model)" * is_sentence_transformer(model)
    return (
        ": compress the transformers model in it, and put the result in its place: "
        f"small, report = eckart.compress({inner}, batches{loss}); {inner} = small"
    )


def continues_text(model: PreTrainedModel) -> bool:
    """Whether `model` is a causal language model, which may also read images or sounds, or have its own code."""
    names = {kind.__name__ for kind in type(model).__mro__}
    if not names.isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return True
    encodes = model.config.is_encoder_decoder or model.config.get_text_config().is_encoder_decoder
    named = any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)
    return named and model.can_generate() and not encodes


def keeps_of(
    keep: float | Iterable[float] | None, default: float, largest_drop: float | None, score: Score | None
) -> Sequence[float]:
    """Return the keeps to compress to, none for a largest drop, after a check of what says how small the model gets."""
    if (largest_drop is None) != (score is None) or (keep is not None and score is not None):
        raise ValueError("give a keep, or a largest_drop and the score that measures it")
    if score is not None and not callable(score):
        raise ValueError(f"score={score!r} is not a function: give one that takes a model and returns a number")
    if score is not None:
        number("largest_drop", largest_drop)
        return []
    several = isinstance(keep, Iterable) and not isinstance(keep, (str, bytes))
    keeps = list(cast("Iterable[float]", keep)) if several else [default if keep is None else cast("float", keep)]
    if not keeps:
        raise ValueError("keep is empty: give at least one number, such as [0.5, 0.33]")
    numbers = [number("keep", share) for share in keeps]
    for share in numbers:
        allowance([], share)
    return numbers


def number(name: str, value: Any) -> float:
    """Return `value` as a float: counts of parameters would overflow in numpy's float16, and round in its float32."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ValueError(f"{name}={value!r}: give a number that is not negative, such as 0.33")
    return float(value)


def recipe_of(recipe: str | Recipe | Mapping[str, Any]) -> Recipe:
    """Return `recipe`, which may be given by name or as settings, after a check that `compress` can run it."""
    if isinstance(recipe, str):
        if recipe not in (built_in := recipes()):
            raise ValueError(f"there is no recipe {recipe!r}: write one of {', '.join(built_in)}")
        recipe = built_in[recipe]
    try:
        valid = Recipe.model_validate(complete(_plain(vars(recipe) if isinstance(recipe, Recipe) else recipe)))
    except ValidationError as error:
        lines = "".join(f"\n  {'.'.join(map(str, details['loc']))}: {_advice(details)}" for details in error.errors())
        raise ValueError(
            "the recipe has mistakes; to make your own, change a built-in one: "
            f'recipes()["kfac"].model_copy(update={{…}}):{lines}'
        ) from error
    for part, mistake in contradictions(valid):
        raise ValueError(f"recipe: {part} {mistake}")
    if _trains_first(valid):
        closed_form = [name for name, other in recipes().items() if not _trains_first(Recipe.model_validate(other))]
        raise ValueError(
            "the recipe trains on the task before its factors are final, which only the pipeline can do "
            f"(`eckart run`): take one of {', '.join(closed_form)}"
        )
    return valid


def _plain(part: Any) -> Any:
    """Return a recipe or a part of one as plain data, to check it: `model_copy(update=…)` takes anything.

    A part of a class that is not Eckart's stays as it is.
    """
    if isinstance(part, BaseModel) and type(part).__module__.startswith("eckart."):
        return {name: _plain(value) for name, value in vars(part).items()}
    return {name: _plain(value) for name, value in part.items()} if isinstance(part, Mapping) else part


def _advice(details: ErrorDetails) -> str:
    renamed = details["type"] == "extra_forbidden" and RENAMED.get(str(details["loc"][-1]))
    return f"was renamed; write {renamed}" if renamed else details["msg"]


def _trains_first(recipe: Recipe) -> bool:
    return bool(recipe.shaping or recipe.residual or recipe.ranks.trains or recipe.source == "base")


def patterns_of(name: str, given: str | Sequence[str]) -> Sequence[str]:
    """Return shell patterns, of which a single one may be given as it is."""
    patterns = [given] if isinstance(given, str) else [*given] if isinstance(given, Iterable) else [given]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f'{name}={given!r}: give patterns for names of layers, such as ["*.attention.*"]')
    return patterns
