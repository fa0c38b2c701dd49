"""Export models as ONNX, compare them with torch on test examples, and score them in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eckart import onnx
from eckart.model.batches import Batch
from eckart.model.hf_format import plain_config
from tasks.artifacts.errors import StageError
from tasks.artifacts.paths import EXPORTS, FINETUNED, ONNX, ONNX_FILES, exported_name
from tasks.artifacts.results_schema import ExportedFile, Exports, Runtime
from tasks.artifacts.task_spec import SPLITS, Split, Task, load_task
from tasks.data.loading import batches, encoded, file_of
from tasks.exporting.folders import folder_of, new_folder
from tasks.models import sentence_files
from tasks.models.model_io import UNLOADABLE, load, load_tokenizer, saved_class
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import output, quiet
from tasks.scoring.splits import Predictions, Scorer, load_scorer, write_predictions

_EXAMPLES = 256  # maximum number of examples that are taken from a split
_BATCH = 32  # examples per batch
# The same maximum for language models, whose examples are blocks. They are run one by one, since each token has logits
# for the whole vocabulary.
_BLOCKS: Mapping[Split, int] = {"test": 8, "calibration": 16}

_IN_FOLDER = ("onnx/model.onnx", "onnx/model_quantized.onnx")
"""Files of an exported folder, in float32 and int8, by the names that optimum and transformers.js look for."""
_NOTE = """\
# ONNX model

| file | weights |
|---|---|
| `onnx/model.onnx` | float32 |
| `onnx/model_quantized.onnx` | int8 |

The int8 file runs fastest if onnxruntime does not fuse layer norms with sums. Else the defaults are best.

```python
import onnxruntime

options = onnxruntime.SessionOptions()  # optimum: from_pretrained(…, session_options=options)
options.add_session_config_entry("optimization.disable_specified_optimizers", "SkipLayerNormFusion")
onnxruntime.InferenceSession("onnx/model_quantized.onnx", options)
```

