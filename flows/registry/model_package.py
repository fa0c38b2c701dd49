"""Write the files of a version: the Hugging Face folder, the code that runs it, and MLflow's settings to serve it."""

from __future__ import annotations

import hashlib
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
from mlflow.types.schema import ColSpec, Schema

import eckart
import tasks
from flows.registry import pyfunc_model
from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.nlp_tasks.nlp_task import STRING

MODEL = "artifacts/model"
"""Path of the Hugging Face folder in the files of a version."""

_REQUIRED = ("mlflow", "torch", "transformers", "safetensors", "accelerate", "pydantic", "pandas")
_WORDS = {"type": "array", "items": {"type": "any"}}
"""Type of a text that is a list of words. As strings, MLflow would turn null into the word None."""

_EXAMPLE = {"text": "An example.", "text_pair": "Another one."}


def save(
    model: Path, folder: Path, task: Task, pairs: bool, batch_size: int, continuation: int, onnx: Path | None = None
) -> None:
    """Save a Hugging Face folder as a model that MLflow can serve, with the code of the packages eckart and tasks.

    Args:
        model: the Hugging Face folder.
        folder: the new folder to write.
        pairs: whether each input is a pair of texts.
        batch_size: number of inputs that are answered at a time.
        continuation: number of tokens that a language model writes after a text.
        onnx: a folder with the same model for onnxruntime, to add to the version; None: the version has none.
    """
    with tempfile.TemporaryDirectory() as temporary:
        artifacts = {"model": model} if onnx is None else {"model": model, "onnx": onnx}
        for name, source in artifacts.items():  # copied, because MLflow refuses links, and DVC may have made some
            shutil.copytree(source, Path(temporary) / name)
        mlflow.pyfunc.save_model(
            folder,
            python_model=pyfunc_model.__file__,
            artifacts={name: str(Path(temporary) / name) for name in artifacts},
            code_paths=[package.__path__[0] for package in (eckart, tasks)],
            signature=ModelSignature(questions(task, pairs), _schema(kind_of(task).answer_columns)),
            input_example=example(task, pairs),
            # without a suffix such as `+cpu`, which package indexes do not have
            pip_requirements=[f"{name}=={metadata.version(name).partition('+')[0]}" for name in _required(model)],
            model_config=settings_of(task, batch_size, continuation),
        )


def _required(model: Path) -> tuple[str, ...]:
    """Return the names of the packages that a Hugging Face folder needs to be served."""
    fast = (model / "tokenizer.json").exists()  # without it, the tokenizer's SentencePiece models are read
    of_pieces = not fast and any(file.suffix in (".spm", ".model") for file in model.iterdir())
    return (*_REQUIRED, "sentencepiece") if of_pieces else _REQUIRED


def settings_of(task: Task, batch_size: int, continuation: int) -> dict[str, Any]:
    """Return the settings of `pyfunc_model.Served`, which MLflow stores as `model_config`."""
    answering = {"batch_size": batch_size, "continuation": continuation, "column": None}
    return {"task": task.model_dump(mode="json"), **answering}


def answering(task: Task, pairs: bool) -> str:
    """Return a digest of what answers depend on beside the model's files: the task's settings and Eckart's release.

    Not of `promotion.continuation`: a version keeps the number with which it was registered.
    """
    of_scores = {"metric", "sizes", "seed", "calibration_blocks"}
    settings = task.model_dump(mode="json", exclude=of_scores)
    content = {"task": settings, "pairs": pairs, "eckart": eckart.__version__}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def questions(task: Task, pairs: bool) -> Schema:
    """Return the schema of a version's input columns. In a task on words, each text is a list of words.

    A single column has no name: with one, MLflow accepts neither a string nor a list of strings.
    """
    if kind_of(task).text_is_words:
        return _schema({"text": _WORDS})
    return _schema({"text": STRING, "text_pair": STRING}) if pairs else Schema([ColSpec("string")])


def _schema(columns: Mapping[str, Mapping[str, Any]]) -> Schema:
    return Schema.from_json(json.dumps([{"required": True, **type_, "name": name} for name, type_ in columns.items()]))


def example(task: Task, pairs: bool) -> pd.DataFrame:
    """Return an example of a version's input: a DataFrame of one row, with the columns of `questions`."""
    row: dict[str, Any] = {name: _EXAMPLE[name] for name in ("text", "text_pair")[: 1 + pairs]}
    if kind_of(task).text_is_words:
        row["text"] = row["text"].split()
    return pd.DataFrame([row])
