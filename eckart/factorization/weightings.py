"""Weightings: norms for the error W − Ŵ of a target; they say which errors matter.

A weighting turns calibration statistics into L and R of the norm ‖L (W − Ŵ) R‖_F. Only A = LᵀL `(out, out)` and
B = R Rᵀ `(in, in)` are ever formed, because the statistics are such second moments, and the decomposition only needs a
root of the smaller one (eckart/factorization/weighted_svd.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from eckart.calibration.statistics import Axis, StatisticKind, Statistics
from eckart.model.targets import Target, Tied
from eckart.recipe_parts import Contradiction, Method, RecipeParts

Side = Tensor | None
"""One side of a norm, LᵀL or R Rᵀ, a positive semidefinite matrix: `(n, n)`, or its diagonal `(n,)`; None: identity."""


@dataclass(frozen=True)
class ErrorNorm:
    """The norm ‖L E R‖_F of an error E `(out, in)` of a target's weight.

    Attributes:
        left: LᵀL, the weights of outputs, `(out, out)`, `(out,)` or None.
        right: R Rᵀ, the weights of inputs, `(in, in)`, `(in,)` or None.
    """

    left: Side = None
    right: Side = None


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for exact computation on the tensor's device: float64, but float32 on mps, which lacks it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def fast_device(matrix: Tensor) -> torch.device:
    """Return the device to decompose a matrix on: a GPU, if there is one and the matrix is on the CPU.

    There an eigendecomposition takes a hundredth of the time.
    """
    return torch.device("cuda") if matrix.is_cpu and torch.cuda.is_available() else matrix.device


class _Weighting(Method):
    loss_unit: ClassVar[str] = "half the weighted squared error"
    """Name of what a predicted loss measures: half the squared norm of a target's error."""
    predicts_loss: ClassVar[bool] = False
    """Whether it estimates how much the task's loss rises, so that a measured loss can be compared with it."""

    @property
    def statistics(self) -> tuple[StatisticKind, ...]:
        return ()

    @property
    def pairs(self) -> bool:
        return not self.reads_shaping

    @property
    def correlations(self) -> float:
        """Share of the correlations between inputs that the right side keeps."""
        return 1.0


class Plain(_Weighting):
    """No weighting: all entries of W weigh the same, so the decomposition is a plain SVD."""

    loss_unit = "half the squared error of the weights"

    kind: Literal["none"] = Field(
        "none", description="error of the weights; every entry of W counts the same (plain SVD)"
    )

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        return ErrorNorm()


class ByScores(_Weighting):
    """Weighting: minimize the error W − Ŵ, each column or row weighted by its Fisher (FWSVD) or Taylor (IWSVD) score.

    Columns have scores with axis `input`, rows with axis `output`. FWSVD (Hsu et al., ICLR 2022) has one score for each
    row of W in y = xW. These rows belong to inputs, so this is axis `input`.
    """

    loss_unit = "half the squared error of the weights, weighted by their scores"

    kind: Literal["fisher", "taylor"] = Field(
        description="error of the weights, each input or output of W weighted by its Fisher (FWSVD) or Taylor (IWSVD) "
        "score"
    )
    axis: Axis = Field(
        "input", description="whether inputs or outputs of W are weighted; their scores are summed over the other axis"
    )

    @property
    def statistics(self) -> tuple[StatisticKind, ...]:
        return (self.kind,)

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        scores = statistics[self.kind][f"{target.name}.{self.axis}"]
        return ErrorNorm(right=scores) if self.axis == "input" else ErrorNorm(left=scores)


class ActivationScaling(_Weighting):
    """Weighting: minimize the error W − Ŵ, each column weighted by the mean magnitude of its input (ASVD).

    R = diag(s)^α, with s_j the mean over tokens of the magnitude of input j. ASVD (Yuan et al. 2023) takes α = 0.5.
    """

    loss_unit = "half the squared error of the weights, weighted by the magnitudes of inputs"

    kind: Literal["activation_scaling"] = Field(
        "activation_scaling",
        description="error of the weights, each input of W weighted by a power of its mean magnitude (ASVD)",
    )
    alpha: float = Field(0.5, ge=0, description="power α of the mean magnitude; 0: plain SVD")

    statistics: ClassVar[tuple[StatisticKind, ...]] = ("input_magnitudes",)

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        sums, tokens = (statistics[kind][target.input_of] for kind in ("input_magnitudes", "tokens"))
        return ErrorNorm(right=(sums / tokens) ** (2 * self.alpha))


