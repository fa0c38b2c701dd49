"""Compression in one call: a model in memory, calibration batches and a recipe → a model in factors::

    small, report = eckart.compress(model, batches, keep=0.33, recipe="anchored")
    print(report)
    small.save_pretrained("small")

or, in place of a keep, what may be lost::

    small, report = eckart.compress(model, batches, largest_drop=0.01, score=accuracy)

This is what the stages importance, search and factorize of the pipeline do, with the same recipes. Recovery is any
training of the factors, which are ordinary parameters: `transformers.Trainer(small, …).train()`.
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
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eckart.calibration.batches import prepare_batches
from eckart.calibration.head_loss import objective_of
from eckart.calibration.losses import Batch, Loss, Objective, batch_size, logits_of, row_of
from eckart.calibration.statistics import NO_GRADIENT, OF_GRADIENTS, StatisticKind, Statistics, collect, has_gradients
from eckart.calibration.warnings import few_tokens, padding_warning, underflow_warning
from eckart.factorization.factorize import factorize_at_once, factorize_in_order
from eckart.factorization.pivoted_storage import pivot
from eckart.model import hf_format, lstm
from eckart.model.census import Census
from eckart.model.macs import macs
from eckart.model.module_context import eval_mode
from eckart.model.targets import Target, Targets, find_targets
from eckart.ranks.budget import NoRank, Rank, cost, largest_rank, stored
from eckart.ranks.search_problem import Found, SearchProblem
from eckart.recipe import Recipe, complete, contradictions
from eckart.recipe import recipes as complete_recipes

Score = Callable[[PreTrainedModel], float]
"""How good a model is; more is better."""
_PRECISION = 0.01  # of a keep that is searched for
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "subfolder")  # which a config asks for, too


@dataclass(frozen=True)
class CompressedTarget:
    """What became of a target.

    Attributes:
        shape: of its weight, `(out, in)`.
        rank: None where it stays dense.
        parameters: (before, after), without biases.
        predicted_loss: ½ Σ S_k² over the weighted singular values that were cut; under kfac what the loss of a sample
            grows by, in its units. None where the search of ranks knows none.
        no_rank: whether no rank makes it smaller, as a matrix of one row, so that it stays dense at any keep.
    """

    shape: tuple[int, int]
    rank: Rank
    parameters: tuple[int, int]
    predicted_loss: float | None
    no_rank: bool


@dataclass(frozen=True)
class Report:
    """What `compress` did; printed, a few lines that say it.

    Attributes:
        targets: by name, in order of execution.
        excluded: other linear maps, and why each is no target.
        census: what all parameters of the dense model are.
        parameters: of the whole model, (before, after).
        macs: multiply-accumulates of a forward of the first batch ÷ its samples, (before, after).
        scores: of the dense model and of this one, where a largest drop was asked for.
    """

    targets: Mapping[str, CompressedTarget]
    excluded: Mapping[str, str]
    census: Census
    parameters: tuple[int, int]
    macs: tuple[int, int]
    scores: tuple[float, float] | None

    @property
    def keep(self) -> float:
        """Parameters of all targets after ÷ before."""
        before, after = (sum(one.parameters[place] for one in self.targets.values()) for place in (0, 1))
        return after / before

    @property
    def predicted_loss(self) -> float | None:
        """The sum of all targets'; None where one has none."""
        losses = [one.predicted_loss for one in self.targets.values()]
        return None if None in losses else sum(cast("list[float]", losses))

    def __str__(self) -> str:
        dense = [one for one in self.targets.values() if one.rank is None]
        small = sum(one.no_rank for one in dense)
        lines = [
            f"{len(self.targets)} targets keep {self.keep:.1%} of their parameters; {len(dense)} of them stay dense"
            + (f", {small} because no rank makes them smaller" if small else ""),
            f"model: {self.parameters[0]:,} → {self.parameters[1]:,} parameters, "
            f"{self.macs[0]:,} → {self.macs[1]:,} multiply-accumulates a sample",
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
    """What `compress` gives.

    Attributes:
        model: in factors, and otherwise an ordinary model of transformers.
        report: what was done.
    """

    model: PreTrainedModel
    report: Report


def recipes() -> dict[str, Recipe]:
    """Return the built-in recipes by name; the pipeline has the same.

    One of your own is one of these with other parts: `recipes()["drone"].model_copy(update={"storage": "pivoted"})`.
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
    """Factorize a copy of `model`, which stays as it is.

    Statistics of all targets are in memory at once, for kfac (in² + out²) numbers each, beside two copies of the model,
    three where a keep is searched for: what does not fit is for the pipeline.

    Args:
        model: of transformers, with a head for its task; on the device where it is to run.
        batches: calibration data as the model takes them, each tensor `(batch, …)`, with labels where the recipe reads
            gradients, and -100 there at padding; some hundred rows, read once or twice, and held in memory. What the
            decoder of a T5 or BART reads is made of the labels where it is not given.
        keep: parameters of all targets after ÷ before, in (0, 1]; None: 0.33, or what `largest_drop` allows.
        recipe: a name of `recipes()`, or one of your own. Its recovery is left to you.
        largest_drop: how much less than the dense model's the score may be. The smallest keep is found by bisection, to
            a hundredth, as if the score fell with it.
        score: model, in eval mode → how good it is on rows that are not the test's; more is better.
        include, exclude: shell patterns over names of linear maps, such as `*.attention.*`.
        embeddings: whether embeddings are targets, too.
        tied: whether an embedding and the head that has its weight are one, too.
        loss: model, batch → the sum over the batch's samples of each sample's loss; None: the model's own, where it is
            known how it is made of its samples' (eckart/calibration/head_loss.py).
        seed: of what a search of ranks draws.
        check: whether to save the model to a temporary folder, load it and compare its answers; for a big model that
            takes as much disk, memory and time as saving it does.

    Returns:
        The compressed model, which `save_pretrained` writes and, after `import eckart`, `from_pretrained` reads; and
        what was done.

    Raises:
        ValueError: there is no such recipe, or it trains before it factorizes; there are no batches, no tensors in
            them, or no labels where gradients are read; the model has no head where these are, or no linear map that is
            a target, or no pair that is `tied`; the loss depends on how samples are batched, or has no gradient;
            `keep` leaves one no rank; a largest drop comes with a keep, without a score that gives numbers, or is out
            of reach; the model is quantized or has adapters, or cannot be saved and loaded.
    """
    _check_model(model)
    _check_goal(keep, largest_drop, score)
    wanted = _recipe(recipe)
    need = None if loss else _needs_labels(wanted)
    data = prepare_batches(model, batches)
    found = find_targets(
        model, _first_rows(data[0]), _patterns(include), _patterns(exclude), embeddings=embeddings, tied=tied
    )
    targets = stored(found.targets, wanted.storage)
    objective = _objective(model, data, loss, need)
    statistics = _statistics(model, data, targets, wanted, objective.loss)
    _warn(
        found.census.warning,
        padding_warning(model, data),
        few_tokens(targets, statistics, _samples(data)),
        underflow_warning(model, _first_rows(data[0]), targets, objective.loss) if need or loss else None,
    )
    case = _Case(model, data, found, targets, wanted, objective, statistics, seed, _macs(model, data[0]))
    if largest_drop is None or score is None:
        compressed = case.at(0.33 if keep is None else keep)
    else:
        compressed = case.smallest(largest_drop, score)
    if check:
        hf_format.check_saved(compressed.model, row_of(data[0], 0))
    return compressed


def _first_rows(batch: Batch) -> Batch:
    """Two, by which rows that a router sends to a map are told from tokens."""
    return {name: values[:2] for name, values in batch.items()}


def _samples(data: Iterable[Batch]) -> int:
    return sum(map(batch_size, data))


def _warn(*found: str | None) -> None:
    for message in filter(None, found):
        warnings.warn(message, stacklevel=3)


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}: give a model of transformers, as from_pretrained loads it"
            + (", with adapters merged by merge_and_unload()" if hasattr(model, "merge_and_unload") else "")
        )
    if not getattr(model.config, "return_dict", True):
        raise ValueError(
            "the config of the model says return_dict=False, so that its outputs have no names: set it to True"
        )
    hf_format.check_base(model)


def _check_goal(keep: float | None, largest_drop: float | None, score: Score | None) -> None:
    if (largest_drop is None) != (score is None) or (keep is not None and score is not None):
        raise ValueError("give a keep, or a largest_drop and the score that it is measured by")
    if score is not None and not callable(score):
        raise ValueError(f"score={score!r} is no function: give one that takes a model and gives a number")
    for name, number in (("keep", keep), ("largest_drop", largest_drop)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0):
            raise ValueError(f"{name}={number!r}: give a number that is not negative, such as 0.33")


def _patterns(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _needs_labels(recipe: Recipe) -> str | None:
    """The part of the recipe that does."""
    if {*recipe.weighting.statistics, *recipe.ranks.statistics} - {"inputs"}:
        return f"weighting {recipe.weighting.kind}"
    return f"ranks {recipe.ranks.kind}" if recipe.ranks.asks_frozen else None


@dataclass(frozen=True)
class _Case:
    """A dense model and what is known of it, to be compressed to any keep."""

    model: PreTrainedModel
    data: Sequence[Batch]
    found: Targets
    targets: Sequence[Target]
    recipe: Recipe
    objective: Objective
    statistics: Statistics
    seed: int
    macs: int
    """Of the dense model and a sample."""

    def at(self, keep: float) -> Compressed:
        small = copy.deepcopy(self.model)
        weighting, order = self.recipe.weighting, self.recipe.sequential
        decided = self.recipe.ranks.search(
            SearchProblem(
                model=small,
                targets=tuple(self.targets),
                keep=keep,
                seed=self.seed,
                objective=self.objective,
                weighting=weighting,
                statistics=self.statistics,
                train=_no_training,
                calibration=_rows_of(self.data),
            )
        )
        if order:
            factorize_in_order(small, self.targets, decided.ranks, weighting, self.statistics, self.data, order)
        else:
            factorize_at_once(small, self.targets, decided.ranks, weighting, self.statistics)
        if self.recipe.storage == "pivoted":
            pivot(small)
        hf_format.describe(small)
        return Compressed(small, self._report(small, decided))

    def smallest(self, largest_drop: float, score: Score) -> Compressed:
        """The smallest of which bisection finds that its score is no more than `largest_drop` below the dense one's."""
        dense = _scored(score, self.model)
        low, high, best = 0.0, 1.0, None
        while best is None or high - low > _PRECISION:
            keep, one = (low + high) / 2 if best else high, None  # and the last one goes before the next is made
            try:
                one = self.at(keep)
            except NoRank:
                low = keep
                continue
            scored = _scored(score, one.model)
            if scored >= dense - largest_drop:
                high, best = keep, Compressed(one.model, replace(one.report, scores=(dense, scored)))
            elif best is None:
                raise ValueError(
                    f"the score falls by {dense - scored:.4g} where all parameters are kept, more than {largest_drop}: "
                    "raise largest_drop, or score on more rows"
                )
            else:
                low = keep
        return best

    def _report(self, small: PreTrainedModel, decided: Found) -> Report:
        return Report(
            targets={target.name: _target(target, decided) for target in self.targets},
            excluded=self.found.excluded,
            census=self.found.census,
            parameters=(self.model.num_parameters(), small.num_parameters()),
            macs=(self.macs, _macs(small, self.data[0])),
            scores=None,
        )


def _macs(model: PreTrainedModel, batch: Batch) -> int:
    return macs(model, batch) // batch_size(batch)


def _scored(score: Score, model: PreTrainedModel) -> float:
    with eval_mode(model):
        given = score(model)
    found = float("nan") if given is None else float(given)
    if not math.isfinite(found):
        raise ValueError(f"score gave {given!r}: it must give a number for every model")
    return found


def _target(target: Target, decided: Found) -> CompressedTarget:
    rank, lost = decided.ranks[target.name], None
    if decided.spectra is not None:
        lost = 0.0 if rank is None else float(decided.spectra[target.name][rank:].square().sum() / 2)
    shape = target.out_features, target.in_features
    return CompressedTarget(shape, rank, (target.parameters, cost(target, rank)), lost, not largest_rank(target))


def save(model: PreTrainedModel, folder: Path | str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write `model`, compressed or not, and its tokenizer as a Hugging Face folder."""
    hf_format.save(model, Path(folder))
    if tokenizer:
        tokenizer.save_pretrained(folder)


def load(folder: Path | str, **options: Any) -> PreTrainedModel:
    """The model in a folder, or on the hub, by the class that its config names; safetensors alone, and no code.

    Args:
        folder: what `save` wrote, or an id on the hub.
        options: more of `from_pretrained`.

    Raises:
        ValueError: the config names no class of transformers.
        OSError: there is no such folder or id, or no safetensors in it.
    """
    hubs = {name: options[name] for name in _HUB_OPTIONS if name in options}
    config = transformers.AutoConfig.from_pretrained(folder, **hubs, trust_remote_code=False)
    name = (config.architectures or ["no class"])[0]
    family = getattr(transformers, name, None) or getattr(lstm, name, None)
    if family is None:
        raise ValueError(f"{folder} was saved as {name}, which transformers has not: load it by its own class")
    safe = {"use_safetensors": True, "trust_remote_code": False}
    model: PreTrainedModel = family.from_pretrained(folder, config=config, **{**options, **safe})
    return model


def _recipe(recipe: str | Recipe | Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, str):
        every = recipes()
        if recipe not in every:
            raise ValueError(f"there is no recipe {recipe!r}: write one of {', '.join(every)}")
        recipe = every[recipe]
    try:
        found = recipe if isinstance(recipe, Recipe) else Recipe.model_validate(complete(recipe))
    except ValidationError as error:
        lines = "".join(f"\n  {'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(
            "the recipe has mistakes; one of your own is best made of another, "
            f'recipes()["kfac"].model_copy(update={{…}}):{lines}'
        ) from error
    for part, mistake in contradictions(found):
        raise ValueError(f"recipe: {part} {mistake}")
    if _trains(found):
        alike = [name for name, one in recipes().items() if not _trains(one)]
        raise ValueError(
            "the recipe trains on the task before its factors are final, which takes the pipeline "
            f"(`eckart run`): take one of {', '.join(alike)}"
        )
    return found


def _trains(recipe: Recipe) -> bool:
    """Whether it trains before its factors are final."""
    return bool(recipe.shaping or recipe.residual or recipe.ranks.trains or recipe.source == "base")


def _objective(model: PreTrainedModel, data: Sequence[Batch], loss: Loss | None, need: str | None) -> Objective:
    """By the model's own loss, if `need` says what reads one."""
    if loss is None and need:
        return objective_of(model, data, need)
    chosen = loss or _forward
    return Objective(chosen, chosen, chosen, logits_of, model.config.problem_type != "regression")


def _statistics(
    model: PreTrainedModel, data: Sequence[Batch], targets: Sequence[Target], recipe: Recipe, loss: Loss
) -> Statistics:
    kinds = {*recipe.weighting.statistics, *recipe.ranks.statistics}
    if not kinds:
        return {}
    reads = loss if kinds & {*OF_GRADIENTS} else _forward
    statistics = collect(model, data, targets, cast("set[StatisticKind]", kinds), reads)
    if kinds & {*OF_GRADIENTS} and not has_gradients(statistics):
        raise ValueError(NO_GRADIENT)
    return statistics


def _forward(model: Any, batch: Batch) -> Tensor:
    """In place of a loss, where none is read."""
    model(**batch)
    return torch.zeros(())


def _no_training(*_: Any, **__: Any) -> None:
    raise AssertionError("a recipe that trains was refused")


def _rows_of(data: Sequence[Batch]) -> Callable[[int], Sequence[Batch]]:
    """Batches of so many rows in all, at most."""

    def rows(count: int) -> Sequence[Batch]:
        single = (row_of(one, row) for one in data for row in range(batch_size(one)))
        return list(islice(single, count))

    return rows
