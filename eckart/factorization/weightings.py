"""Weightings: what matters about a target's error, as a norm of it.

A weighting turns statistics into L and R of ‖L (W − Ŵ) R‖_F. Only their squares A = LᵀL `(out, out)` and B = R Rᵀ
`(in, in)` are ever stated: statistics consists of such second moments, and the decomposition needs a root of the
smaller one alone (eckart/factorization/weighted_svd.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from eckart.calibration.statistics import Axis, StatisticKind, Statistics
from eckart.model.targets import Target, Tied
from eckart.recipe_parts import Contradiction, Method, RecipeParts

Side = Tensor | None
"""LᵀL or R Rᵀ, positive semidefinite: `(n, n)`, or `(n,)` for a diagonal one, or None for the identity."""


@dataclass(frozen=True)
class ErrorNorm:
    """‖L E R‖_F of an error E `(out, in)`.

    Attributes:
        left: LᵀL over outputs, `(out, out)`, `(out,)` or None.
        right: R Rᵀ over inputs, `(in, in)`, `(in,)` or None.
    """

    left: Side = None
    right: Side = None


class _Weighting(Method):
    @property
    def statistics(self) -> tuple[StatisticKind, ...]:
        return ()

    @property
    def pairs(self) -> bool:
        return not self.reads_shaping


class Plain(_Weighting):
    """Every entry of W counts alike: SVD."""

    kind: Literal["none"] = Field("none", description="every entry of W counts alike: plain SVD")

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        return ErrorNorm()


class ByScores(_Weighting):
    """Rows or columns count by their Fisher (FWSVD) or Taylor (IWSVD) score.

    FWSVD (Hsu et al., ICLR 2022) sums the Fisher over the rows of W in y = xW, which are inputs: axis `input`.
    """

    kind: Literal["fisher", "taylor"] = Field(description="rows of W count by their Fisher (FWSVD) or Taylor score")
    axis: Axis = Field("input", description="whose scores count: input or output; they are summed over the other axis")

    @property
    def statistics(self) -> tuple[StatisticKind, ...]:
        return (self.kind,)

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        scores = statistics[self.kind][f"{target.name}.{self.axis}"]
        return ErrorNorm(right=scores) if self.axis == "input" else ErrorNorm(left=scores)


class Inputs(_Weighting):
    """The error of the outputs on the calibration inputs: DRONE, eq. 3."""

    kind: Literal["inputs"] = Field("inputs", description="the error of the outputs on the calibration inputs (DRONE)")

    @property
    def statistics(self) -> tuple[StatisticKind, ...]:
        return ("inputs",)

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        return ErrorNorm(right=statistics["inputs"][target.input_of])


class Movement(_Weighting):
    """The error of each output, by the scores with which shaping pruned its row: LPAF, section 4.2."""

    reads_shaping = True

    kind: Literal["movement"] = Field("movement", description="outputs count by the scores of pruning (LPAF)")

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.shaping is None:
            yield (
                "weighting",
                "movement reads the scores of pruning, and shaping is null; add a shaping of kind pruning",
            )

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        """L = diag(Ŝ), not its root."""
        if "movement" not in statistics:
            raise ValueError("weighting movement reads the scores of pruning: add a shaping of kind pruning")
        return ErrorNorm(left=statistics["movement"][f"{target.name}.output"].square())


class Kfac(_Weighting):
    """Twice the second-order increase of the loss, as the Kronecker factors of the empirical Fisher estimate it."""

    kind: Literal["kfac"] = Field("kfac", description="both Kronecker factors of the Fisher: the loss to second order")
    shrinkage: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the gradients' second moment that is spread evenly over outputs; 0.1 for few examples",
    )

    @property
    def statistics(self) -> tuple[StatisticKind, ...]:
        return ("inputs", "output_gradients")

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        """With weights shared by T tokens the Fisher is C_out ⊗ C_in / T (Eschenhagen et al. 2023, "expand").

        Without the 1/T a layer that sees one token per sample would seem T times too unimportant.
        """
        tokens = statistics["tokens"][target.input_of]
        return ErrorNorm(
            left=_shrunk(statistics["output_gradients"][target.name], self.shrinkage),
            right=statistics["inputs"][target.input_of] / torch.clamp(tokens, min=1),
        )


def _shrunk(moment: Tensor, share: float) -> Tensor:
    """(1 − share) M + share · tr(M) ÷ n · I, of the same trace (Ledoit and Wolf 2004)."""
    if not share:
        return moment
    if moment.dim() == 1:
        return torch.lerp(moment, moment.mean(), share)
    even = torch.eye(len(moment), dtype=moment.dtype, device=moment.device) * moment.diagonal().mean()
    return torch.lerp(moment, even, share)


class FisherInputs(_Weighting):
    """Fisher score of each output, second moment of the inputs (ours)."""

    kind: Literal["fisher_inputs"] = Field(
        "fisher_inputs", description="Fisher score of each output, second moment of the inputs"
    )

    @property
    def statistics(self) -> tuple[StatisticKind, ...]:
        return ("inputs", "fisher")

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        return ErrorNorm(
            left=statistics["fisher"][f"{target.name}.output"], right=statistics["inputs"][target.input_of]
        )


Weighting = Annotated[Plain | ByScores | Inputs | Movement | Kfac | FisherInputs, Field(discriminator="kind")]


def weigh(weighting: Weighting, target: Target, statistics: Statistics) -> ErrorNorm:
    """The norm of errors of `target` under `weighting`.

    Raises:
        ValueError: the statistics lacks what the weighting reads.
    """
    if lacking := [kind for kind in weighting.statistics if kind not in statistics]:
        raise ValueError(f"weighting {weighting.kind} reads {', '.join(lacking)}: add it to importance.statistics")
    if weighting.statistics and not target.sampled:
        raise ValueError(
            f"weighting {weighting.kind} reads statistics, and there is none of what reads more than samples: set "
            "targets.unsampled to false"
        )
    if isinstance(target, Tied):
        head = weighting.norm(target.other, statistics)
        return _nearest(weighting.norm(target, statistics), ErrorNorm(left=head.right, right=head.left), target)
    return weighting.norm(target, statistics)


def _nearest(one: ErrorNorm, other: ErrorNorm, target: Target) -> ErrorNorm:
    """A and B whose Kronecker product is nearest to A₁ ⊗ B₁ + A₂ ⊗ B₂: one norm for an error that two maps make.

    A = Σ xᵢ Aᵢ and B = Σ yᵢ Bᵢ, as of a matrix of rank 2 the nearest one of rank 1 (Van Loan and Pitsianis 1993). No xᵢ
    or yᵢ is negative, so A and B are second moments as well.
    """
    lefts = _alike((one.left, other.left), target.out_features)
    rights = _alike((one.right, other.right), target.in_features)
    inner, outer = (
        torch.tensor([[float((a * b).sum()) for a in side] for b in side], dtype=torch.float64)
        for side in (lefts, rights)
    )
    values, vectors = torch.linalg.eig(outer @ inner)
    x = vectors[:, values.real.argmax()].real.abs()
    y = inner @ x
    length = float(x @ y)
    if not length > 0:
        return ErrorNorm(left=lefts[0], right=rights[0])
    (x0, x1), (y0, y1) = x.tolist(), (y / length).tolist()
    return ErrorNorm(left=x0 * lefts[0] + x1 * lefts[1], right=y0 * rights[0] + y1 * rights[1])


def _alike(sides: tuple[Side, Side], size: int) -> tuple[Tensor, Tensor]:
    """Both as matrices `(size, size)` where one is, else both as diagonals `(size,)`."""
    some = [side for side in sides if side is not None]
    like = some[0] if some else torch.empty(0)
    exact = torch.float32 if like.device.type == "mps" else torch.float64
    diagonals = all(side.dim() == 1 for side in some)
    ones = torch.ones(size, dtype=exact, device=like.device)
    one, other = (ones if side is None else side.to(exact) for side in sides)
    if diagonals:
        return one, other
    return one if one.dim() == 2 else one.diag(), other if other.dim() == 2 else other.diag()