```js
const extra = { optimization: { disable_specified_optimizers: 'SkipLayerNormFusion' } };
await pipeline(task, folder, { dtype: 'q8', session_options: { extra } });   // transformers.js in Node
```
"""


def export_model(name: str, source: Path) -> None:
    """Export the model in the folder `source` to ONNX with float32 and with int8 weights, and save the scores of both.

    Args:
        name: name of the candidate, `dense` for the original model, or that of the control.

    Raises:
        StageError: the model cannot be exported.
    """
    quiet()
    scorer = load_scorer("test")
    model, tokenizer = _load(source, kind_of(scorer.task).auto)
    with output(ONNX / name) as folder:
        files, predictions = export_and_score(model, tokenizer, folder, scorer, name)
    write_predictions(exported_name(name), predictions)
    EXPORTS.mkdir(parents=True, exist_ok=True)
    (EXPORTS / f"{name}.json").write_text(files.model_dump_json(indent=2))


def export_and_score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    scorer: Scorer,
    name: str,
) -> tuple[Exports, dict[str, Predictions]]:
    """Export a model to ONNX files in `folder`, with float32 and with int8 weights, and score both as evaluate does.

    Args:
        name: name of the model in messages.

    Returns:
        The scores and sizes of the files, and runtime → per-example results.

    Raises:
        StageError: the model cannot be exported.
    """
    files: dict[Runtime, ExportedFile] = {}
    predictions: dict[str, Predictions] = {}
    try:
        test, calibration = (_examples(split, scorer.task, model, tokenizer) for split in _BLOCKS)
        paths = [folder / file for file in ONNX_FILES.values()]
        exported = onnx.export_files(model, tokenizer, paths, test, calibration)
        for runtime, file, result in zip(ONNX_FILES, paths, exported, strict=True):
            onnx.answer_by(model, onnx.runner(file, torch.get_num_threads()))
            said = f"{name} in {runtime}"
            scored = scorer.score_on("test", model, tokenizer, said)
            texts = scorer.on_texts(model, tokenizer, said)
            files[runtime] = ExportedFile(score=scored.score, bytes=result.bytes, texts=texts)
            predictions[runtime] = {"test": scored.predictions}
    except onnx.ExportError as error:
        raise StageError(f"{error}; or leave its recipe out of export.recipes (none: [])") from error
    return Exports.model_validate(files), predictions


def to_onnx(name: str, file: Path, int8: bool = False) -> str:
    """Export a model to an ONNX file, and compare the outputs in onnxruntime with those in torch.

    Args:
        name: name of a candidate, or path of a Hugging Face folder.
        file: path of the new file.
        int8: whether to store the weights as int8.

    Returns:
        A report for the user.

    Raises:
        StageError: there is no such model, or it cannot be exported. If `file` existed before, it is unchanged.
    """
    if file.suffix != ".onnx" or file.is_dir():
        raise StageError(f"{file}: write a file name that ends with .onnx")
    model, tokenizer, test, calibration = _loaded(name)
    try:
        result = onnx.export(model, tokenizer, file, test, int8, calibration)
    except onnx.ExportError as error:
        raise StageError(f"{name}: {error}") from error
    except OSError as error:
        raise StageError(f"{file} cannot be written: {error}") from error
    return f"{file}: {_report(result)} Use it with the tokenizer in {folder_of(name)}."


def to_onnx_folder(name: str, folder: Path) -> str:
    """Export a model to a folder that optimum and transformers.js read: config, tokenizer and two ONNX files.

    Args:
        name: name of a candidate, or path of a Hugging Face folder.
        folder: path of the new folder.

    Returns:
        A report for the user.

    Raises:
        StageError: there is no such model, it cannot be exported, or `folder` exists or cannot be written.
    """
    if folder.exists():
        raise StageError(f"{folder} exists: name a new folder, or a file that ends with .onnx")
    model, tokenizer, test, calibration = _loaded(name)
    try:
        with new_folder(folder) as written:
            exported = onnx.export_files(model, tokenizer, [written / file for file in _IN_FOLDER], test, calibration)
            plain_config(model).save_pretrained(written)
            if model.can_generate():  # only this file may have the token that ends a chat model's turn
                model.generation_config.save_pretrained(written)
            saved_tokenizer = load_tokenizer(folder_of(name))  # the other one now cuts texts
            if saved_tokenizer.is_fast:  # a folder's own may have been saved after it cut texts
                saved_tokenizer.backend_tokenizer.no_truncation()
                saved_tokenizer.backend_tokenizer.no_padding()
            saved_tokenizer.save_pretrained(written)
            sentence_files.copy(folder_of(name), written)
            saved = written / "tokenizer_config.json"
            # optimum's transformers 4 has only the older of two names of this class
            saved.write_text(saved.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
            (written / "README.md").write_text(_NOTE)
    except onnx.ExportError as error:
        raise StageError(f"{name}: {error}") from error
    lines = [f"{file}: {_report(result)}" for file, result in zip(_IN_FOLDER, exported, strict=True)]
    return "\n".join([f"{folder}: for optimum, transformers.js and onnxruntime", *lines])


def _loaded(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Batch], list[Batch]]:
    """Load a candidate or the model in a Hugging Face folder; for a candidate, test and calibration examples, too.

    Raises:
        StageError: there is no such model, or it cannot be loaded.
    """
    folder = folder_of(name)
    quiet()
    task = load_task() if folder.parent == FINETUNED and (SPLITS / "task.json").exists() else None
    try:
        model, tokenizer = _load(folder, kind_of(task).auto if task else saved_class(folder))
    except UNLOADABLE as error:
        raise StageError(f"{folder} cannot be loaded: {error}") from error
    test, calibration = (
        list(_examples(split, task, model, tokenizer)) if task and file_of(split).exists() else [] for split in _BLOCKS
    )
    return model, tokenizer, test, calibration


def _load(folder: Path, auto: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model in float32; an embedding model then also returns the pooled embeddings."""
    model, tokenizer = load(folder, auto, torch.float32)
    if pooling := sentence_files.pooling_of(folder):
        onnx.return_embeddings(model, pooling)
    return model, tokenizer


def _report(result: onnx.Exported) -> str:
    return (
        f"{result.parameters:,} parameters, {result.bytes / 1e6:.1f} MB. On {result.examples} examples "
        f"its outputs are within {result.difference:.1g} of torch's."
    )


def _examples(split: Split, task: Task, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[Batch]:
    """Yield the first examples of a split in batches."""
    kind = kind_of(task)
    data = encoded(split, tokenizer)
    count, size = (_BLOCKS[split], 1) if kind.running_text else (_EXAMPLES, _BATCH)
    chosen = data.select(range(min(count, len(data))))
    yield from batches(chosen, kind.collate(tokenizer, model), size, "cpu")
