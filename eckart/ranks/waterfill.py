"""Waterfill: a rank search that spends each parameter of the budget where it saves the most predicted loss.

Related: ZS-SVD (arXiv 2602.02848) and IO-SVD (arXiv 2605.15626) select singular components of the whole model by
first-order estimates of the loss, under a global budget. LEMS (ICML 2026) allocates ranks by an integer linear program
over a layer-wise error model. ARA has the dense layer as a choice, too. Ours is the second-order loss, half of S²,
with the lower hull over dense, factors and pivots.

A target at rank r costs as many parameters as its storage needs, and its predicted loss is ½ Σ_{k>r} S_k², with S its
weighted singular values. Dense, it costs out · in and loses nothing. A move takes a target to any higher rank, or makes
it dense. Among the moves of all targets, the search always makes the one that saves the most loss per parameter. Each
target thus follows the lower convex hull of its points (parameters, predicted loss). As factors, all ranks cost the
same and S_k descends, so a move is a single rank (or a single `multiple`) until going dense saves more per parameter.
Pivoted, each rank costs less than the one before, out + in − 2r − 1, so a move may be many ranks at once.

While every such move is affordable, the loss is the smallest that the budget allows. If the best move of a target is
not affordable, the target makes the best affordable one. The loss then exceeds the optimum by at most the saving of the
missed move. That saving is little for one rank, but it can be much for a target of flat spectrum that just misses going
dense.

A larger budget never gives a larger loss. It makes the same moves as a smaller budget, up to the first move that only
the larger budget can pay for. No later move saves more per parameter, and this move alone costs more than the smaller
budget has left. So it saves more than all moves that the smaller budget can still make.

The search is sound only if S² is comparable across targets, as under a weighting in units of loss, such as kfac.

With `narrow`, an MLP may lose neurons (eckart/factorization/neuron_selection.py). There are three ways to compress it:
its layers are factorized; they become smaller, but stay dense, and then its points are those of its widths; or they
become smaller and are then factorized. The predicted loss is then that of the width and those of the smaller layers'
ranks, each under the part of its norm that belongs to the neurons that stay. Every MLP's way is decided first, by the
smallest loss + price · parameters, at the price of a parameter that fits the budget. The third way pays with pivots:
the smaller layers lose their last ranks, which hold little and save more parameters than neurons do. With plain factors
it does not (docs/notes/language-models.md), so it is not tried.

With `one_width`, MLPs only lose neurons, and all of the same size get one width, by the sums of their losses. The
config of a plain model has one number for it, and kernels for experts want one shape.

With `narrow`, a larger budget may give a somewhat larger loss, because the price may decide for other ways. The
predicted loss is never larger than without `narrow`.

The sum of both losses is an estimate. In a layer of SmolLM2 at 60 and 40 % of the parameters, the measured error of
the MLP's outputs is 1.15 and 1.12 × it; that of pivots without narrowing is 1.20 and 1.07 × theirs.

Every parameter takes memory, but only those of linear layers take time as well: embeddings are looked up. So an
embedding's parameters can have a lower price when moves are compared. The budget still counts all parameters alike, so
linear layers then get smaller ranks and embeddings larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from eckart.factorization.neuron_selection import NeuronOrder, moments_of_widths, order_neurons
from eckart.factorization.weighted_svd import absorbed, spectrum_of_moment
from eckart.factorization.weightings import ErrorNorm, weigh
from eckart.model.experts import routed_layers
from eckart.model.mlps import Mlp, Widths, find_mlps, narrowed
from eckart.model.targets import Target, weight_of
from eckart.ranks.budget import NoRank, Ranks, ranked_allowance
from eckart.ranks.hull import State, spend, vertices
from eckart.ranks.mlp_ways import Filled, Way, fill, summed
from eckart.ranks.search_problem import ByFormula, SearchProblem, SearchResult, Spectra, losses_of_components
from eckart.recipe_parts import Contradiction, Method, RecipeParts

_STEPS = 48  # about as many widths are tried for an MLP
_PARTS = 8  # its layers get pivots, too, at widths of 2, 3, … of as many parts of its neurons


class Filling(Method):
    """Settings of rank searches that spend the budget where a parameter saves the most predicted loss."""

    multiple: PositiveInt = Field(
        8, description="ranks are multiples of this number, or 1; 8 is faster on many processors"
    )
    embedding_price: PositiveFloat = Field(
        1.0,
        description="price of an embedding's parameter in parameters of a linear layer; below 1 favors embeddings. A "
        "tied head counts as a linear layer",
    )

    def filled(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        """Return the ranks of all targets; each gets at least rank 1, or stays dense if no rank makes it smaller."""
        budget, states = ranked_allowance(targets, keep), self._states(targets, spectra)
        spend(list(states.values()), budget)
        return {name: state.choice for name, state in states.items()}

    def _states(self, targets: Sequence[Target], spectra: Spectra) -> dict[str, State]:
        states = {}
        for target in targets:
            price = self.embedding_price if target.looks_up else 1.0
            savings = losses_of_components(spectra[target.name].double()) / price
            states[target.name] = State.of(target, savings, self.multiple)
        return states


class Waterfill(Filling, ByFormula):
    """Settings of a rank search that spends the budget where a parameter saves the most predicted loss."""

    kind: Literal["waterfill"] = Field(
        "waterfill", description="spends the budget where a parameter saves the most predicted loss"
    )

    narrow: bool = Field(
        False,
        description="whether an MLP may lose neurons: its layers become smaller, and stay dense or, with storage "
        "pivoted, get pivots, too",
    )
    one_width: bool = Field(
        False,
        description="for narrow: whether MLPs only lose neurons, and all MLPs (or experts) of the same size get one "
        "width, for tools that know only one",
    )

    def ranks(self, targets: Sequence[Target], spectra: Spectra, keep: float) -> Ranks:
        return self.filled(targets, spectra, keep)

    def search(self, problem: SearchProblem) -> SearchResult:
        if not self.narrow:
            return super().search(problem)
        mlps = find_mlps(problem.model, problem.targets, problem.calibration(1)[0])
        narrowable = {name for mlp in mlps for name in mlp.layers}
        rest = tuple(target for target in problem.targets if target.name not in narrowable)
        spectra, budget = replace(problem, targets=rest).spectra(), ranked_allowance(problem.targets, problem.keep)
        states, orders, narrowings, ways = self._states(rest, spectra), {}, {}, {}
        for mlp in problem.progress(mlps, "Widths", "MLP"):
            order = self._order(problem, mlp)
            orders[mlp] = replace(order, moments={})  # frees their memory
            narrowings[mlp] = _narrowing(problem, mlp, order)
            if not self.one_width:
                *both, in_ranks = self._in_ranks(problem, mlp, order)
                ways[mlp] = [in_ranks, Way({}, narrowings[mlp]), *both]
        if self.one_width:
            best = _filled_with_one_width(states, narrowings, problem.keep, budget)
        else:  # the search is greedy, so fewer ways may turn out better
            fillings = [fill(states, {(mlp,): ways[mlp][:number] for mlp in mlps}, budget) for number in (1, 2, None)]
            best = min(fillings, key=lambda filled: filled.loss)
        ranks = {target.name: best.ranks.get(target.name) for target in problem.targets}
        widths = {
            mlp.down: orders[mlp].width(mlp, neurons) for group, neurons in best.narrowed.items() for mlp in group
        }
        spectra = {**spectra, **{name: values for way in best.ways.values() for name, values in way.spectra.items()}}
        remark = "" if mlps else "narrow: no MLP was found whose neurons can be left out"
        if self.one_width and (others := _other_experts(problem, widths)):
            remark = (
                f"one_width: experts keep theirs ({len(others)}, such as {others[0]}), because no calibration token "
                "reaches them, or they are no targets. So a plain folder has the original width"
            )
        return SearchResult(ranks, spectra, remark=remark, widths=widths)

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if self.one_width and not self.narrow:
            yield "ranks", "one_width is about MLPs that lose neurons; write narrow: true, too"
        if self.narrow:
            for part in ("shaping", "residual"):
                if getattr(recipe, part) is not None:
                    yield "ranks", f"narrow does not go with {part}; write narrow: false, or {part}: null"
            if recipe.recovery.kind == "mixed_rank":
                yield "ranks", "narrow does not go with mixed_rank, which needs the dense weights; write narrow: false"

    def _order(self, problem: SearchProblem, mlp: Mlp) -> NeuronOrder:
        """Return the order of the neurons of an MLP, in some 48 widths that are multiples of `multiple`.

        It has the moments of the down layer at those widths at which layers may get ranks.
        """
        down = next(target for target in problem.targets if target.name == mlp.down)
        step = self.multiple * ceil(mlp.neurons / (_STEPS * self.multiple))
        steps, parts = ceil(mlp.neurons / step), range(2, _PARTS) if down.storage == "pivoted" else ()
        tried = {mlp.neurons, *(step * (steps * part // _PARTS) for part in parts)}
        weight, norm = _absorbed(problem, down, "left")
        return order_neurons(weight, norm.right, step, () if self.one_width else tried)

    def _in_ranks(self, problem: SearchProblem, mlp: Mlp, order: NeuronOrder) -> Iterator[Way]:
        """Yield a way in which layers of an MLP get ranks for each width in `order.moments`; the last has all neurons.

        The moments save the products that the spectra of single layers take.
        """
        targets = [target for target in problem.targets if target.name in mlp.layers]
        moments = {target.name: _moments(problem, target, mlp, order) for target in targets}
        for neurons in order.moments:
            width = order.width(mlp, neurons)
            smaller = narrowed(targets, {mlp.down: width})
            spectra = {
                target.name: spectrum_of_moment(next(moments[target.name]))[
                    : min(target.out_features, target.in_features)
                ]
                for target in smaller
            }
            lost = None if neurons == mlp.neurons else State([neurons], [0], [width.loss], [1])
            yield Way(self._states(smaller, spectra), lost, spectra)


def _moments(problem: SearchProblem, target: Target, mlp: Mlp, order: NeuronOrder) -> Iterator[Tensor]:
    """Yield the moment of a layer of an MLP at each of the widths in `order.moments`."""
    if target.name == mlp.down:
        yield from order.moments.values()
        return
    weight, norm = _absorbed(problem, target, "right")
    ends = [*order.moments]
    parts = [
        mlp.outputs_of(torch.tensor(order.neurons[start:end]), len(weight)).to(weight.device)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    yield from moments_of_widths(weight, norm.left, parts)


def _absorbed(problem: SearchProblem, target: Target, side: Literal["left", "right"]) -> tuple[Tensor, ErrorNorm]:
    """Return weight and norm of a layer of an MLP, with one side of the norm in the weight."""
    try:
        weight = weight_of(problem.model.get_submodule(target.name))
        return absorbed(weight, weigh(problem.weighting, target, problem.statistics), side)
    except ValueError as error:
        raise ValueError(f"{target.name}: {error}") from error


def _narrowing(problem: SearchProblem, mlp: Mlp, order: NeuronOrder) -> State:
    """Return the state of the width of an MLP that only gets a width."""
    layers = [target for target in problem.targets if target.name in mlp.layers]
    price = sum(target.parameters for target in layers) // mlp.neurons  # of a neuron
    widths, losses = order.widths[1:], order.losses[1:]
    costs = [price * width for width in widths]
    return State([*widths[:-1], None], costs, losses, vertices(costs, losses))


def _filled_with_one_width(
    states: Mapping[str, State], narrowings: Mapping[Mlp, State], keep: float, budget: int
) -> Filled:
    """Spend the budget where all MLPs of the same size get one width.

    Args:
        narrowings: state of the width of each MLP.

    Raises:
        NoRank: the budget does not pay for the smallest widths.
    """
    groups: dict[int, list[Mlp]] = {}
    for mlp in narrowings:
        groups.setdefault(mlp.neurons, []).append(mlp)
    joined = {tuple(group): summed([narrowings[mlp] for mlp in group]) for group in groups.values()}
    if sum(state.costs[0] for state in (*states.values(), *joined.values())) > budget:
        raise NoRank(f"keep={keep:g} is too small for the smallest widths: raise keep, or write one_width: false")
    return fill(states, {group: [Way({}, state)] for group, state in joined.items()}, budget)


def _other_experts(problem: SearchProblem, widths: Widths) -> list[str]:
    """Return the experts that are not narrowed beside others of their module that are."""
    experts = {down: module for down, module in routed_layers(problem.model).items() if down.endswith(".down")}
    narrower = {experts[down] for down in widths if down in experts}
    return [down.removesuffix(".down") for down, module in experts.items() if module in narrower and down not in widths]
