"""The result of a rank search: the file ranks.json of a candidate."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from eckart.model.mlps import Width
from tasks.artifacts.paths import RANKS
from tasks.artifacts.results_schema import Result


class Decision(Result):
    """Result of a rank search: the rank of each target, the loss predicted for it, and the numbers of parameters."""

    keep: float
    ranks: dict[str, int | None]
    """Target → its rank, or null if the target stays dense."""
    predicted_loss: dict[str, float] | None
    """Target → half the weighted squared error after truncation to its rank r: ½ Σ_{k>r} S_k².

    S_k are the singular values of the weighted matrix. With the weighting kfac, this estimates the increase of the
    loss. The down target of a narrowed MLP has the loss of its width besides. Null if the search itself reduced the
    weights to their ranks, or if all ranks are 0.
    """
    parameters_before: int
    parameters_after: int
    """Number of parameters of all targets at these ranks, in the recipe's storage, without biases and residual."""
    steps: int
    """Training steps that shaping and search took before the factorization."""
    reached: dict[float, int] = Field(default_factory=dict)
    """Share of the targets' parameters → steps after which a search by thresholds first kept no more than this share.

    For each quarter above keep, and keep.
    """
    widths: dict[str, Width] = Field(default_factory=dict)
    """Down target of each MLP that is narrowed → its width. A rank of its targets is that of the smaller layer."""
    average_rank: float | None
    """Mean numerical rank of the target layers' weights after shaping; null if nothing was shaped."""
    as_shaped: bool
    """Whether only shaping has changed the model in SHAPED, so that its score shows the effect of shaping."""

    @property
    def reached_in_words(self) -> str:
        """The shares in `reached`, each with its steps; "" if there are none."""
        return ", ".join(f"keep {share:g} after {steps:,} steps" for share, steps in self.reached.items())

    @property
    def narrowed(self) -> frozenset[str]:
        """Names of the targets that lose neurons, factorized or not."""
        return frozenset(name for down, width in self.widths.items() for name in (*width.up, down))


def decision_file(name: str) -> Path:
    return RANKS / name / "ranks.json"


def load_decision(name: str) -> Decision:
    return Decision.model_validate_json(decision_file(name).read_text())
