"""Models as ONNX: compared with torch on the rows that they were tested on, and scored as onnxruntime runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from eckart import onnx
from eckart.calibration.losses import Batch
from tasks.artifacts.paths import EXPORTS, FINETUNED, ONNX, ONNX_FILES, exported_name
from tasks.artifacts.results_schema import ExportedFile, Exports, Runtime
from tasks.artifacts.task_spec import SPLITS, load_task
from tasks.data.loading import batches, encoded
from tasks.models.model_io import UNLOADABLE, load
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import StageError, output, quiet
from tasks.scoring.splits import Rows, score_on, write_rows

_ROWS = 256  # of a split, at most
_BATCH = 32  # rows
_BLOCKS = 8  # of a language model instead, one at a time: each of its tokens has logits of the whole vocabulary
_CALIBRATED = 16  # blocks of a language model by which activations are smoothed


def export_and_score(name: str, folder: Path) -> None:
    """Write the model in `folder` in float32 and in int8, and what each test row contributes to the scores of both.

    Raises:
        StageError: it cannot be exported.
    """
    quiet()
    task = load_task()
    model, tokenizer = load(folder, kind_of(task).auto, torch.float32)
    found: dict[Runtime, ExportedFile] = {}
    rows: dict[str, Rows] = {}
    with output(ONNX / name) as out:
        try:
            onnx.export(model, tokenizer, out / ONNX_FILES["onnx"], _rows("test", model, tokenizer))
            calibration = _rows("calibration", model, tokenizer)
            onnx.quantize(out / ONNX_FILES["onnx"], out / ONNX_FILES["int8"], calibration)
            for runtime, file in ONNX_FILES.items():
                onnx.answer_by(model, onnx.runner(out / file, torch.get_num_threads()))
                scored = score_on("test", model, tokenizer, f"{name} in {runtime}")
                found[runtime] = ExportedFile(score=scored.score, bytes=_bytes(out / file))
                rows[runtime] = {"test": scored.rows}
        except onnx.ExportError as error:
            raise StageError(f"{error}; or leave its recipe out of export.recipes (none: [])") from error
    write_rows(exported_name(name), rows)
    EXPORTS.mkdir(parents=True, exist_ok=True)
    (EXPORTS / f"{name}.json").write_text(Exports.model_validate(found).model_dump_json(indent=2))


def _bytes(file: Path) -> int:
    """Of a file, and of the weights beside it, if there are any."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))


def to_onnx(name: str, file: Path, int8: bool = False) -> str:
    """Write the candidate `name`, or the Hugging Face folder at the path `name`; what was written, in a sentence.

    Raises:
        StageError: there is none such, or it cannot be exported; an older `file` stays.
    """
    if file.suffix != ".onnx" or file.is_dir():
        raise StageError(f"{file}: write a file name that ends with .onnx")
    folder = folder_of(name)
    quiet()
    try:
        model, tokenizer = load(folder, _auto(), torch.float32)
    except UNLOADABLE as error:
        raise StageError(f"{folder} cannot be loaded: {error}") from error
    if type(model).__name__ not in (model.config.architectures or ()):
        raise StageError(f"{folder} has no head that makes it a {type(model).__name__}: train it first")
    test, calibration = (
        _rows(split, model, tokenizer) if folder.parent == FINETUNED else () for split in ("test", "calibration")
    )
    try:
        made = onnx.export(model, tokenizer, file, test, int8, calibration)
    except onnx.ExportError as error:
        raise StageError(str(error)) from error
    except OSError as error:
        raise StageError(f"{file} cannot be written: {error}") from error
    answers = (
        f"In int8 logits of {made.rows} rows are up to {made.difference:.1g} from torch's"
        if int8
        else f"onnxruntime answers {made.rows} rows as torch does (logits within {made.difference:.1g})"
    )
    return (
        f"{file}: {made.parameters:,} parameters, {made.bytes / 1e6:.1f} MB. {answers}. "
        f"Its tokenizer is that of {folder}."
    )


def _auto() -> Any:
    """The class that loads a model of the study here; where there is none, a model with labels."""
    return kind_of(load_task()).auto if (SPLITS / "task.json").exists() else AutoModelForSequenceClassification


def folder_of(name: str) -> Path:
    """Of the candidate `name`, or the Hugging Face folder at that path.

    Raises:
        StageError: there is neither.
    """
    candidate, path = FINETUNED / name, Path(name)
    if (candidate / "config.json").exists():
        return candidate
    if (path / "config.json").exists():
        return path
    there = sorted(folder.parent.name for folder in FINETUNED.glob("*/config.json"))
    known = f"write one of {', '.join(there)}" if there else f"{FINETUNED} has none: run `eckart run` first"
    raise StageError(f"{name} is no candidate and no Hugging Face folder: {known}")


def _rows(
    split: Literal["test", "calibration"], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Batch]:
    """Some of a split, where it is there, as a graph may be asked."""
    if (SPLITS / f"{split}.parquet").exists():
        task, data = load_task(), encoded(split, tokenizer)
        blocks = _BLOCKS if split == "test" else _CALIBRATED
        rows, size = (blocks, 1) if kind_of(task).running_text else (_ROWS, _BATCH)
        yield from batches(
            data.select(range(min(rows, len(data)))), kind_of(task).collate(tokenizer, model), size, "cpu"
        )
