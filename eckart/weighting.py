"""Weightings: what matters about a target's error, as a norm of it.

A weighting turns evidence into L and R of ‖L (W − Ŵ) R‖_F. Only their squares A = LᵀL `(out, out)` and B = R Rᵀ
`(in, in)` are ever stated: evidence consists of such second moments, and the decomposition needs a root of the smaller
one alone (eckart/svd.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eckart.evidence import Axis, Evidence, EvidenceKind
from eckart.targets import Target

Side = Tensor | None
"""LᵀL or R Rᵀ, positive semidefinite: `(n, n)`, or `(n,)` for a diagonal one, or None for the identity."""


@dataclass(frozen=True)
class ErrorNorm:
    """‖L E R‖_F: `left` is LᵀL over outputs, `right` is R Rᵀ over inputs."""

    left: Side = None
    right: Side = None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Plain(_Part):
    """Every entry of W counts alike: SVD."""

    kind: Literal["none"]


class Scored(_Part):
    """Rows or columns count by their Fisher (FWSVD) or Taylor (IWSVD) score.

    FWSVD sums the Fisher over the rows of W in y = xW, which are inputs: axis `input`.
    """

    kind: Literal["fisher", "taylor"]
    axis: Axis


class Inputs(_Part):
    """The error of the outputs on the calibration inputs: DRONE, eq. 3."""

    kind: Literal["inputs"]


class Movement(_Part):
    """The error of each output, by the scores with which shaping pruned its row: LPAF, section 4.2."""

    kind: Literal["movement"]


class Kfac(_Part):
    """Twice the second-order increase of the loss, as the Kronecker factors of the empirical Fisher estimate it."""

    kind: Literal["kfac"]


class FisherInputs(_Part):
    """Fisher score of each output, second moment of the inputs."""

    kind: Literal["fisher_inputs"]


Weighting = Annotated[Plain | Scored | Inputs | Movement | Kfac | FisherInputs, Field(discriminator="kind")]


def evidence_needed(weighting: Weighting) -> tuple[EvidenceKind, ...]:
    """The kinds of evidence that `weighting` reads; shaping's scores are none, as no pass gathers them."""
    match weighting:
        case Plain() | Movement():
            return ()
        case Scored(kind=kind):
            return (kind,)
        case Inputs():
            return ("inputs",)
        case Kfac():
            return ("inputs", "output_gradients")
        case FisherInputs():
            return ("inputs", "fisher")


def weigh(weighting: Weighting, target: Target, evidence: Evidence) -> ErrorNorm:
    """The norm of errors of `target` under `weighting`.

    Raises:
        ValueError: the evidence lacks what the weighting reads.
    """
    if lacking := [kind for kind in evidence_needed(weighting) if kind not in evidence]:
        raise ValueError(f"weighting {weighting.kind} reads {', '.join(lacking)}: add it to importance.evidence")
    if isinstance(weighting, Movement) and "movement" not in evidence:
        raise ValueError("weighting movement reads the scores of pruning: add a shaping of kind pruning")
    match weighting:
        case Plain():
            return ErrorNorm()
        case Scored(kind=kind, axis="input"):
            return ErrorNorm(right=evidence[kind][f"{target.name}.input"])
        case Scored(kind=kind):
            return ErrorNorm(left=evidence[kind][f"{target.name}.output"])
        case Inputs():
            return ErrorNorm(right=evidence["inputs"][target.input_of])
        case Movement():  # L = diag(Ŝ), not its root
            return ErrorNorm(left=evidence["movement"][f"{target.name}.output"].square())
        case Kfac():
            # With weights shared by T tokens the Fisher is C_out ⊗ C_in / T (Eschenhagen et al. 2023, "expand");
            # without the 1/T a layer that sees one token per sample would seem T times too unimportant.
            tokens = evidence["tokens"][target.input_of]
            return ErrorNorm(
                left=evidence["output_gradients"][target.name],
                right=evidence["inputs"][target.input_of] / torch.clamp(tokens, min=1),
            )
        case FisherInputs():
            return ErrorNorm(
                left=evidence["fisher"][f"{target.name}.output"], right=evidence["inputs"][target.input_of]
            )
