"""Paths of what stages share, and the ranks that were chosen for a candidate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tasks.artifacts.results_schema import Result, Runtime

IMPORTANCE = Path("data/importance")
"""A folder with the calibration statistics and TARGETS."""
TARGETS = IMPORTANCE / "targets.json"
RANKS = Path("models/ranks")
SHAPED = "shaped"
"""The original model as shaping or the search changed it, in a candidate's folder of RANKS, if they did."""
SCORES = "scores"
"""Statistics that shaping gathered, in the same folder."""
FACTORIZED = Path("models/factorized")
FINETUNED = Path("models/finetuned")
SEARCH_CURVES = Path("reports/search")
CURVES = Path("reports/finetune")
EVALUATIONS = Path("reports/evaluate")
ONNX = Path("models/onnx")
"""A folder with ONNX_FILES for each exported candidate, and for `dense`."""
ONNX_FILES: Mapping[Runtime, str] = {"onnx": "model.onnx", "int8": "int8.onnx"}
EXPORTS = Path("reports/onnx")
CARDS = Path("reports/cards")


def exported_name(name: str) -> str:
    """Return the name under which the scores of an exported model are written."""
    return f"{name}.onnx"


class Decision(Result):
    """The ranks that a search chose, and what it expects of them."""

    keep: float
    ranks: dict[str, int | None]
    """Target → rank, or null if it stays dense."""
    predicted_loss: dict[str, float] | None
    """Target → half the weighted error of its rank, ½ Σ_{k>r} S_k²: under kfac the increase of the loss.

    Null if the search itself reduced the weights to their ranks, or all ranks are 0.
    """
    parameters_before: int
    parameters_after: int
    """Parameters as the recipe stores them; of the factors alone, while an unpruned residual is beside them."""
    steps: int
    """Training steps that shaping and search took before the factorization."""
    average_rank: float | None
    """Mean numerical rank of the shaped weights, in their own precision; null if nothing was shaped."""
    as_shaped: bool
    """Whether SHAPED can be scored as the result of shaping: the search has not changed it."""


def source_model(name: str, original: Path) -> Path:
    """Return the folder of the dense model that candidate `name` factorizes: SHAPED if it is there, or `original`."""
    shaped = RANKS / name / SHAPED
    return shaped if shaped.exists() else original


def decision_file(name: str) -> Path:
    return RANKS / name / "ranks.json"


def load_decision(name: str) -> Decision:
    return Decision.model_validate_json(decision_file(name).read_text())
