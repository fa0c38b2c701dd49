"""Compress a transformer in one call::

    small, report = eckart.compress(model, batches, keep=0.33, recipe="anchored")
    print(report)
    small.save_pretrained("small")

or say how much accuracy may be lost, instead of a size::

    small, report = eckart.compress(model, batches, largest_drop=0.01, score=accuracy)

The pipeline's stages importance, search and factorize call the same functions with the same recipes. To recover lost
accuracy, train `small` like any other model, for example with `transformers.Trainer`: the factors are parameters.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eckart.calibration.batches import prepare_batches
from eckart.calibration.calibrate import calibrate
from eckart.calibration.head_loss import objective_of
from eckart.calibration.losses import Batch, Loss, Objective, batch_size, first_examples, predictions_of, row_of
from eckart.calibration.statistics import StatisticKind, passes
from eckart.factorization.factorize import factorize_model
from eckart.factorization.pivoted_storage import pivot
from eckart.model import hf_format, lstm
from eckart.model.census import Census
from eckart.model.macs import macs
from eckart.model.module_context import eval_mode
from eckart.model.targets import Targets, find_targets
from eckart.ranks.budget import NoRank, Rank, cost, largest_rank
from eckart.ranks.search import ChosenRanks, search_ranks
from eckart.ranks.search_problem import SearchProblem
from eckart.recipe import RENAMED, Recipe, complete, contradictions
from eckart.recipe import recipes as complete_recipes

Score = Callable[[PreTrainedModel], float]
"""A function that measures a model; higher is better."""
_PRECISION = 0.01  # the search for a keep ends when its interval is this narrow
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
"""Options of `load` that apply to the config as well as to the weights."""


@dataclass(frozen=True)
class CompressedTarget:
    """Size, rank and predicted loss of one target layer after compression.

    Attributes:
        shape: shape `(out, in)` of the layer's dense weight.
        rank: rank of the factors; None if the layer stays dense.
        parameters: (before, after), without biases.
        predicted_loss: ½ Σ S_k² over the weighted singular values S_k that were cut. With weighting kfac, this predicts
            how much the loss of an example increases. None if the rank search predicts no loss.
        no_rank: whether the layer stays dense at any keep, because no rank makes it smaller.
    """

    shape: tuple[int, int]
    rank: Rank
    parameters: tuple[int, int]
    predicted_loss: float | None
    no_rank: bool


@dataclass(frozen=True)
class Report:
    """Report of a compression, for each layer and for the whole model; print it for a summary.

    Attributes:
        targets: name of a target layer → its result, in order of execution.
        excluded: name of each other linear layer or weight matrix → why it is no target.
        census: the original model's numbers of parameters, by kind.
        parameters: the whole model's number of parameters, (before, after).
        macs: mean multiply-accumulates for an example of the first batch, (before, after).
        scores: the model's score, (before, after); None unless `largest_drop` was given.
    """

    targets: Mapping[str, CompressedTarget]
    excluded: Mapping[str, str]
    census: Census
    parameters: tuple[int, int]
    macs: tuple[int, int]
    scores: tuple[float, float] | None

    @property
    def keep(self) -> float:
        """Share of the target layers' parameters that is kept."""
        before, after = (sum(target.parameters[place] for target in self.targets.values()) for place in (0, 1))
        return after / before

    @property
    def predicted_loss(self) -> float | None:
        """Sum of the predicted losses of all target layers; None if any layer has no predicted loss."""
        losses = [target.predicted_loss for target in self.targets.values()]
        return None if None in losses else sum(cast("list[float]", losses))

    def __str__(self) -> str:
        dense = [target for target in self.targets.values() if target.rank is None]
        unshrinkable = sum(target.no_rank for target in dense)
        lines = [
            f"{len(self.targets)} targets keep {self.keep:.1%} of their parameters; {len(dense)} of them stay dense"
            + (f", {unshrinkable} because no rank makes them smaller" if unshrinkable else ""),
            f"model: {self.parameters[0]:,} → {self.parameters[1]:,} parameters, "
            f"{self.macs[0]:,} → {self.macs[1]:,} multiply-accumulates an example",
            "of these before: " + ", ".join(f"{count:,} in {name}" for name, count in self.census.rows),
        ]
        if self.census.warning:
            lines.append(self.census.warning)
        if self.predicted_loss is not None:
            lines.append(f"predicted loss, the weighted error that is left: {self.predicted_loss:.4g}")
        if self.scores is not None:
            lines.append("score: {:.4g} → {:.4g}".format(*self.scores))
        return "\n".join(lines)


