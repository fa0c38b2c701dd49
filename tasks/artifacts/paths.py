"""What the stages of one candidate share: where its files are, and what was decided about its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tasks.artifacts.results_schema import Runtime

RANKS = Path("models/ranks")
SHAPED = "shaped"
"""Beside the ranks: the dense model with weights changed by shaping or search, where they were."""
SCORES = "scores"
"""Beside the ranks: the scores that shaping gave, as statistics."""
FACTORIZED = Path("models/factorized")
FINETUNED = Path("models/finetuned")
SEARCH_CURVES = Path("reports/search")
CURVES = Path("reports/finetune")
EVALUATIONS = Path("reports/evaluate")
ONNX = Path("models/onnx")
"""Of exported candidates, and of `dense`: a folder with these files."""
ONNX_FILES: Mapping[Runtime, str] = {"onnx": "model.onnx", "int8": "int8.onnx"}
"""What runs it → the file."""
EXPORTS = Path("reports/onnx")
CARDS = Path("reports/cards")


def exported_name(name: str) -> str:
    """What the rows of an exported model are called."""
    return f"{name}.onnx"


class Decision(BaseModel):
    """The ranks that a search chose, and what it expects of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: float
    ranks: dict[str, int | None]
    """Target → rank, or null where it stays dense."""
    predicted_loss: dict[str, float] | None
    """Target → half the weighted error that its rank leaves, ½ Σ_{k>r} S_k²: under kfac what the loss increases by.

    Null where the search itself reduced the weights to their ranks, or all ranks are 0.
    """
    parameters_before: int
    parameters_after: int
    """As the recipe stores them; of the factors alone, where a residual stands beside them until it has been pruned."""
    steps: int
    """Training steps that shaping and search took before the factorization."""
    average_rank: float | None
    """Mean numerical rank of the weights that shaping left, in their own precision; null where nothing was shaped."""
    as_shaped: bool
    """Whether the model beside it is what shaping left, and can be scored as that: the search has not changed it."""


def source_model(name: str, begun_with: Path) -> Path:
    """The dense model whose weights candidate `name` factorizes: the one that its recipe begins with, or what shaping
    or search made of it."""
    shaped = RANKS / name / SHAPED
    return shaped if shaped.exists() else begun_with


def decision_file(name: str) -> Path:
    return RANKS / name / "ranks.json"


def load_decision(name: str) -> Decision:
    return Decision.model_validate_json(decision_file(name).read_text())
