"""Stage export: write a candidate as ONNX, in float32 and in int8, and score both → models/onnx/RECIPE-KEEP."""

from __future__ import annotations

import eckart as eckart  # teaches transformers to load the candidate
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import FINETUNED
from tasks.exporting.onnx import export_model
from tasks.runtime.stage_runner import run_candidate


def export(recipe: str, keep: str) -> None:
    """Write the fine-tuned model as ONNX files and score them in onnxruntime."""
    name = candidate_name(recipe, keep)
    export_model(name, FINETUNED / name)


if __name__ == "__main__":
    run_candidate("export", export)