class Compressed(NamedTuple):
    """Result of `compress`.

    Attributes:
        model: an ordinary transformers model with low-rank factors in the target layers.
        report: sizes, ranks and predicted losses, by layer and in all.
    """

    model: PreTrainedModel
    report: Report


def recipes() -> dict[str, Recipe]:
    """Return the built-in recipes by name; the pipeline has the same ones.

    To make your own recipe, change parts of one: `recipes()["drone"].model_copy(update={"storage": "pivoted"})`.
    """
    return {name: Recipe.model_validate(parts) for name, parts in complete_recipes().items()}


def compress(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    keep: float | None = None,
    recipe: str | Recipe | Mapping[str, Any] = "anchored",
    *,
    largest_drop: float | None = None,
    score: Score | None = None,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
    embeddings: bool = False,
    tied: bool = False,
    loss: Loss | None = None,
    seed: int = 0,
    check: bool = True,
) -> Compressed:
    """Return a smaller copy of `model` with low-rank factors in place of linear layers.

    Example::

        model = AutoModelForSequenceClassification.from_pretrained("my-classifier")
        batches = [tokenizer(texts, padding=True, return_tensors="pt") | {"labels": labels} for texts, labels in data]
        small, report = eckart.compress(model, batches, keep=0.33)
        small.save_pretrained("small")  # load it again with from_pretrained, after `import eckart`

    `model` itself is not changed. In memory at once are the calibration batches, their statistics (up to in² + out²
    numbers for each layer) and the model twice, or three times with `largest_drop`. For larger models use the pipeline.

    Args:
        model: a transformers model with the head for its task, on the device that should do the work.
        batches: calibration data, a few hundred examples: model inputs, each tensor `(batch, …)`. Include labels (-100
            at padding), except for recipes such as `svd` and `drone` that need none. For T5 or BART, missing decoder
            inputs are made from the labels.
        keep: share of the target layers' parameters to keep, in (0, 1]; 0.33 by default.
        recipe: how to compress: a name from `recipes()`, or your own recipe. Its recovery fine-tuning is not run.
        largest_drop: give this instead of `keep` to find the smallest keep, to a hundredth, at which `score` falls by
            no more than this number. The search is a bisection, so it assumes that a smaller keep lowers the score.
        score: function that measures a model (in eval mode) on held-out data, not the test data; higher is better.
        include, exclude: shell patterns for the names of the linear layers to compress, such as `*.attention.*`.
        embeddings: whether to compress embeddings, too.
        tied: whether to compress an embedding that shares its weight with the head, together with that head.
        loss: function of the model and a batch that returns the sum of the examples' losses. By default the model's own
            loss is used, after a check of how this loss combines examples.
        seed: seed of rank searches that draw random numbers.
        check: whether to save the result to a temporary folder, load it again, and compare the outputs.

    Returns:
        The compressed model and a report; they unpack as a pair.

    Raises:
        ValueError: the recipe is unknown or trains before it factorizes; batches or needed labels are missing; nothing
            can be compressed, or not to this `keep`; `largest_drop` cannot be met; the loss is not usable, or has no
            gradient; the model is quantized, has adapters, or does not survive saving. The message says what to do.
    """
    _check_model(model)
    _check_goal(keep, largest_drop, score)
    valid_recipe = _recipe(recipe)
    data = prepare_batches(model, batches)
    few = first_examples(data[0], 2)  # enough to tell tokens from examples that a router sends to a layer
    targets = find_targets(model, few, _patterns(include), _patterns(exclude), embeddings=embeddings, tied=tied)
    problem = _calibrate(model, data, targets, valid_recipe, loss, seed)
    macs_before = macs(model, data[0]) // batch_size(data[0])

    def compress_to(keep: float) -> Compressed:
        small = copy.deepcopy(model)
        chosen = _compress_in_place(replace(problem, model=small, keep=keep), valid_recipe, data)
        report = Report(
            targets=_compressed_targets(chosen),
            excluded=targets.excluded,
            census=targets.census,
            parameters=(model.num_parameters(), small.num_parameters()),
            macs=(macs_before, macs(small, data[0]) // batch_size(data[0])),
            scores=None,
        )
        return Compressed(small, report)

    if largest_drop is None or score is None:
        compressed = compress_to(0.33 if keep is None else keep)
    else:
        compressed = _smallest(compress_to, model, largest_drop, score)
    if check:
        hf_format.check_saved(compressed.model, row_of(data[0], 0))
    return compressed


def save(model: PreTrainedModel, folder: Path | str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write `model`, compressed or not, and its tokenizer to `folder`, from which `load` and `from_pretrained` read."""
    hf_format.save(model, Path(folder))
    if tokenizer:
        tokenizer.save_pretrained(folder)


def load(folder: Path | str, **options: Any) -> PreTrainedModel:
    """Load a model, compressed or not, with the class that its config names.

    Weights are read from safetensors files only, and no remote code is run.

    Args:
        folder: a Hugging Face folder, or an id on the hub.
        options: more arguments of `from_pretrained`.

    Raises:
        ValueError: the config names no class of transformers.
        OSError: there is no such folder or id, or no safetensors in it.
    """
    hub_options = {name: options[name] for name in _HUB_OPTIONS if name in options}
    config = transformers.AutoConfig.from_pretrained(folder, **hub_options, trust_remote_code=False)
    name = (config.architectures or ["no class"])[0]
    family = getattr(transformers, name, None) or getattr(lstm, name, None)
    if family is None:
        raise ValueError(f"{folder} was saved as {name}, which transformers does not have: load it with its own class")
    options |= {"use_safetensors": True, "trust_remote_code": False}
    model: PreTrainedModel = family.from_pretrained(folder, config=config, **options)
    return model


def _calibrate(
    model: PreTrainedModel, batches: Sequence[Batch], targets: Targets, recipe: Recipe, loss: Loss | None, seed: int
) -> SearchProblem:
    """Gather statistics, warn about misleading calibration data, and return the rank search's input, with keep 1."""
    kinds = cast("set[StatisticKind]", {*recipe.weighting.statistics, *recipe.ranks.statistics})
    objective = _objective(model, batches, recipe, kinds, loss)
    messages = [targets.census.warning]
    groups = passes(targets.targets, None) if kinds else []
    passed = calibrate(model, lambda: batches, groups, kinds, objective.loss, checked=batches, warn=messages.append)
    statistics = next(passed, {})
    for message in filter(None, messages):
        warnings.warn(message, stacklevel=3)  # names the line that called `compress`
    return SearchProblem(
        model=model,
        targets=targets.targets,
        keep=1.0,
        seed=seed,
        objective=objective,
        weighting=recipe.weighting,
        statistics=statistics,
        train=_refuse_training,
        calibration=lambda count: list(
            islice((row_of(batch, row) for batch in batches for row in range(batch_size(batch))), count)
        ),
    )


def _compress_in_place(problem: SearchProblem, recipe: Recipe, batches: Sequence[Batch]) -> ChosenRanks:
    model, statistics = problem.model, problem.statistics
    chosen = search_ranks(problem, recipe.ranks, storage=recipe.storage)
    factorize_model(
        model, chosen.targets, chosen.ranks, recipe.weighting, statistics, in_order=recipe.sequential, batches=batches
    )
    if recipe.storage == "pivoted":
        pivot(model)
    hf_format.describe(model)
    return chosen


def _smallest(
    compress_to: Callable[[float], Compressed], dense: PreTrainedModel, largest_drop: float, score: Score
) -> Compressed:
    """Find by bisection the smallest keep at which the score is at most `largest_drop` below the score of `dense`."""
    before = _scored(score, dense)
    low, high, best = 0.0, 1.0, None
    while best is None or high - low > _PRECISION:
        keep, candidate = (low + high) / 2 if best else high, None  # free the last candidate before the next is made
        try:
            candidate = compress_to(keep)
        except NoRank:
            low = keep
            continue
        after = _scored(score, candidate.model)
        if after >= before - largest_drop:
            high, best = keep, Compressed(candidate.model, replace(candidate.report, scores=(before, after)))
        elif best is None:
            raise ValueError(
                f"the score falls by {before - after:.4g}, more than {largest_drop}, even if all parameters are kept: "
                "raise largest_drop, or score on more examples"
            )
        else:
            low = keep
    return best


def _scored(score: Score, model: PreTrainedModel) -> float:
    with eval_mode(model):
        given = score(model)
    number = float("nan") if given is None else float(given)
    if not math.isfinite(number):
        raise ValueError(f"score returned {given!r}: it must return a number for every model")
    return number


def _compressed_targets(chosen: ChosenRanks) -> dict[str, CompressedTarget]:
    return {
        target.name: CompressedTarget(
            shape=(target.out_features, target.in_features),
            rank=chosen.ranks[target.name],
            parameters=(target.parameters, cost(target, chosen.ranks[target.name])),
            predicted_loss=None if chosen.predicted_loss is None else chosen.predicted_loss[target.name],
            no_rank=not largest_rank(target),
        )
        for target in chosen.targets
    }


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}: give a transformers model, as from_pretrained loads it"
            + (", with adapters merged by merge_and_unload()" if hasattr(model, "merge_and_unload") else "")
        )
    if not getattr(model.config, "return_dict", True):
        raise ValueError("the model's config has return_dict=False, so its outputs have no names: set it to True")
    hf_format.check_base(model)


