"""A batch: what a model is called with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Batch = Mapping[str, Tensor]
"""Name of an input → values, each `(batch, …)`."""
