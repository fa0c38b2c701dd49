"""Compress a transformer in one call::

    small, report = eckart.compress(model, batches, keep=0.33, recipe="anchored")
    print(report)
    small.save_pretrained("small")

or say how much accuracy may be lost, instead of a size::

    small, report = eckart.compress(model, batches, largest_drop=0.01, score=accuracy)

or compress to several sizes with one pass over the calibration data::

    for small, report in eckart.compress(model, batches, keep=[0.5, 0.33]):
        print(report, accuracy(small))

The pipeline's stages importance, search and factorize call the same functions with the same recipes. To recover lost
accuracy, train `small` like any other model, for example with `transformers.Trainer`: the factors are parameters.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eckart.arguments import Score, check_model, continues_text, keeps_of, number, patterns_of, recipe_of
from eckart.calibration.batch_preparation import prepare_batches
from eckart.calibration.calibrate import calibrate
from eckart.calibration.embeddings import embedding_loss as embedding_loss
from eckart.calibration.head_loss import check_loss, mean_warning, objective_of
from eckart.calibration.losses import DrawnLoss, Loss, Objective, objective_with
from eckart.calibration.passes import passes
from eckart.calibration.robust_gradients import RobustGradients
from eckart.calibration.routed_tokens import without_unreached
from eckart.calibration.statistics import OF_GRADIENTS, StatisticKind
from eckart.calibration.warnings import unreached_warning
from eckart.factorization.factorize import factorize_model
from eckart.factorization.pivoted_storage import pivot
from eckart.factorization.refinement import RefinedBlock
from eckart.model import hf_format, lstm, mamba
from eckart.model.batches import Batch, batch_size, examples_of, first_examples, row_of
from eckart.model.experts import unfused
from eckart.model.layers import keep_values
from eckart.model.macs import macs
from eckart.model.module_context import eval_mode
from eckart.model.round_trip import check_saved
from eckart.model.targets import Targets, find_targets, unmatched_warning
from eckart.progress import Item, Progress, bar
from eckart.ranks.budget import NoRank, ranked_allowance, stored
from eckart.ranks.search import ChosenRanks, search_ranks
from eckart.ranks.search_problem import ByFormula, SearchProblem
from eckart.recipe import Recipe
from eckart.recipe import recipes as complete_recipes
from eckart.report import CompressedTarget as CompressedTarget
from eckart.report import Report as Report
from eckart.report import compressed_targets
from eckart.text.self_written import write_text as write_text

_PRECISION = 0.01  # the search for a keep ends when its interval is this narrow
_ROUNDING = 1e-6  # of a score: a mean in float32 has an error of up to 6e-8
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
"""Options of `load` that apply to the config as well as to the weights."""


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


@overload
def compress(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    keep: float | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = ...,
    *,
    largest_drop: float | None = ...,
    score: Score | None = ...,
    include: str | Sequence[str] = ...,
    exclude: str | Sequence[str] = ...,
    embeddings: bool = ...,
    tied: bool = ...,
    experts: bool = ...,
    loss: Loss | None = ...,
    clip: tuple[float, float] | None = ...,
    edges: float = ...,
    seed: int = ...,
    check: bool = ...,
) -> Compressed: ...


@overload
def compress(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    keep: Sequence[float],
    recipe: str | Recipe | Mapping[str, Any] | None = ...,
    *,
    include: str | Sequence[str] = ...,
    exclude: str | Sequence[str] = ...,
    embeddings: bool = ...,
    tied: bool = ...,
    experts: bool = ...,
    loss: Loss | None = ...,
    clip: tuple[float, float] | None = ...,
    edges: float = ...,
    seed: int = ...,
    check: bool = ...,
) -> list[Compressed]: ...


def compress(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    keep: float | Sequence[float] | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    *,
    largest_drop: float | None = None,
    score: Score | None = None,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
    embeddings: bool = False,
    tied: bool = False,
    experts: bool = True,
    loss: Loss | None = None,
    clip: tuple[float, float] | None = None,
    edges: float = 0.0,
    seed: int = 0,
    check: bool = True,
) -> Compressed | list[Compressed]:
    """Return a smaller copy of `model` with low-rank factors in place of linear layers.

    Example::

        model = AutoModelForSequenceClassification.from_pretrained("my-classifier")
        batches = [tokenizer(texts, padding=True, return_tensors="pt") | {"labels": labels} for texts, labels in data]
        small, report = eckart.compress(model, batches, keep=0.33)
        small.save_pretrained("small")  # load it again with from_pretrained, after `import eckart`

    `model` itself is not changed. In memory at once are the calibration batches, their statistics (up to in² + out²
    numbers for each layer) and the model twice; three times with `largest_drop` or `check`, or if the recipe has an
    anchor (`anchored`, `narrowed`). With `sequential`, so are one layer's activations of all batches. Each further keep
    adds its compressed model. For larger models use the pipeline.

    Progress bars show the passes over the calibration data and the targets. They are those of transformers:
    `transformers.utils.logging.disable_progress_bar()` switches them off.

    Args:
        model: a transformers model with the head for its task, on the device that should do the work.
        batches: calibration data, a few hundred examples: model inputs, each tensor `(batch, …)`. In a batch of one
            example, images may have any number of patches. Include labels (-100 at padding), except for recipes such
            as `svd` and `drone` that need none. For T5 or BART, missing decoder inputs are made from the labels.
        keep: share of the target layers' parameters to keep, in (0, 1]. By default 0.8 for a causal language
            model, also one that reads images or sounds, because it loses more, and 0.33 for any other model. Several
            keeps, such as `[0.5, 0.33]`, share one set of calibration statistics, and give the models that single
            calls would give.
        recipe: how to compress: a name from `recipes()`, or your own recipe. Its recovery fine-tuning is not run. By
            default `narrowed` for a causal language model, and `anchored` for any other.
        largest_drop: give this instead of `keep` to find the smallest keep, to a hundredth, at which `score` falls by
            no more than this number. The search is a bisection, so it assumes that a smaller keep lowers the score.
        score: function that measures a model (in eval mode) on held-out data, not the test data; higher is better.
        include, exclude: shell patterns for the names of the linear layers to compress, such as `*.attention.*`.
        embeddings: whether to compress embeddings of words, too. Those of positions and types stay dense.
        tied: whether to compress an embedding that shares its weight with the head, together with that head.
        experts: whether to compress a mixture's experts whose weights share one tensor. Experts that no token of
            `batches` reaches stay dense.
        loss: function of the model and a batch that returns the sum of the examples' losses; for embeddings, which need
            no labels, what `embedding_loss` returns. By default the model's own loss is used, after a check of how this
            loss combines examples.
        clip: (low, high) limits the norm of each token's gradient, in units of the mean norm in its example; LEMS takes
            (0.1, 10) for language models. None: no limits.
        edges: share of an example's tokens at each end whose gradients do not count, at most 0.4; LEMS: 0.125.
        seed: seed of rank searches that draw random numbers.
        check: whether to save the result to a temporary folder, load it again, and compare the outputs.

    Returns:
        The compressed model and a report; they unpack as a pair. For several keeps, a list of such pairs in the same
        order.

    Raises:
        ValueError: the recipe is unknown or trains before it factorizes; batches or needed labels are missing; nothing
            can be compressed, or not to this `keep`; `largest_drop` cannot be met; the loss is not usable, or has no
            gradient; the model is quantized, has adapters, or does not survive saving. The message says what to do.
    """
    check_model(model)
    keep = keep.tolist() if isinstance(keep, (Tensor, np.ndarray)) else keep
    model = unfused(model) if experts else model
    causal = continues_text(model)
    keeps = keeps_of(keep, 0.8 if causal else 0.33, largest_drop, score)
    valid_recipe = recipe_of(recipe if recipe is not None else "narrowed" if causal else "anchored")
    robust = RobustGradients(clip, number("edges", edges))
    data = prepare_batches(model, batches)
    few = first_examples(data[0], 2)  # enough to tell tokens from examples that a router sends to a layer
    patterns = patterns_of("include", include), patterns_of("exclude", exclude)
    targets = find_targets(model, few, *patterns, embeddings=embeddings, tied=tied)
    if warning := unmatched_warning(model, *patterns):
        warnings.warn(warning, stacklevel=2)
    if tied and not valid_recipe.ranks.pairs:
        raise ValueError(f"ranks {valid_recipe.ranks.kind} cannot compress an embedding with its head: leave out tied")
    if isinstance(valid_recipe.ranks, ByFormula):  # before the minutes that the statistics take
        for share in keeps:
            ranked_allowance(stored(targets.targets, valid_recipe.storage), share)
    gathering: defaultdict[str, float] = defaultdict(float)
    with _timed(gathering, "statistics"):
        problem, targets = _calibrate(model, data, targets, valid_recipe, loss, seed, robust)
    macs_before = macs(model, data[0]) // batch_size(data[0])

    def compress_to(keep: float) -> Compressed:
        small, seconds = copy.deepcopy(model), gathering.copy()
        chosen, refined = _compress_in_place(
            replace(problem, model=small, keep=keep, progress=_progress(keep)), valid_recipe, data, seconds
        )
        report = Report(
            targets=compressed_targets(chosen),
            excluded=targets.excluded,
            census=targets.census,
            parameters=(model.num_parameters(), small.num_parameters()),
            macs=(macs_before, macs(small, data[0]) // batch_size(data[0])),
            scores=None,
            refined={block.name: (block.before, block.after) for block in refined},
            remark=chosen.remark,
            loss_unit=valid_recipe.weighting.loss_unit,
            seconds=dict(seconds),
        )
        return Compressed(small, report)

    def checked(compressed: Compressed) -> Compressed:
        if check:
            check_saved(compressed.model, row_of(data[0], 0))
        return compressed

    if largest_drop is not None and score is not None:
        return checked(_smallest(compress_to, model, largest_drop, score))
    results = [checked(compress_to(share)) for share in keeps]
    return results if isinstance(keep, Iterable) else results[0]


def save(model: PreTrainedModel, folder: Path | str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write `model`, compressed or not, and its tokenizer to `folder`, from which `load` and `from_pretrained` read."""
    if not str(folder):
        raise ValueError("the folder has no name: give one")
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
    family = next((getattr(place, name) for place in (transformers, lstm, mamba) if hasattr(place, name)), None)
    if family is None:
        raise ValueError(f"{folder} was saved as {name}, which transformers does not have: load it with its own class")
    options |= {"use_safetensors": True, "trust_remote_code": False}
    model: PreTrainedModel = family.from_pretrained(folder, **options)
    return model


