"""Paths of the files that stages share, and the type of the file with a candidate's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from eckart.model.widths import Width
from tasks.artifacts.results_schema import Result, Runtime

IMPORTANCE = Path("data/importance")
"""Folder of the calibration statistics and of TARGETS."""
TARGETS = IMPORTANCE / "targets.json"
WRITTEN = Path("data/written/blocks.parquet")
"""Calibration blocks that the original model has written, as token ids."""
SHARDS = Path("data/shards")
"""Folder with a folder for each of `importance.shards`: the files of IMPORTANCE, from a part of the examples."""
RANKS = Path("models/ranks")
SHAPED = "shaped"
"""Name of the folder in `RANKS / candidate` with the changed model, if shaping or the search changed the weights."""
SCORES = "scores"
"""Name of the folder in `RANKS / candidate` with the statistics that shaping gathered."""
FACTORIZED = Path("models/factorized")
FINETUNED = Path("models/finetuned")
SEARCH_CURVES = Path("reports/search")
CURVES = Path("reports/finetune")
EVALUATIONS = Path("reports/evaluate")
ONNX = Path("models/onnx")
"""Folder of the exported models: one folder for each exported candidate, `dense` and the control, with ONNX_FILES."""
CONTROL_EXPORT = "control"
"""Name of the exported control, beside `dense` and the names of candidates."""
ONNX_FILES: Mapping[Runtime, str] = {"onnx": "model.onnx", "int8": "int8.onnx"}
EXPORTS = Path("reports/onnx")
CARDS = Path("reports/cards")


def exported_name(name: str) -> str:
    """Return the `name` of an exported model's per-example results in `predictions_file`, such as `kfac-0.33.onnx`."""
    return f"{name}.onnx"


class Decision(Result):
    """Result of a rank search: the rank of each target, the loss predicted for it, and the numbers of parameters."""

    keep: float
    ranks: dict[str, int | None]
    """Target → its rank, or null if the target stays dense."""
    predicted_loss: dict[str, float] | None
    """Target → half the weighted squared error after truncation to its rank r: ½ Σ_{k>r} S_k².

    S_k are the singular values of the weighted matrix. With the weighting kfac, this estimates the increase of the
    loss. Null if the search itself reduced the weights to their ranks, or if all ranks are 0.
    """
    parameters_before: int
    parameters_after: int
    """Number of parameters of all targets at these ranks, in the recipe's storage, without biases and residual."""
    steps: int
    """Training steps that shaping and search took before the factorization."""
    widths: dict[str, Width] = Field(default_factory=dict)
    """Down target of each MLP that is narrowed → its width; the targets of these MLPs have no rank."""
    average_rank: float | None
    """Mean numerical rank of the target layers' weights after shaping; null if nothing was shaped."""
    as_shaped: bool
    """Whether only shaping has changed the model in SHAPED, so that its score shows the effect of shaping."""

    @property
    def narrowed(self) -> frozenset[str]:
        """Names of the targets that lose neurons: they are smaller, but have no rank."""
        return frozenset(name for down, width in self.widths.items() for name in (*width.up, down))


def source_model(name: str, original: Path) -> Path:
    """Return the folder of the model that is factorized for candidate `name`: SHAPED if it exists, else `original`."""
    shaped = RANKS / name / SHAPED
    return shaped if shaped.exists() else original


def decision_file(name: str) -> Path:
    return RANKS / name / "ranks.json"


def load_decision(name: str) -> Decision:
    return Decision.model_validate_json(decision_file(name).read_text())