def _check_goal(keep: float | None, largest_drop: float | None, score: Score | None) -> None:
    if (largest_drop is None) != (score is None) or (keep is not None and score is not None):
        raise ValueError("give a keep, or a largest_drop and the score that measures it")
    if score is not None and not callable(score):
        raise ValueError(f"score={score!r} is no function: give one that takes a model and returns a number")
    for name, number in (("keep", keep), ("largest_drop", largest_drop)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0):
            raise ValueError(f"{name}={number!r}: give a number that is not negative, such as 0.33")


def _recipe(recipe: str | Recipe | Mapping[str, Any]) -> Recipe:
    """Return `recipe`, which may be given by name or as settings, after a check that `compress` can run it."""
    if isinstance(recipe, str):
        built_in = recipes()
        if recipe not in built_in:
            raise ValueError(f"there is no recipe {recipe!r}: write one of {', '.join(built_in)}")
        recipe = built_in[recipe]
    try:
        valid = recipe if isinstance(recipe, Recipe) else Recipe.model_validate(complete(recipe))
    except ValidationError as error:
        lines = "".join(f"\n  {'.'.join(map(str, details['loc']))}: {_advice(details)}" for details in error.errors())
        raise ValueError(
            "the recipe has mistakes; to make your own, change a built-in one: "
            f'recipes()["kfac"].model_copy(update={{…}}):{lines}'
        ) from error
    for part, mistake in contradictions(valid):
        raise ValueError(f"recipe: {part} {mistake}")
    if _trains_first(valid):
        closed_form = [name for name, other in recipes().items() if not _trains_first(other)]
        raise ValueError(
            "the recipe trains on the task before its factors are final, which only the pipeline can do "
            f"(`eckart run`): take one of {', '.join(closed_form)}"
        )
    return valid