def _calibrate(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    targets: Targets,
    recipe: Recipe,
    loss: Loss | None,
    seed: int,
    robust: RobustGradients,
) -> tuple[SearchProblem, Targets]:
    """Gather statistics, warn about misleading calibration data, and return the rank search's input, with keep 1.

    Also return its targets: without those of experts that no token reached.
    """
    kinds = cast("set[StatisticKind]", {*recipe.weighting.statistics, *recipe.ranks.statistics})
    objective = _objective(model, batches, recipe, kinds, loss)
    messages = [targets.census.warning]
    if (
        loss is not None
        and not isinstance(loss, DrawnLoss)
        and (recipe.ranks.judges_by_loss or kinds & {*OF_GRADIENTS})
    ):
        messages.append(mean_warning(model, batches, loss))
    groups = passes(targets.targets, None) if kinds else []
    passed = calibrate(
        model,
        lambda: bar(batches, "Calibration statistics", "batch"),
        groups,
        kinds,
        objective.loss,
        examples=sum(map(batch_size, batches)),
        checked=batches,
        warn=messages.append,
        robust=robust,
    )
    statistics = next(passed, {})
    if kinds:
        messages.append(unreached_warning(targets.targets, statistics))
        targets = without_unreached(targets, statistics)
    for message in filter(None, messages):
        warnings.warn(message, stacklevel=3)  # names the line that called `compress`
    problem = SearchProblem(
        model=model,
        targets=targets.targets,
        keep=1.0,
        seed=seed,
        objective=objective,
        weighting=recipe.weighting,
        statistics=statistics,
        robust=robust,
        train=_refuse_training,
        calibration=lambda examples, skip=0: list(_examples(batches, examples, skip)),
        in_order=recipe.sequential,
    )
    return problem, targets


