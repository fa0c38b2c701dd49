"""The stage export_dense, with an export that only notes what it is asked for."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from tasks import export_dense
from tasks.artifacts.paths import EXPORTS, ONNX, exported_name
from tasks.artifacts.results_schema import predictions_file
from tasks.config.schema import Export
from tasks.models.model_io import CONTROL, TEACHER


@pytest.mark.parametrize(("trained", "exports"), [(0.0, ["dense"]), (1.0, ["dense", "control"])])
def test_a_control_without_a_training_step_has_the_files_of_the_original(
    trained: float, exports: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, weight in ((TEACHER, 0.0), (CONTROL, trained)):
        folder.mkdir(parents=True)
        save_file({"weight": torch.tensor([weight])}, folder / "model.safetensors")
    made = []

    def export_model(name: str, source: Path) -> None:
        made.append(name)
        for file in (ONNX / name / "int8.onnx", EXPORTS / f"{name}.json", predictions_file(exported_name(name))):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(str(source))

    monkeypatch.setattr(export_dense, "export_model", export_model)
    monkeypatch.setattr(export_dense, "section", lambda name, kind: Export(recipes=("kfac",)))
    export_dense.export_dense()
    assert made == exports
    of = TEACHER if trained == 0 else CONTROL
    for file in (ONNX / "control/int8.onnx", EXPORTS / "control.json", predictions_file("control.onnx")):
        assert file.read_text() == str(of)


def test_nothing_is_exported_if_no_recipe_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export_dense, "section", lambda name, kind: Export(recipes=()))
    export_dense.export_dense()
    for name in ("dense", "control"):
        assert (ONNX / name).is_dir()
        assert (EXPORTS / f"{name}.json").read_text() == "{}"
        assert pd.read_parquet(predictions_file(exported_name(name))).empty