def _advice(details: ErrorDetails) -> str:
    renamed = details["type"] == "extra_forbidden" and RENAMED.get(str(details["loc"][-1]))
    return f"was renamed; write {renamed}" if renamed else details["msg"]


def _trains_first(recipe: Recipe) -> bool:
    return bool(recipe.shaping or recipe.residual or recipe.ranks.trains or recipe.source == "base")


def _patterns(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _objective(
    model: PreTrainedModel, batches: Sequence[Batch], recipe: Recipe, kinds: set[StatisticKind], loss: Loss | None
) -> Objective:
    """Return the objective with `loss` if given, else with the model's own loss if the recipe needs a loss.

    Otherwise its loss only runs the model and is always 0.
    """
    if loss is None and kinds - {"inputs"}:
        return objective_of(model, batches, f"weighting {recipe.weighting.kind}")
    if loss is None and recipe.ranks.asks_frozen:
        return objective_of(model, batches, f"ranks {recipe.ranks.kind}")
    used = loss or _run_without_loss
    problem = model.config.problem_type
    return Objective(used, used, used, predictions_of(problem), problem != "regression")


def _run_without_loss(model: Any, batch: Batch) -> Tensor:
    model(**batch)
    return torch.zeros(())


def _refuse_training(*_: Any, **__: Any) -> None:
    raise AssertionError("a recipe that trains was refused")