def _examples(batches: Sequence[Batch], count: int | None, skip: int) -> Iterator[Batch]:
    """Yield `count` examples of `batches` after the first `skip`, or all if `count` is None, in batches."""
    start = 0
    for batch in batches:
        rows = range(batch_size(batch))[max(skip - start, 0) :][: None if count is None else count]
        if rows:
            yield examples_of(batch, rows.start, rows.stop)
        count = None if count is None else count - len(rows)
        start += batch_size(batch)


def _compress_in_place(
    problem: SearchProblem, recipe: Recipe, batches: Sequence[Batch], seconds: defaultdict[str, float]
) -> tuple[ChosenRanks, list[RefinedBlock]]:
    """Compress the model of `problem` and add the `seconds` of the search and of the factorization."""
    model = problem.model
    with _timed(seconds, "search"):
        chosen = search_ranks(problem, recipe.ranks, storage=recipe.storage)
    with _timed(seconds, "factorization"):
        refined = factorize_model(
            model,
            chosen.targets,
            chosen.ranks,
            recipe.weighting,
            problem.statistics,
            in_order=recipe.sequential,
            batches=batches,
            progress=problem.progress,
            widths=chosen.widths,
            loss=problem.objective.loss,
        )
        if recipe.storage == "pivoted":
            pivot(model)
    hf_format.describe(model)
    keep_values(model)
    return chosen, refined


