"""Residuals: matrices that are added to the factors of a target. Each kind has its own file."""

from __future__ import annotations

from eckart.residual.sparse_rows import SparseRows

Residual = SparseRows
