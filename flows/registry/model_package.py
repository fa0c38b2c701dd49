"""Write a version: the Hugging Face folder, the code that answers, and what MLflow must know to serve them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.models import ModelSignature
from mlflow.types.schema import Schema

import eckart
import tasks
from flows.registry import pyfunc_model
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import STRING, STRINGS

MODEL = "artifacts/model"
"""Where a version has its Hugging Face folder."""

_REQUIRED = ("mlflow", "torch", "transformers", "safetensors", "accelerate", "pydantic", "pandas")
_EXAMPLE = {"text": "An example.", "text_pair": "Another one."}


def save(
    model: Path, folder: Path, task: Task, pairs: bool, batch_size: int, continuation: int, onnx: Path | None = None
) -> None:
    """Write a Hugging Face folder as a model that MLflow serves, with the code of eckart and tasks.

    Args:
        onnx: a folder with the same model for onnxruntime, which the version carries besides.
        pairs: whether rows are pairs of texts.
        batch_size: rows that are answered at a time.
        continuation: tokens that a language model writes behind a text.
    """
    with tempfile.TemporaryDirectory() as temporary:
        artifacts = {"model": model} if onnx is None else {"model": model, "onnx": onnx}
        for name, source in artifacts.items():  # MLflow refuses links, and DVC may have made some
            shutil.copytree(source, Path(temporary) / name)
        mlflow.pyfunc.save_model(
            folder,
            python_model=pyfunc_model.__file__,
            artifacts={name: str(Path(temporary) / name) for name in artifacts},
            code_paths=[package.__path__[0] for package in (eckart, tasks)],
            signature=ModelSignature(questions(task, pairs), _schema(kind_of(task).answer_columns)),
            input_example=example(task, pairs),
            # without `+cpu`, which no index knows
            pip_requirements=[f"{name}=={metadata.version(name).partition('+')[0]}" for name in _REQUIRED],
            model_config=settings_of(task, batch_size, continuation),
        )


def settings_of(task: Task, batch_size: int, continuation: int) -> dict[str, Any]:
    """Return the settings of `Served`."""
    return {"task": task.model_dump(mode="json"), "batch_size": batch_size, "continuation": continuation}


def questions(task: Task, pairs: bool) -> Schema:
    """Return the columns that a version reads: words come as a list, as the task has them."""
    text = STRINGS if kind_of(task).text_is_words else STRING
    return _schema({"text": text} | ({"text_pair": STRING} if pairs else {}))


def _schema(columns: Mapping[str, Mapping[str, Any]]) -> Schema:
    return Schema.from_json(json.dumps([{"required": True, **type_, "name": name} for name, type_ in columns.items()]))


def example(task: Task, pairs: bool) -> pd.DataFrame:
    """Return a row of `questions`."""
    row: dict[str, Any] = {name: _EXAMPLE[name] for name in ("text", "text_pair")[: 1 + pairs]}
    if kind_of(task).text_is_words:
        row["text"] = row["text"].split()
    return pd.DataFrame([row])
