"""Zero sum: a rank search that cuts components whose signed first-order effects on the loss cancel.

Source: ZS-SVD (Abbasi et al., ICML 2026, arXiv 2602.02848). With G = ∇_W loss `(out, in)`, the mean gradient over the
calibration examples, and W R = U S Vᵀ for the whitening R, cutting component k of a target changes the loss to first
order by::

    ΔL_k = −⟨G, S_k u_k v_kᵀ R⁻¹⟩ = −S_k u_kᵀ (G R⁻ᵀ) v_k

Component k of our decomposition is the product of column k of `left` and row k of `right`, which is S_k u_k v_kᵀ R⁻¹,
so ΔL_k = −left_kᵀ G right_kᵀ. No whitening is inverted, and any weighting can be used, also of both sides.

All targets begin at full rank. In each step one of them loses the smallest of its components. The search keeps the sum
of all ΔL of cut components near zero: while the sum is not positive, it cuts the component with the smallest ΔL ≥ 0
among the last ones of all targets; otherwise the one whose ΔL below 0 is nearest to 0. If no target has a component of
the wanted sign, one of the other sign is cut. A target saves no parameters until it is below its break-even rank, and
is dense if it ends above it. The search ends as soon as the budget is met.

Departs from the code of the paper: the gradient is the mean over all calibration examples, each with its own mean loss
over tokens. The code takes the first examples (one, in its published one-shot runs).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from eckart.calibration.statistics import StatisticKind, Statistics
from eckart.factorization.decomposition import decompose_target
from eckart.factorization.weighted_svd import Decomposition
from eckart.model.targets import Target
from eckart.ranks.budget import NoRank, Ranks, cost, largest_rank, rank_or_dense, ranked_allowance
from eckart.ranks.search_problem import SearchProblem, SearchResult
from eckart.recipe_parts import Method


class ZeroSum(Method):
    """Settings of a rank search that keeps the sum of the first-order effects of all cut components near zero."""

    kind: Literal["zero_sum"] = Field(
        "zero_sum", description="cuts components whose first-order effects on the loss cancel (ZS-SVD)"
    )
    floor: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of its break-even rank that every target keeps at least; the paper's code has 0, and 0.3 at "
        "keep 0.4",
    )

    statistics: ClassVar[tuple[StatisticKind, ...]] = ("gradients",)

    def search(self, problem: SearchProblem) -> SearchResult:
        ranked_allowance(problem.targets, problem.keep)  # before the decompositions, which take long
        effects, spectra = {}, {}
        for target in problem.progress(problem.targets, "Effects of components", "target"):
            parts = decompose_target(problem.model, target, problem.weighting, problem.statistics)
            effects[target.name] = first_order(target, parts, problem.statistics).tolist()
            spectra[target.name] = parts.spectrum
        return SearchResult(zero_sum_ranks(problem.targets, effects, problem.keep, self.floor), spectra)


def first_order(target: Target, parts: Decomposition, statistics: Statistics) -> Tensor:
    """Return the first-order change ΔL_k of the loss if component k of `target` is cut, `(min(out, in),)`.

    Raises:
        ValueError: the statistics have no gradient of `target`.
    """
    gradients = statistics.get("gradients", {})
    if target.name not in gradients:
        raise ValueError(
            f"{target.name}: ranks zero_sum read its mean gradient: add gradients to importance.statistics, and set "
            "targets.unsampled to false"
        )
    return -(parts.left * (gradients[target.name].to(parts.left) @ parts.right.T)).sum(0)


def zero_sum_ranks(
    targets: Sequence[Target], effects: dict[str, list[float]], keep: float, floor: float = 0.0
) -> Ranks:
    """Return the ranks of all targets after cutting components in the order of zero sum, until `keep` is met.

    Args:
        effects: target name → ΔL of each component, in the order of the components.
        floor: share of its break-even rank that every target keeps at least.

    Raises:
        NoRank: `keep` is too small for the smallest ranks, or for `floor`.
    """
    budget = ranked_allowance(targets, keep)
    ranks = {target.name: min(target.out_features, target.in_features) for target in targets}
    used, balance = sum(target.parameters for target in targets), 0.0
    rising: list[tuple[float, int]] = []  # |ΔL| of the next component of a target, and the number of the target
    falling: list[tuple[float, int]] = []

    def offer(number: int) -> None:
        target = targets[number]
        if ranks[target.name] > max(1, math.ceil(round(floor * largest_rank(target), 6))):
            effect = effects[target.name][ranks[target.name] - 1]
            heapq.heappush(rising if effect >= 0 else falling, (abs(effect), number))

    for number, target in enumerate(targets):
        if largest_rank(target):
            offer(number)
    while used > budget:
        queue = (rising or falling) if balance <= 0 else (falling or rising)
        if not queue:
            raise NoRank(
                f"keep={keep:g} is too small for floor={floor:g} of every target: raise keep, or lower ranks.floor"
            )
        size, number = heapq.heappop(queue)
        balance += size if queue is rising else -size
        target = targets[number]
        used -= cost(target, rank_or_dense(target, ranks[target.name]))
        ranks[target.name] -= 1
        used += cost(target, rank_or_dense(target, ranks[target.name]))
        offer(number)
    return {target.name: rank_or_dense(target, ranks[target.name]) for target in targets}
