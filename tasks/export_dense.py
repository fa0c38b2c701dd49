"""Stage export_dense: export the original model and the control to ONNX, to compare exported candidates with them
→ models/onnx/dense and models/onnx/control."""

from __future__ import annotations

import shutil

import pandas as pd

from tasks.artifacts.paths import CONTROL_EXPORT, EXPORTS, ONNX, exported_name
from tasks.artifacts.results_schema import predictions_file
from tasks.config.params_file import section
from tasks.config.schema import Export
from tasks.exporting.onnx import export_model
from tasks.models.model_io import CONTROL, TEACHER
from tasks.runtime.stage_runner import output, run
from tasks.scoring.splits import same_weights


def export_dense() -> None:
    """Export and score the original model and the control, or write empty files if no candidate is exported."""
    exported = section("export", Export).recipes
    for name, source in (("dense", TEACHER), (CONTROL_EXPORT, CONTROL)):
        if not exported:
            _write_empty(name)
        elif name != "dense" and same_weights(TEACHER, source):  # its recovery has no step
            _copy_dense(name)
        else:
            export_model(name, source)


def _copy_dense(name: str) -> None:
    """Give a model that is the original model its files and scores."""
    with output(ONNX / name) as folder:
        shutil.copytree(ONNX / "dense", folder, dirs_exist_ok=True)
    shutil.copyfile(predictions_file(exported_name("dense")), predictions_file(exported_name(name)))
    shutil.copyfile(EXPORTS / "dense.json", EXPORTS / f"{name}.json")


def _write_empty(name: str) -> None:
    """Write what DVC expects as outputs."""
    with output(ONNX / name):
        for file in (predictions_file(exported_name(name)), EXPORTS / f"{name}.json"):
            file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame().to_parquet(predictions_file(exported_name(name)))
        (EXPORTS / f"{name}.json").write_text("{}")


if __name__ == "__main__":
    run("export_dense", export_dense, threads="candidate")  # as for candidates, whose stages run at the same time
