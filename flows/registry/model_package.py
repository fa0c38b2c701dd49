"""What a version is made of: the Hugging Face folder, eckart's code, and what MLflow must know to serve them."""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.models import ModelSignature
from mlflow.types.schema import Array, ColSpec, DataType, Schema

import eckart
from flows.registry import pyfunc_model
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of

MODEL = "artifacts/model"
"""Where a version has its Hugging Face folder."""

_REQUIRED = ("mlflow", "torch", "transformers", "safetensors", "accelerate", "pydantic", "pandas")
_EXAMPLE = {"text": "An example.", "text_pair": "Another one."}


def save(
    model: Path, folder: Path, task: Task, pairs: bool, batch_size: int, continuation: int, onnx: Path | None = None
) -> None:
    """Write a Hugging Face folder as a model that MLflow serves, eckart's code included.

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
            code_paths=[str(Path(eckart.__file__).parent)],
            signature=ModelSignature(questions(task, pairs), pyfunc_model.ANSWERS[task.kind]),
            input_example=example(task, pairs),
            pip_requirements=[f"{name}=={_public(name)}" for name in _REQUIRED],
            model_config=settings_of(task, batch_size, continuation),
        )


def settings_of(task: Task, batch_size: int, continuation: int) -> dict[str, Any]:
    """What `Served` is told."""
    read = ("kind", "max_length", "target_length", "prefix", "stride")
    auto = kind_of(task).auto.__name__
    return {**task.model_dump(include=set(read)), "auto": auto, "batch_size": batch_size, "continuation": continuation}


def questions(task: Task, pairs: bool) -> Schema:
    """The columns that a version reads: words come as a list, as the task has them."""
    text = Array(DataType.string) if task.kind == "token_classification" else DataType.string
    return Schema([ColSpec(text, "text"), *([ColSpec(DataType.string, "text_pair")] if pairs else [])])


def example(task: Task, pairs: bool) -> pd.DataFrame:
    """A row of `questions`."""
    row: dict[str, Any] = {name: _EXAMPLE[name] for name in ("text", "text_pair")[: 1 + pairs]}
    if task.kind == "token_classification":
        row["text"] = row["text"].split()
    return pd.DataFrame([row])


def _public(package: str) -> str:
    """The version that an index knows: without `+cpu`."""
    return importlib.metadata.version(package).partition("+")[0]