class Inputs(_Weighting):
    """Weighting: minimize the error of the layer's outputs on the calibration inputs (DRONE, eq. 3)."""

    loss_unit = "half the squared error of the layer's outputs, per example"

    kind: Literal["inputs"] = Field(
        "inputs", description="error of the layer's outputs on the calibration inputs (DRONE)"
    )

    statistics: ClassVar[tuple[StatisticKind, ...]] = ("inputs",)

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        return ErrorNorm(right=statistics["inputs"][target.input_of])


class Movement(_Weighting):
    """Weighting: minimize the error W − Ŵ, each row weighted by its score in the pruning (LPAF, section 4.2)."""

    reads_shaping = True

    loss_unit = "half the squared error of the weights, weighted by their scores"

    kind: Literal["movement"] = Field(
        "movement", description="error of the weights, each output of W weighted by its score in the pruning (LPAF)"
    )

    def contradictions(self, recipe: RecipeParts) -> Iterator[Contradiction]:
        if recipe.shaping is None:
            yield "weighting", "movement reads the scores of pruning; add a shaping of kind pruning"

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        """Return the norm with L = diag(Ŝ) for the scores Ŝ of pruning; the scores are L itself, not LᵀL."""
        if "movement" not in statistics:
            raise ValueError("weighting movement reads the scores of pruning: add a shaping of kind pruning")
        return ErrorNorm(left=statistics["movement"][f"{target.name}.output"].square())


class Kfac(_Weighting):
    """Weighting: minimize the second-order increase of the loss, estimated with the Kronecker factors C_in and C_out.

    These are the factors of the empirical Fisher (K-FAC). The squared norm is twice the increase.

    This weighting is published. KFAC-SVD (LEMS, ICML 2026) is the same two-sided whitening by Kronecker factors, token
    by token. IO-SVD (arXiv 2605.15626) whitens both sides from the second order of the KL divergence. GFWSVD was before
    both.
    """

    loss_unit = "increase of the loss per example ÷ number of its labels"
    predicts_loss = True

    kind: Literal["kfac"] = Field(
        "kfac", description="increase of the loss to second order, by both Kronecker factors of the Fisher (K-FAC)"
    )
    shrinkage: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the gradients' second moment that is spread evenly over the outputs; try 0.1 with few "
        "calibration examples",
    )
    input_shrinkage: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="the same share of the inputs' second moment, over the inputs; KFAC-SVD: 0.1, and shrinkage 0.3",
    )
    correlation_shrinkage: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share by which the mean products of two inputs are lowered; 0.3 helps some language models on "
        "texts other than the calibration text",
    )

    statistics: ClassVar[tuple[StatisticKind, ...]] = ("inputs", "output_gradients")

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        """Return the norm for the Fisher C_out ⊗ C_in / T, T tokens per example (Eschenhagen et al. 2023, "expand").

        Without 1/T, a layer with one token per example would seem T times too unimportant compared with other layers.
        T of an expert is below 1 if the router sends it fewer tokens than there are examples.
        """
        tokens = statistics["tokens"][target.input_of]
        inputs = _shrunk(statistics["inputs"][target.input_of], self.input_shrinkage)
        return ErrorNorm(
            left=_shrunk(statistics["output_gradients"][target.name], self.shrinkage),
            right=_decorrelated(inputs, self.correlation_shrinkage) / tokens,
        )

    @property
    def correlations(self) -> float:
        return (1 - self.input_shrinkage) * (1 - self.correlation_shrinkage)


