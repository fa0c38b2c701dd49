"""Robust gradients: no token's gradient counts too much in `output_gradients`, and the ends of an example do not count.

Source: LEMS (ICML 2026), for the factor C_out of KFAC-SVD, with `clip` (0.1, 10) and `edges` 0.125. Let δ_t be the
output gradient of a target at token t of an example, and m the mean norm over the tokens that have a gradient::

    edges e    the first and the last ⌊e T⌋ of the example's T tokens are left out
    clip       δ_t is scaled to the norm clamp(‖δ_t‖, low · m, high · m)

An example has a mean of its own, so the statistics do not depend on batches or on the number of passes. Padding is
neither counted nor an end. A target's calls have means of their own, too, if it runs several times for a batch.

Departs from the authors' code: the tokens that are used also stand for those that are left out, so that the sum over
tokens keeps its size and predicted losses of layers stay comparable. For examples of one length this is one factor. And
a gradient is zero here if it is negligible beside the largest of the example, not below a fixed number.

As in that code, inputs are not touched: the layer must compute the first and the last token as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

_NEGLIGIBLE = 1e-5
"""Norm ÷ largest norm of the example below which a gradient is rounding, and is not scaled up. For instance, a causal
model's first token attends only to itself, so that its query has a gradient of zero."""


@dataclass(frozen=True)
class RobustGradients:
    """Settings of the output gradients that are summed; by default they are summed as they are.

    Attributes:
        clip: (low, high), limits of the norm of a token's gradient, in units of the mean norm in its example; low is
            at most 1, high at least 1. None: no limits.
        edges: share of an example's tokens that is left out at each end, in [0, 0.4].

    Raises:
        ValueError: a number is outside its range.
    """

    clip: tuple[float, float] | None = None
    edges: float = 0.0

    def __post_init__(self) -> None:
        pair = self.clip if isinstance(self.clip, Sequence) and len(self.clip) == 2 else (1, 0)
        if self.clip is not None and not 0 <= pair[0] <= 1 <= pair[1]:
            raise ValueError(f"clip={self.clip}: give two numbers, one in [0, 1] and one of 1 or more, as in (0.1, 10)")
        if not 0 <= self.edges <= 0.4:
            raise ValueError(f"edges={self.edges}: give a share in [0, 0.4], such as 0.125")

    def __call__(self, gradients: Tensor, mask: Tensor | None) -> Tensor:
        """Return the gradients to sum.

        Args:
            gradients: a call's output gradients `(batch, tokens, out)`, zero at padding.
            mask: 0 at padding, `(batch, tokens)`; None if there is no padding.
        """
        if self.edges:
            gradients = _without_edges(gradients, mask, self.edges)
        return _clipped(gradients, *self.clip) if self.clip else gradients


UNCHANGED = RobustGradients()
"""The settings with which all gradients are summed as they are."""


def _without_edges(gradients: Tensor, mask: Tensor | None, share: float) -> Tensor:
    real = torch.ones(gradients.shape[:2], device=gradients.device) if mask is None else (mask != 0).float()
    tokens = real.sum(1, keepdim=True)
    cut = (share * tokens).floor()
    number = real.cumsum(1)  # of a token in its example, from 1
    used = (real > 0) & (number > cut) & (number <= tokens - cut)
    stands_for = tokens / used.sum(1, keepdim=True).clamp(min=1)
    return gradients * (used * stands_for.sqrt()).unsqueeze(-1).to(gradients.dtype)


def _clipped(gradients: Tensor, low: float, high: float) -> Tensor:
    norms = vector_norm(gradients, dim=-1)
    counts = norms > _NEGLIGIBLE * norms.amax(1, keepdim=True)
    mean = (norms * counts).sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(min=1)
    scales = torch.where(counts, norms.clamp(low * mean, high * mean) / norms, 1)
    return gradients * scales.unsqueeze(-1)
