"""Stage export: export a candidate to ONNX with float32 and with int8 weights → models/onnx/RECIPE-KEEP, and score both
→ reports/onnx/RECIPE-KEEP.json."""

from __future__ import annotations

import eckart as eckart  # teaches transformers to load the candidate
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import FINETUNED
from tasks.exporting.onnx import export_and_score
from tasks.runtime.stage_runner import run_candidate


def export(recipe: str, keep: str) -> None:
    """Export the fine-tuned candidate to two ONNX files, and score both in onnxruntime."""
    name = candidate_name(recipe, keep)
    export_and_score(name, FINETUNED / name)


if __name__ == "__main__":
    run_candidate("export", export)