def _shrunk(moment: Tensor, share: float) -> Tensor:
    """Shrink a second moment M towards a multiple of the identity with the same trace (Ledoit and Wolf 2004).

    Returns:
        (1 − share) M + share · tr(M) ÷ n · I.
    """
    if not share:
        return moment
    if moment.dim() == 1:
        return torch.lerp(moment, moment.mean(), share)
    even = torch.eye(len(moment), dtype=moment.dtype, device=moment.device) * moment.diagonal().mean()
    return torch.lerp(moment, even, share)


def _decorrelated(moment: Tensor, share: float) -> Tensor:
    """Shrink a second moment M towards its own diagonal (Schäfer and Strimmer 2005, target D).

    Returns:
        (1 − share) M + share · diag(M), whose diagonal is that of M.
    """
    if not share or moment.dim() == 1:
        return moment
    return torch.lerp(moment, moment.diagonal().diag(), share)


class FisherInputs(_Weighting):
    """Weighting (ours): minimize the output error on the calibration inputs; a Fisher score weighs each output."""

    loss_unit = "half the squared error of the layer's outputs, weighted by their Fisher scores"

    kind: Literal["fisher_inputs"] = Field(
        "fisher_inputs", description="error of the layer's outputs, each weighted by its Fisher score"
    )

    statistics: ClassVar[tuple[StatisticKind, ...]] = ("inputs", "fisher")

    def norm(self, target: Target, statistics: Statistics) -> ErrorNorm:
        return ErrorNorm(
            left=statistics["fisher"][f"{target.name}.output"], right=statistics["inputs"][target.input_of]
        )


Weighting = Annotated[
    Plain | ByScores | ActivationScaling | Inputs | Movement | Kfac | FisherInputs, Field(discriminator="kind")
]


def weigh(weighting: Weighting, target: Target, statistics: Statistics) -> ErrorNorm:
    """Return the norm that `weighting` gives for errors of `target`; an embedding and its head get one norm for both.

    Raises:
        ValueError: a statistic that the weighting reads is missing.
    """
    if lacking := [kind for kind in weighting.statistics if kind not in statistics]:
        raise ValueError(f"weighting {weighting.kind} reads {', '.join(lacking)}: add it to importance.statistics")
    if weighting.statistics and not target.sampled:
        raise ValueError(
            f"weighting {weighting.kind} reads statistics, which do not exist for a layer whose inputs belong to no "
            "example: set targets.unsampled to false"
        )
    if isinstance(target, Tied):
        head = weighting.norm(target.other, statistics)
        return _nearest(weighting.norm(target, statistics), ErrorNorm(left=head.right, right=head.left), target)
    return weighting.norm(target, statistics)


def _nearest(first: ErrorNorm, second: ErrorNorm, target: Target) -> ErrorNorm:
    """Combine the norms of two layers that share a weight: return A and B with A ⊗ B nearest to A₁ ⊗ B₁ + A₂ ⊗ B₂.

    A = Σ xᵢ Aᵢ and B = Σ yᵢ Bᵢ are the best rank-1 approximation of a matrix of rank 2 (Van Loan and Pitsianis 1993).
    No xᵢ or yᵢ is negative, so A and B are also second moments.

    Args:
        first, second: the norms, with sides A₁, B₁ and A₂, B₂.
        target: the first layer; its shape is used for sides that are the identity.
    """
    lefts = _same_form((first.left, second.left), target.out_features)
    rights = _same_form((first.right, second.right), target.in_features)
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


def _same_form(sides: tuple[Side, Side], size: int) -> tuple[Tensor, Tensor]:
    """Return both sides as matrices `(size, size)` if one of them is a matrix, otherwise as diagonals `(size,)`."""
    tensors = [side for side in sides if side is not None]
    like = tensors[0] if tensors else torch.empty(0)
    exact = exact_dtype(like)
    ones = torch.ones(size, dtype=exact, device=like.device)
    a, b = (ones if side is None else side.to(exact) for side in sides)
    if all(tensor.dim() == 1 for tensor in tensors):
        return a, b
    return a if a.dim() == 2 else a.diag(), b if b.dim() == 2 else b.diag()
