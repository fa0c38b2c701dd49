"""Smoke test of a version: in a new process, MLflow loads it and has it answer questions, as a user would do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd

from flows.engine import supervisor
from flows.environment.redaction import redact
from tasks.artifacts.errors import EckartError

_PATIENCE = 600  # seconds until a version must have answered
_EXAMPLE = "serving_input_example.json"  # MLflow's file for the example that `model_package.save` gives it

# As `mlflow models predict` does, whose command line takes a fifth longer, since it imports MLflow's server.
_PROGRAM = """
import sys
from mlflow.models import predict
model, question, answer = sys.argv[1:]
predict(model, input_path=question, output_path=answer, content_type="json", env_manager="local")
"""


class SmokeFailed(EckartError):
    """A version cannot be loaded, does not answer, or gives wrong answers. The message says what is wrong."""


def ask(model: str, rows: pd.DataFrame | None = None) -> list[dict[str, Any]]:
    """Load a version in a new process, and return its answers.

    Args:
        model: URI of the version, such as `models:/NAME/3`, or the folder of its files.
        rows: the questions; None: the example that is part of the version.

    Raises:
        SmokeFailed: the version cannot be loaded, does not answer in time, or a number in its answers is not finite.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / _EXAMPLE, Path(folder) / "answer.json"
        if rows is None:
            try:
                mlflow.artifacts.download_artifacts(f"{model}/{_EXAMPLE}", dst_path=folder)
            except Exception as error:  # each kind of store raises other errors
                raise SmokeFailed(f"its example cannot be downloaded: {redact(str(error))}") from error
        else:
            split = rows.to_dict(orient="split", index=False)
            # default=list: pandas holds a list of words as an array
            question.write_text(json.dumps({"dataframe_split": split}, default=list))
        _predict(model, question, answer)
        answers: list[dict[str, Any]] = json.loads(answer.read_text())["predictions"]
    cells = [value if isinstance(value, list) else [value] for row in answers for value in row.values()]
    numbers = [value for value in chain(*cells) if isinstance(value, float)]
    if not all(map(math.isfinite, numbers)):
        raise SmokeFailed(f"not all numbers that it answers are finite: {numbers}")
    return answers


def _predict(model: str, question: Path, answer: Path) -> None:
    # -P: do not import modules from the working directory
    words = ["-P", "-c", _PROGRAM, model, str(question), str(answer)]
    try:
        process = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            preexec_fn=supervisor.die_with_parent,
        )
    except subprocess.TimeoutExpired as error:
        raise SmokeFailed(f"it did not answer within {_PATIENCE} s") from error
    if process.returncode:
        raise SmokeFailed(redact(" ".join(process.stderr.strip().splitlines()[-1:])) or "it ended without a message")
