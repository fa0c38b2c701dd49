"""Paths of the files that stages share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tasks.artifacts.results_schema import Runtime

IMPORTANCE = Path("data/importance")
"""Folder of the calibration statistics and of TARGETS."""
TARGETS = IMPORTANCE / "targets.json"
CALIBRATION = Path("data/calibration.parquet")
"""The calibration examples as tokens, of all texts."""
SHARDS = Path("data/shards")
"""Folder with a folder for each of `importance.shards`: the files of IMPORTANCE, from a part of the examples."""
LOGITS = Path(".eckart/teacher-logits")
"""Folder with a folder for each original model and data, and in it one for each of the settings that logits have."""
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
COMPARISON_PAGE = Path("reports/comparison.html")
COMPARISON_TEXT = Path("reports/comparison.txt")
COMPARISON_TABLE = Path("reports/comparison.csv")
COMPARISON_PICTURE = Path("reports/comparison.png")
RUNTIMES = Path("reports/runtimes.csv")


def exported_name(name: str) -> str:
    """Return the `name` of an exported model's per-example results in `predictions_file`, such as `kfac-0.33.onnx`."""
    return f"{name}.onnx"


def source_model(name: str, original: Path) -> Path:
    """Return the folder of the model that is factorized for candidate `name`: SHAPED if it exists, else `original`."""
    shaped = RANKS / name / SHAPED
    return shaped if shaped.exists() else original
