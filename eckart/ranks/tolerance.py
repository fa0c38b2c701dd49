"""Tolerance: a rank search that takes the smallest ranks within an allowed increase of the loss.

Source: DRONE (Chen et al., NeurIPS 2021), section 3.3, algorithm 2 and appendices B and H.

The allowed relative increase r of the loss is divided among the targets according to their running times E_i::

    1 + R_i = (1 + r)^(E_i / Σ E), so that Π (1 + R_i) = 1 + r

The search handles the targets in order of execution. It decomposes each target with statistics of the model in its
current state, and takes the smallest rank of a grid with::

    loss < L · Π_{j ≤ i} (1 + R_j)

L is the loss before any target was approximated. If no rank of the grid satisfies this, the target stays dense. The
final loss is therefore at most (1 + r) L.

Algorithm 2 prints L_new / L < 1 + R_i with an L that it never updates. This would not divide r: the whole model would
have to satisfy only the R of the last target. The authors' listing (appendix H) multiplies its bound by 1 + R_i at
each module, as here. If a target does not use up its share, the rest passes on to the next target.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from eckart.calibration.statistics import Statistics, collect
from eckart.factorization.decomposition import approximate_product, decompose_target
from eckart.model.batches import Batch, batch_size
from eckart.model.layers import set_weight
from eckart.model.module_context import eval_mode, hooked
from eckart.model.targets import Product, Target
from eckart.ranks.budget import NoRank, Rank, Ranks, allowance, largest_rank, total
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.recipe_parts import Contradiction, Method, RecipeParts

_WALKS = 8  # maximum number of walks over all targets to find the increase r that meets keep
_SPAN = 1e-4  # smallest log(1 + r) that is tried ÷ the largest that is tried; also a lower bound of the latter
_REPETITIONS = 10  # timed forward passes, as in section 4.1
_LARGEST = 700.0  # largest log(1 + r); the exponential overflows beyond it


class Tolerance(Method):
    """Settings of a rank search that spends an allowed increase of the loss.

    Each target, in order of execution, gets the smallest rank within its share of the increase.
    """

    asks_frozen: ClassVar = True
    judges_by_loss: ClassVar = True
    leaves_low_rank: ClassVar = True
    pairs: ClassVar = True

    kind: Literal["tolerance"] = Field(
        "tolerance", description="smallest ranks within an allowed increase of the loss (DRONE)"
    )
    increase: float | None = Field(
        None,
        gt=0,
        description="allowed relative increase r of the loss (0.1: 10 %); null: the smallest that meets keep",
    )
    grid: int = Field(4, ge=1, description="number of ranks to try for each target")
    examples: int = Field(64, ge=1, description="maximum number of calibration examples on which the loss is measured")
    times: Literal["macs", "measured"] = Field(
        "macs",
        description="how r is divided among targets. macs: by multiply-accumulates; measured: by seconds, so "
        "that results differ from run to run",
    )

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.weighting.reads_shaping:
            yield (
                "weighting",
                f"{recipe.weighting.kind} reads scores of the shaping, but tolerance gathers all statistics itself, "
                "target by target; write another weighting",
            )

    def search(self, problem: SearchProblem) -> SearchResult:
        """Find ranks within `keep`, and give each factorized target the weight of its approximation of that rank.

        If `increase` is None, the loss may rise by the smallest relative increase r found that meets `keep` (choice:
        the paper sets r and accepts any resulting size). It is found by bisection on a geometric scale of log(1 + r),
        because it can be orders of magnitude below the increase that the smallest ranks need. If ranks that do not
        raise the loss already meet `keep`, these are taken, however far below `keep` they are. Biases stay. After an
        error, the model has its dense weights again.

        Raises:
            NoRank: the smallest ranks of all grids, or the ranks that `increase` allows, exceed `keep`.
            ValueError: there is not a batch, a target belongs to an expert, or the loss of the model is not positive
                and finite.
        """
        targets = problem.targets
        if of_expert := next((target.name for target in targets if target.routed_by), None):
            raise ValueError(
                f"{of_expert} belongs to an expert, to which a router may send no token once other targets are "
                "factorized: write another kind of ranks, or leave experts out (targets.experts in params.yaml)"
            )
        budget, dense = allowance(targets, problem.keep), dict.fromkeys([target.name for target in targets])
        if self.increase is None and total(targets, dense) <= budget:
            return SearchResult(dense)
        smallest = {target.name: min(grid_ranks(target, self.grid), default=None) for target in targets}
        if (least := total(targets, smallest)) > budget:
            raise NoRank(
                f"keep={problem.keep:g} is too small for the smallest ranks of the grid, which keep {least} parameters "
                f"instead of {budget}: raise keep or ranks.grid"
            )
        if not (batches := problem.calibration(self.examples)):
            raise ValueError(
                "there is no calibration example: give some (in params.yaml: raise data.sizes.calibration)"
            )
        with eval_mode(problem.model):
            walks = _Walks(problem, self, batches)
            try:
                ranks = walks.meet(budget) if self.increase is None else walks.within(self.increase, budget)
            except BaseException:
                walks.restore()
                raise
        return SearchResult(ranks, changed=True)


def allowed_increases(times: Mapping[str, float], increase: float) -> dict[str, float]:
    """Return the allowed relative increase R_i of the loss for each module (algorithm 2).

    R_i = exp(log(1 + r) / Σ E)^{E_i} − 1, where r is `increase`.

    Args:
        times: module name → E_i above 0, in any unit: the paper's division by the smallest time cancels.

    Raises:
        ValueError: a time is not positive and finite.
    """
    return {name: math.expm1(math.log1p(increase) * share) for name, share in _shares(times).items()}


def grid_ranks(target: Target, count: int) -> list[int]:
    """Return at most `count` ranks, evenly spaced up to the largest rank that makes the target smaller.

    The paper spreads its grid over all ranks up to min(out, in) (appendix B). Its listing tries only ranks up to half
    of that, the break-even rank of a square weight, and then leaves the module dense (appendix H). So no trial enlarges
    the module, as here.
    """
    top = largest_rank(target)
    return sorted({-(-top * position // count) for position in range(1, count + 1)} - {0})


def module_macs(model: PreTrainedModel, targets: Sequence[Target], batch: Batch) -> dict[str, float]:
    """Return the number of multiply-accumulates of every target's dense module for `batch`, padding included."""
    counts = {target.name: 0.0 for target in targets}

    def count(name: str, layer: Target, x: Tensor) -> None:
        counts[name] += x.numel() * layer.out_features

    _run(model, targets, batch, before=count)
    return counts


