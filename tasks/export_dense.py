"""Stage export_dense: export the original model to ONNX, to compare exported candidates with it → models/onnx/dense."""

from __future__ import annotations

import pandas as pd

from tasks.artifacts.paths import EXPORTS, ONNX, exported_name
from tasks.artifacts.results_schema import predictions_file
from tasks.config.schema import Export, section
from tasks.exporting.onnx import export_model
from tasks.models.model_io import TEACHER
from tasks.runtime.stage_runner import output, run


def export_dense() -> None:
    """Export and score the original model, or write empty files if no candidate is exported."""
    if section("export", Export).recipes:
        export_model("dense", TEACHER)
        return
    with output(ONNX / "dense"):  # DVC wants every output to exist
        for file in (predictions_file(exported_name("dense")), EXPORTS / "dense.json"):
            file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame().to_parquet(predictions_file(exported_name("dense")))
        (EXPORTS / "dense.json").write_text("{}")


if __name__ == "__main__":
    run("export_dense", export_dense, threads="candidate")  # as for candidates, whose stages run at the same time
