"""A candidate as ONNX, compared with torch on the rows it was tested on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from eckart import onnx
from eckart.losses import Batch
from tasks.batches import batches, encoded
from tasks.candidate_files import FINETUNED
from tasks.dataset import SPLITS, load_task
from tasks.kinds import kind_of
from tasks.models import UNLOADABLE, load
from tasks.stage import StageError, quiet

_ROWS = 256  # of the test split, at most
_BATCH = 32  # rows
_BLOCKS = 8  # of a language model instead, one at a time: each of its tokens has logits of the whole vocabulary


def to_onnx(name: str, file: Path) -> str:
    """Write the candidate `name`, or the Hugging Face folder at the path `name`; what was written, in a sentence.

    Raises:
        StageError: there is none such, or it cannot be exported; an older `file` stays.
    """
    if file.suffix != ".onnx" or file.is_dir():
        raise StageError(f"{file}: write a file name that ends with .onnx")
    folder = _folder(name)
    quiet()
    try:
        model, tokenizer = load(folder, _auto(), torch.float32)
    except UNLOADABLE as error:
        raise StageError(f"{folder} cannot be loaded: {error}") from error
    if type(model).__name__ not in (model.config.architectures or ()):
        raise StageError(f"{folder} has no head that makes it a {type(model).__name__}: train it first")
    rows = _test_rows(model, tokenizer) if folder.parent == FINETUNED else ()
    try:
        made = onnx.export(model, tokenizer, file, rows)
    except onnx.ExportError as error:
        raise StageError(str(error)) from error
    except OSError as error:
        raise StageError(f"{file} cannot be written: {error}") from error
    return (
        f"{file}: {made.parameters:,} parameters, {made.bytes / 1e6:.1f} MB. onnxruntime answers {made.rows} rows as "
        f"torch does (logits within {made.difference:.1g}). Its tokenizer is that of {folder}."
    )


def _auto() -> Any:
    """The class that loads a model of the study here; where there is none, a model with labels."""
    return kind_of(load_task()).auto if (SPLITS / "task.json").exists() else AutoModelForSequenceClassification


def _folder(name: str) -> Path:
    candidate, path = FINETUNED / name, Path(name)
    if (candidate / "config.json").exists():
        return candidate
    if (path / "config.json").exists():
        return path
    there = sorted(folder.parent.name for folder in FINETUNED.glob("*/config.json"))
    known = f"write one of {', '.join(there)}" if there else f"{FINETUNED} has none: run `python -m flows run` first"
    raise StageError(f"{name} is no candidate and no Hugging Face folder: {known}")


def _test_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Batch]:
    if (SPLITS / "test.parquet").exists():
        task, data = load_task(), encoded("test", tokenizer)
        rows, size = (_BLOCKS, 1) if task.kind == "language_modeling" else (_ROWS, _BATCH)
        yield from batches(
            data.select(range(min(rows, len(data)))), kind_of(task).collate(tokenizer, model), size, "cpu"
        )
