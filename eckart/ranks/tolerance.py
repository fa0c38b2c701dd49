"""Tolerance: the smallest rank of a grid whose loss stays within a target's share of an allowed increase.

Source: DRONE (Chen et al., NeurIPS 2021), section 3.3, algorithm 2 and appendices B and H.

The allowed relative increase r of the loss is shared out by time, 1 + R_i = (1 + r)^(E_i / Σ E), so that
Π (1 + R_i) = 1 + r. Targets are settled in order of execution: each is decomposed under the statistics of the model as
it is by then, and takes the smallest rank of its grid with::

    loss < L · Π_{j ≤ i} (1 + R_j),

or stays dense; L is the loss before anything was approximated. The loss at the end is therefore at most (1 + r) L.

Algorithm 2 prints L_new / L < 1 + R_i with an L that it never updates, which shares nothing out: the whole model would
be held to the last target's R. The authors' listing (appendix H) multiplies its bound by 1 + R_i at each module, as
here, so what one target leaves unused passes on to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from eckart.calibration.losses import Batch, Loss, batch_size, mean_loss_times_batch
from eckart.calibration.statistics import Statistics, collect
from eckart.factorization.decomposition import approximate_product, decompose_target
from eckart.factorization.weightings import Weighting
from eckart.model.layers import set_weight
from eckart.model.module_context import eval_mode
from eckart.model.targets import Product, Target
from eckart.ranks.budget import Rank, Ranks, allowance, largest_rank, total
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.recipe_parts import Contradiction, Method, RecipeParts

_WALKS = 8  # over the model, to find the increase that meets keep
_SPAN = 1e-4  # least log(1 + r) that is looked at, relative to the largest that can matter
_LARGEST = 700.0  # log(1 + r) beyond which the exponential overflows


class Tolerance(Method):
    """Give each target, in order of execution, the smallest rank within its share of an allowed loss."""

    kind: Literal["tolerance"] = Field("tolerance", description="the smallest ranks within an allowed loss (DRONE)")
    increase: float | None = Field(
        None, gt=0, description="allowed relative increase r of the loss, 0.1 is 10 %; null: the least that meets keep"
    )
    grid: int = Field(4, ge=1, description="ranks that are tried of each target")
    rows: int = Field(64, ge=1, description="calibration examples that the loss is measured on, at most")

    @property
    def asks_frozen(self) -> bool:
        return True

    @property
    def pairs(self) -> bool:
        return True

    @property
    def leaves_low_rank(self) -> bool:
        return True

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.weighting.reads_shaping:
            kind = recipe.weighting.kind
            yield (
                "weighting",
                f"tolerance gathers statistics anew on its way, and {kind} has none to gather; write another",
            )

    def search(self, problem: SearchProblem) -> SearchResult:
        ranks = tolerated_ranks(
            problem.model,
            problem.targets,
            self,
            problem.keep,
            problem.calibration(self.rows),
            problem.weighting,
            loss=problem.objective.loss,
            calibration_loss=problem.objective.calibration_loss,
        )
        return SearchResult(ranks, changed=True)


def tolerated_ranks(
    model: PreTrainedModel,
    targets: Sequence[Target],
    settings: Tolerance,
    keep: float,
    batches: Sequence[Batch],
    weighting: Weighting,
    loss: Loss = mean_loss_times_batch,
    calibration_loss: Loss | None = None,
) -> Ranks:
    """Return ranks within `keep`; every factorized target's module in `model` gets its weight of that rank, in place.

    Without `increase`, r is the smallest found to meet `keep` (choice: the paper sets r and takes the size that comes).
    It is bisected on a geometric scale of log(1 + r), as it can lie orders of magnitude below what the smallest ranks
    need. Where ranks that do not raise the loss meet `keep` already, they are taken, however far below `keep` they are.
    Biases stay. On an error the model comes back as it was.

    Args:
        targets: in order of execution, as `find_targets` gives them.
        batches: model inputs with labels, each tensor `(batch, …)`; both statistics and loss are of these.
        loss: sum over samples of each sample's loss.
        calibration_loss: whose gradients are statistics; by default `loss`.

    Raises:
        ValueError: the ranks that `increase` allows exceed `keep`, or the smallest of every grid do, or there is no
            batch, or the loss of `model` is not above 0 and finite.
    """
    budget, all_dense = allowance(targets, keep), dict.fromkeys(target.name for target in targets)
    if settings.increase is None and total(targets, all_dense) <= budget:
        return all_dense  # r = 0 meets keep
    if not batches:
        raise ValueError("there is no calibration sample: raise data.sizes.calibration")
    with eval_mode(model):
        walks = _Walks(model, targets, settings.grid, batches, weighting, loss, calibration_loss or loss)
        try:
            return walks.meet(keep) if settings.increase is None else walks.within(settings.increase, keep)
        except BaseException:
            walks.restore(walks.dense)
            raise


def allowed_increases(times: Mapping[str, float], increase: float) -> dict[str, float]:
    """Return R_i = exp(log(1 + r) / Σ E)^{E_i} − 1 of every module, where r is `increase` (algorithm 2).

    Args:
        times: module name → E_i above 0, in any unit: the paper's division by the least time cancels. Here it is
            `module_macs` (choice): the paper measures seconds, which differ from run to run, and with them ranks would.

    Raises:
        ValueError: a time is not above 0 and finite.
    """
    for name, time in times.items():
        if not (math.isfinite(time) and time > 0):
            raise ValueError(f"the time of {name} is {time:g}: write one above 0")
    total_time = sum(times.values())
    return {name: math.expm1(math.log1p(increase) * (time / total_time)) for name, time in times.items()}


def grid_ranks(target: Target, count: int) -> list[int]:
    """Return `count` ranks or fewer, evenly spaced up to the largest whose factors are smaller than the dense weight.

    The paper's grid is spread over all ranks up to min(out, in) (appendix B), but its listing skips from half of that,
    the break-even rank of a square weight, to leaving the module as it is (appendix H), so that no trial enlarges it.
    """
    top = largest_rank(target)
    return sorted({-(-top * position // count) for position in range(1, count + 1)} - {0})


def module_macs(model: PreTrainedModel, targets: Sequence[Target], batch: Batch) -> dict[str, float]:
    """Return the multiply-accumulates of every target's dense module for `batch`, padding included."""
    counts = {target.name: 0.0 for target in targets}

    def count(target: Target, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        counts[target.name] += args[0].numel() * target.out_features  # both layers of a product have as many outputs

    hooks = [
        model.get_submodule(layer.name).register_forward_pre_hook(partial(count, target))
        for target in targets
        for layer in target.layers
    ]
    try:
        with eval_mode(model), torch.no_grad():
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


class _Walk(NamedTuple):
    """The ranks that one walk over the model chose, and the loss after each target that it factorized."""

    ranks: dict[str, Rank]
    losses: dict[str, float]


class _Walks:
    """Walks over one model, each of which starts from its dense weights and settles one target after the other."""

    def __init__(
        self,
        model: PreTrainedModel,
        targets: Sequence[Target],
        grid: int,
        batches: Sequence[Batch],
        weighting: Weighting,
        loss: Loss,
        calibration_loss: Loss,
    ) -> None:
        self.model = model
        self.loss = loss
        self.calibration_loss = calibration_loss
        self.targets = tuple(targets)
        self.parameters = {target.name: _approximated_parameters(model, target) for target in targets}
        self.dense = self._weights()
        self.grids = {target.name: grid_ranks(target, grid) for target in targets}
        self.batches = batches
        self.weighting = weighting
        self.times = module_macs(model, targets, batches[0])
        self.gathered: tuple[str, Statistics] | None = None
        self.dense_loss = self._mean_loss()
        if not (math.isfinite(self.dense_loss) and self.dense_loss > 0):
            raise ValueError(
                f"the loss of the dense model is {self.dense_loss:g}, which has no shares: write another kind of ranks"
            )

    def within(self, increase: float, keep: float) -> Ranks:
        """Return the ranks that an increase of the loss allows."""
        ranks = self._walk(increase).ranks
        parameters, budget = total(self.targets, ranks), allowance(self.targets, keep)
        if parameters > budget:
            raise ValueError(
                f"increase={increase:g} keeps {parameters} parameters, more than the {budget} of keep={keep}: "
                "raise ranks.increase or keep"
            )
        return ranks

    def meet(self, keep: float) -> Ranks:
        """Return the ranks at the smallest increase of the loss that was found to meet `keep`."""
        budget = allowance(self.targets, keep)
        best = self._walk(math.inf)
        if (parameters := total(self.targets, best.ranks)) > budget:
            raise ValueError(
                f"the smallest ranks of the grid keep {parameters} parameters, more than the {budget} of keep={keep}: "
                "raise ranks.grid or keep"
            )
        weights, high = self._weights(), self._sufficient_increase(best)
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
        self.restore(weights)
        return best.ranks

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Sequence[Tensor]]) -> None:
        """Give the modules of some targets these weights."""
        for name, values in weights.items():
            for parameter, value in zip(self.parameters[name], values, strict=True):
                parameter.copy_(value)

    def _weights(self) -> dict[str, list[Tensor]]:
        return {name: [values.clone() for values in parameters] for name, parameters in self.parameters.items()}

    def _walk(self, increase: float, budget: float = math.inf) -> _Walk:
        """Settle all targets in order; stop where even the smallest ranks for those after would exceed `budget`."""
        self.restore(self.dense)
        self.gathered = None
        walk, bound = _Walk({name: min(grid, default=None) for name, grid in self.grids.items()}, {}), self.dense_loss
        allowed = allowed_increases(self.times, increase)
        for target in self.targets:
            bound *= 1 + allowed[target.name]
            walk.ranks[target.name] = self._settle(target, bound, walk.losses)
            if total(self.targets, walk.ranks) > budget:
                break
        return walk

    def _settle(self, target: Target, bound: float, losses: dict[str, float]) -> Rank:
        """Put the smallest rank of the grid with a loss below `bound` into the model; None leaves the dense weight."""
        grid = self.grids[target.name]
        if not grid:
            return None
        decomposition = decompose_target(self.model, target, self.weighting, self._statistics(target))
        for rank in grid:
            left, right = decomposition.truncate(rank)
            if isinstance(target, Product):
                approximate_product(self.model, target, left, right)
            else:
                set_weight(self.model.get_submodule(target.name), left @ right)
            loss = self._mean_loss()
            if loss < bound:
                losses[target.name] = loss
                return rank
            self.restore({target.name: self.dense[target.name]})
        return None

    def _statistics(self, target: Target) -> Statistics:
        """Return the statistics of `target` on the model as it is (section 3.3).

        Inputs are gathered once for all targets that read the same tensor: none of these changes what it reads, unless
        it runs again. Gradients are gathered anew for each.
        """
        kinds = self.weighting.statistics
        if not kinds:
            return {}
        shared = kinds == ("inputs",) and not target.repeated and not isinstance(target, Product)
        if shared and self.gathered is not None and self.gathered[0] == target.input_of:
            return self.gathered[1]
        names = {name for layer in target.layers for name in (layer.name, layer.input_of)}
        layers = [layer for other in self.targets for layer in other.layers if layer.name in names]
        self.gathered = target.input_of, collect(self.model, self.batches, layers, kinds, self.calibration_loss)
        return self.gathered[1]

    def _sufficient_increase(self, walk: _Walk) -> float:
        """Return the least log(1 + r) at which every rank of `walk` stays within its bound."""
        total_time = sum(self.times.values())
        shares = accumulate(time / total_time for time in self.times.values())
        reached = dict(zip(self.times, shares, strict=True))
        needed = (math.log(loss / self.dense_loss) / reached[name] for name, loss in walk.losses.items() if loss > 0)
        return min(max((_SPAN, *needed)), _LARGEST)

    @torch.no_grad()
    def _mean_loss(self) -> float:
        """Return the mean loss over samples."""
        summed = sum(float(self.loss(self.model, batch)) for batch in self.batches)
        return summed / sum(map(batch_size, self.batches))


def _approximated_parameters(model: PreTrainedModel, target: Target) -> list[Tensor]:
    """Return the weight that an approximation changes; of a product those of its second layer, with its bias."""
    if not isinstance(target, Product):
        return [model.get_submodule(target.name).get_parameter("weight").detach()]
    return [parameter.detach() for parameter in model.get_submodule(target.other.name).parameters()]
