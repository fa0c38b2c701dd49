"""Export dense: write the teacher as candidates are written, to compare with → models/onnx/dense."""

from __future__ import annotations

import pandas as pd

from tasks.candidate_files import EXPORTS, ONNX, exported_name
from tasks.models import TEACHER
from tasks.onnx_files import export_and_score
from tasks.params import Export, section
from tasks.records import rows_file
from tasks.stage import output, run


def export_dense() -> None:
    """Write and score the teacher; nothing, where no candidate is exported."""
    if section("export", Export).recipes:
        export_and_score("dense", TEACHER)
        return
    with output(ONNX / "dense"):  # DVC wants all that a stage may write
        for file in (rows_file(exported_name("dense")), EXPORTS / "dense.json"):
            file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame().to_parquet(rows_file(exported_name("dense")))
        (EXPORTS / "dense.json").write_text("{}")


if __name__ == "__main__":
    run("export_dense", export_dense, threads="candidate")  # it runs beside the candidates, and is compared with them
