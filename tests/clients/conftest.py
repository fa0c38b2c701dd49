"""Models for the tools of others. `make clients` installs them; without a tool, its tests are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from eckart.factorization.pivoted_storage import pivot
from eckart.model.batches import without_labels
from eckart.model.hf_format import describe, save
from tests import tiny

BATCH = without_labels(tiny.collate(tiny.samples(8)))
WIDTH, RANK = 128, 32  # tools ask for multiples of 16, 32 or 64


@pytest.fixture(params=["factors", "pivoted", "rows"])
def compressed(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A BERT with all targets in factors, in pivots, or in factors and sparse rows."""
    return small(request.param)


def small(stored: str = "factors", rank: int = RANK) -> PreTrainedModel:
    model = tiny.of(
        "BertForSequenceClassification",
        **{**tiny.LAYERS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH},
        **tiny.LENGTH,
    )()
    tiny.factorize(model, BATCH, lambda _: rank, residual=stored == "rows")
    if stored == "pivoted":
        pivot(model)
    describe(model)
    return model.eval()


@pytest.fixture
def folder(compressed: PreTrainedModel, tmp_path: Path) -> Path:
    save(compressed, tmp_path / "compressed")
    return tmp_path / "compressed"


def distance(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ ÷ ‖expected‖."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def logits(model: Any) -> Tensor:
    return tiny.logits(model, BATCH)