def module_seconds(
    model: PreTrainedModel, targets: Sequence[Target], batch: Batch, repetitions: int
) -> dict[str, float]:
    """Return the median seconds that every target's module takes in a forward pass of `batch`, over all its calls.

    The median is over `repetitions` passes, after one pass that is not counted.
    """
    started: dict[str, float] = {}
    seconds: list[dict[str, float]] = []

    def start(name: str, _: Target, x: Tensor) -> None:
        _synchronize(x)
        started[name] = time.perf_counter()

    def stop(name: str, y: Tensor) -> None:
        _synchronize(y)
        seconds[-1][name] += time.perf_counter() - started[name]

    for _ in range(1 + repetitions):
        seconds.append({target.name: 0.0 for target in targets})
        _run(model, targets, batch, before=start, after=stop)
    return {target.name: median(taken[target.name] for taken in seconds[1:]) for target in targets}


@dataclass(frozen=True)
class _Walk:
    """Ranks that one walk over the targets chose, and the loss after each target that it factorized."""

    ranks: dict[str, Rank]
    losses: dict[str, float]


class _Walks:
    """Walks over the targets of one model; each walk starts from the dense weights and chooses all ranks."""

    def __init__(self, problem: SearchProblem, settings: Tolerance, batches: Sequence[Batch]) -> None:
        self.problem = problem
        self.model, self.targets = problem.model, problem.targets
        self.batches = batches
        self.walked = 0
        self.changed: dict[str, list[Tensor]] = {}
        """Target name → the parameters that its approximation changes: its weight, or for a product, weight and bias of
        the second layer."""
        for target in self.targets:
            if isinstance(target, Product):
                parameters = list(self.model.get_submodule(target.other.name).parameters())
            else:
                parameters = [self.model.get_submodule(target.name).get_parameter("weight")]
            self.changed[target.name] = [parameter.detach() for parameter in parameters]
        self.dense = self._weights()
        self.grids = {target.name: grid_ranks(target, settings.grid) for target in self.targets}
        # multiply-accumulates by default (choice): unlike seconds, they are the same in every run
        self.times = (
            module_macs(self.model, self.targets, batches[0])
            if settings.times == "macs"
            else module_seconds(self.model, self.targets, batches[0], _REPETITIONS)
        )
        self.gathered: tuple[str, Statistics] | None = None
        self.loss = self._loss()
        if not (math.isfinite(self.loss) and self.loss > 0):
            raise ValueError(
                f"the loss of the original model is {self.loss:g}, but it must be positive and finite to allow a "
                "relative increase of it: write another kind of ranks"
            )

    def within(self, increase: float, budget: int) -> Ranks:
        """Return the ranks that a relative increase of the loss allows.

        Raises:
            NoRank: these ranks have more parameters than `budget`.
        """
        ranks = self._walk(increase).ranks
        if (parameters := total(self.targets, ranks)) > budget:
            raise NoRank(
                f"keep={self.problem.keep:g} is too small for what increase={increase:g} keeps, {parameters} "
                f"parameters instead of {budget}: raise ranks.increase or keep"
            )
        return ranks

    def meet(self, budget: int) -> Ranks:
        """Return the ranks at the smallest increase of the loss that was found to meet `budget`.

        The smallest ranks of all grids must meet it.
        """
        best = self._walk(math.inf)
        weights, high = self._weights(), self._enough_for(best)
        tightest = self._walk(0.0, budget)
        if total(self.targets, tightest.ranks) <= budget:
            return tightest.ranks
        low = high * _SPAN
        for _ in range(_WALKS - 2):
            middle = math.sqrt(low * high)
            walk = self._walk(math.expm1(middle), budget)
            if total(self.targets, walk.ranks) <= budget:
                best, weights, high = walk, self._weights(), middle
            else:
                low = middle
        self._put(weights)
        return best.ranks

    def restore(self) -> None:
        """Give every module its dense weight back."""
        self._put(self.dense)

    def _walk(self, increase: float, budget: float = math.inf) -> _Walk:
        """Choose the ranks of all targets in order, for a relative increase of the loss.

        Stop early once the ranks exceed `budget` even with the smallest ranks for all remaining targets.
        """
        self.restore()
        self.gathered = None
        walk, bound = _Walk({name: min(grid, default=None) for name, grid in self.grids.items()}, {}), self.loss
        allowed = allowed_increases(self.times, increase)
        self.walked += 1
        for target in self.problem.progress(self.targets, f"Ranks, pass {self.walked}", "target"):
            bound *= 1 + allowed[target.name]
            walk.ranks[target.name] = self._settle(target, bound, walk.losses)
            if total(self.targets, walk.ranks) > budget:
                break
        return walk

    def _settle(self, target: Target, bound: float, losses: dict[str, float]) -> Rank:
        """Return the smallest rank of the grid with a loss below `bound`, or None if the target stays dense.

        The target's weight is replaced by its approximation of that rank, and the loss is stored in `losses`.
        """
        grid = self.grids[target.name]
        if not grid:
            return None
        decomposition = decompose_target(self.model, target, self.problem.weighting, self._statistics(target))
        for rank in grid:
            left, right = decomposition.truncate(rank)
            if isinstance(target, Product):
                approximate_product(self.model, target, left, right)
            else:
                set_weight(self.model.get_submodule(target.name), left @ right)
            loss = self._loss()
            if loss < bound:
                losses[target.name] = loss
                return rank
            self._put({target.name: self.dense[target.name]})
        return None

    def _statistics(self, target: Target) -> Statistics:
        """Return the statistics of `target`, gathered from the model in its current state (section 3.3).

        Input statistics are gathered once for all targets that read the same tensor. Factorizing one of them does not
        change that tensor, unless the target runs repeatedly. Gradient statistics are gathered anew for each target.
        """
        kinds = self.problem.weighting.statistics
        if not kinds:
            return {}
        shared = kinds == ("inputs",) and not target.repeated and not isinstance(target, Product)
        if shared and self.gathered is not None and self.gathered[0] == target.input_of:
            return self.gathered[1]
        names = {name for layer in target.layers for name in (layer.name, layer.input_of)}
        layers = [layer for other in self.targets for layer in other.layers if layer.name in names]
        loss, robust = self.problem.objective.calibration_loss, self.problem.robust
        gathered = collect(self.model, self.batches, layers, kinds, loss, robust=robust)
        self.gathered = target.input_of, gathered
        return gathered

    def _enough_for(self, walk: _Walk) -> float:
        """Return the smallest log(1 + r) at which every loss of `walk` stays within its bound."""
        shares = _shares(self.times)
        reached = dict(zip(shares, accumulate(shares.values()), strict=True))
        needed = (math.log(loss / self.loss) / reached[name] for name, loss in walk.losses.items() if loss > 0)
        return min(max((_SPAN, *needed)), _LARGEST)

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the mean loss of all examples."""
        examples = sum(map(batch_size, self.batches))
        return sum(float(self.problem.objective.loss(self.model, batch)) for batch in self.batches) / examples

    def _weights(self) -> dict[str, list[Tensor]]:
        return {name: [values.clone() for values in changed] for name, changed in self.changed.items()}

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Sequence[Tensor]]) -> None:
        for name, values in weights.items():
            for parameter, value in zip(self.changed[name], values, strict=True):
                parameter.copy_(value)


def _shares(times: Mapping[str, float]) -> dict[str, float]:
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"the time of {name} is {value:g}: write one above 0, or take times macs")
    whole = sum(times.values())
    return {name: value / whole for name, value in times.items()}


def _run(
    model: PreTrainedModel,
    targets: Sequence[Target],
    batch: Batch,
    before: Callable[[str, Target, Tensor], None],
    after: Callable[[str, Tensor], None] = lambda name, y: None,
) -> None:
    """Run `model` on `batch`, with calls for each layer of a target.

    Args:
        before: called with the target's name, the layer and its input.
        after: called with the target's name and the layer's output.
    """
    hooks: list[Any] = []
    for name, layer in ((target.name, layer) for target in targets for layer in target.layers):
        module = model.get_submodule(layer.name)
        hooks.append(
            module.register_forward_pre_hook(lambda _, args, name=name, layer=layer: before(name, layer, args[0]))
        )
        hooks.append(module.register_forward_hook(lambda _, args, y, name=name: after(name, y)))
    with hooked(hooks), eval_mode(model), torch.no_grad():
        model(**batch)


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
