"""Sums of gradients and of squared gradients, and Gram matrices of a batch, computed fast and in little memory.

Notation as in eckart/calibration/statistics.py: X_n `(tokens, in)` and Δ_n `(tokens, out)` are the inputs and output
gradients of example n, and G_n = Δ_nᵀ X_n `(out, in)` is its gradient by the weight W.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

SquareSums = dict[str, tuple[Tensor, Tensor]]
"""Kind, fisher or taylor → its squares, summed over outputs `(in,)`, and summed over inputs `(out,)`."""

_PANEL = 128  # number of rows of a Gram matrix that are computed at once
_STRIP = 256  # number of rows of a gradient and of its squares that fit into the CPU's cache


def square_sums(x: Tensor, delta: Tensor, weight: Tensor, kinds: Collection[str]) -> SquareSums:
    """Return the sums for fisher, Σ_n G_n ⊙ G_n, and for taylor, Σ_n (G_n ⊙ W) ⊙ (G_n ⊙ W), of a batch.

    Args:
        x: inputs `(batch, tokens, in)`.
        delta: output gradients `(batch, tokens, out)`.
        weight: W `(out, in)`.
        kinds: which of fisher and taylor to compute.
    """
    tokens, columns, rows = x.shape[1], x.shape[2], delta.shape[2]
    if set(kinds) == {"fisher"} and 2 * tokens * (rows + columns) <= rows * columns:
        # without G_n: Σ_i G_ij² = [Xᵀ (Δ Δᵀ) X]_jj, and likewise for the other axis
        by_input = (x * (delta @ delta.mT @ x)).sum((0, 1))
        by_output = (delta * (x @ x.mT @ delta)).sum((0, 1))
        return {"fisher": (by_input.clamp(min=0), by_output.clamp(min=0))}  # below 0 only by rounding
    squares, sums = x.new_zeros(rows, columns), {}
    for block in _row_blocks(squares, _STRIP):
        for inputs, gradients in zip(x, delta, strict=True):
            gradient = gradients[:, block].T @ inputs
            squares[block].addcmul_(gradient, gradient)
    if "fisher" in kinds:
        sums["fisher"] = squares.sum(0), squares.sum(1)
    if "taylor" in kinds:
        squares.mul_(weight.to(x.dtype).square())  # W² is the same for all examples
        sums["taylor"] = squares.sum(0), squares.sum(1)
    return sums


def gradient_sum(x: Tensor, delta: Tensor, columns: int, ids: bool) -> Tensor:
    """Return the sum of the gradients of a batch's examples, Σ_n G_n `(out, in)`.

    Args:
        x: inputs `(batch, tokens, in)`, or ids `(batch, tokens, 1)`.
        delta: output gradients `(batch, tokens, out)`, zero at padding tokens.
        columns: in.
        ids: whether x are ids, which stand for one-hot rows.
    """
    rows = delta.flatten(0, 1)
    if ids:
        return rows.new_zeros(rows.shape[1], columns).index_add_(1, x.flatten(), rows.T)
    return rows.T @ x.flatten(0, 1)


def lookup_sums(ids: Tensor, delta: Tensor, weight: Tensor, kinds: Collection[str]) -> SquareSums:
    """Return the sums of `square_sums` for an embedding; only columns of W that an example looks up have a gradient.

    Args:
        ids: `(batch, tokens, 1)`.
        delta: output gradients `(batch, tokens, out)`, zero at padding tokens.
        weight: W `(out, in)`.
    """
    sums = {kind: (delta.new_zeros(weight.shape[1]), delta.new_zeros(weight.shape[0])) for kind in kinds}
    for example_ids, gradients in zip(ids.squeeze(-1), delta, strict=True):
        seen, places = example_ids.unique(return_inverse=True)
        gradient = delta.new_zeros(len(seen), weight.shape[0]).index_add_(0, places, gradients)
        for kind, (by_input, by_output) in sums.items():
            squares = (gradient * weight.T[seen] if kind == "taylor" else gradient).square()
            by_input[seen] += squares.sum(1)
            by_output += squares.sum(0)
    return sums


def lookup_counts(ids: Tensor, mask: Tensor | None, size: int) -> Tensor:
    """Count how often each of `size` ids is looked up `(size,)`: the diagonal of Σ_n X_nᵀ X_n for one-hot inputs X_n.

    Args:
        mask: 0 at padding tokens; None if there is no padding.
    """
    flat = ids.flatten() if mask is None else ids.flatten()[mask.flatten() != 0]
    return torch.bincount(flat, minlength=size)


def add_gram(total: Tensor, x: Tensor) -> None:
    """Add XᵀX for X = `x` `(tokens, features)` to the upper triangle of `total` `(features, features)`, in place.

    A single product would compute both triangles and take up to 1.9 times the time. Blocks on the diagonal are computed
    in full; `mirror` fills in all entries below these blocks.
    """
    for rows in _row_blocks(total, _PANEL):
        total[rows, rows.start :].addmm_(x[:, rows].T, x[:, rows.start :])


def mirror(total: Tensor) -> None:
    """Copy the upper triangle that `add_gram` computed into the lower triangle."""
    for end in range(_PANEL, len(total), _PANEL):
        rows = slice(end - _PANEL, end)
        total[end:, rows] = total[rows, end:].T


def _row_blocks(matrix: Tensor, size: int) -> Iterator[slice]:
    """Yield slices of `size` rows that cover `matrix`; on other devices than the CPU, yield a single slice.

    Accelerators are faster with few large products, and mps cannot add into parts of a tensor.
    """
    size = size if matrix.device.type == "cpu" else len(matrix)
    return (slice(start, start + size) for start in range(0, len(matrix), size))
