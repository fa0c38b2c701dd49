"""Residuals: what stands beside the factors of a target. One file each."""

from __future__ import annotations

from eckart.residual.sparse_rows import SparseRows

Residual = SparseRows