def _progress(keep: float) -> Progress:
    """Return the progress bar, with `keep` in its description."""

    def shown(items: Iterable[Item], description: str, unit: str) -> Iterable[Item]:
        return bar(items, f"{description} (keep {keep:.4g})", unit)

    return shown


@contextmanager
def _timed(seconds: defaultdict[str, float], part: str) -> Iterator[None]:
    """Add the seconds that the context lasts to those of `part`."""
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start


def _smallest(
    compress_to: Callable[[float], Compressed], dense: PreTrainedModel, largest_drop: float, score: Score
) -> Compressed:
    """Find by bisection the smallest keep at which the score is at most `largest_drop` below the score of `dense`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    with _timed(seconds, "scoring"):
        before = _scored(score, dense)
    low, high, best = 0.0, 1.0, None
    while best is None or high - low > _PRECISION:
        keep, candidate = (low + high) / 2 if best else high, None  # free the last candidate before the next is made
        try:
            candidate = compress_to(keep)
        except NoRank:
            low = keep
            continue
        with _timed(seconds, "scoring"):
            after = _scored(score, candidate.model)
        for part in ("search", "factorization"):
            seconds[part] += candidate.report.seconds[part]
        if after >= before - largest_drop - _ROUNDING:
            high, best = keep, Compressed(candidate.model, replace(candidate.report, scores=(before, after)))
        elif best is None:
            raise ValueError(
                f"the score falls by {before - after:.4g}, more than {largest_drop}, even if all parameters are kept: "
                "raise largest_drop, or score on more examples"
            )
        else:
            low = keep
    return Compressed(best.model, replace(best.report, seconds={**best.report.seconds, **seconds}))


def _scored(score: Score, model: PreTrainedModel) -> float:
    with eval_mode(model):
        given = score(model)
    number = float("nan") if given is None else float(given)
    if not math.isfinite(number):
        raise ValueError(f"score returned {given!r}: it must return a number for every model")
    return number


def _objective(
    model: PreTrainedModel, batches: Sequence[Batch], recipe: Recipe, kinds: set[StatisticKind], loss: Loss | None
) -> Objective:
    """Return the objective with `loss` if given, else with the model's own loss if the recipe needs a loss.

    Otherwise its loss only runs the model and is always 0.
    """
    if isinstance(loss, DrawnLoss):
        if recipe.ranks.judges_by_loss or "gradients" in kinds:
            raise ValueError(
                f"ranks {recipe.ranks.kind} judge by the value or the mean gradient of the loss, but the labels of "
                "this loss are drawn from the model's own answers, so these say nothing about the model: write other "
                "ranks, such as waterfill"
            )
        return Objective(loss, loss, loss, loss.predictions, loss.classes)
    if loss is None:
        refine = recipe.sequential and recipe.sequential.refine
        if kinds & {*OF_GRADIENTS}:
            return objective_of(model, batches, f"weighting {recipe.weighting.kind}")
        if refine and refine.error == "gradients":
            return objective_of(model, batches, "refine.error gradients")
        if recipe.ranks.asks_frozen:
            return objective_of(model, batches, f"ranks {recipe.ranks.kind}")
    else:
        check_loss(model, batches, loss)
    return objective_with(_run_without_loss if loss is None else loss, model.config.problem_type)


def _run_without_loss(model: Any, batch: Batch) -> Tensor:
    model(**batch)
    return torch.zeros(())


def _refuse_training(*_: Any, **__: Any) -> None:
    raise AssertionError("a recipe that trains was refused")
