"""Export a candidate as a dense checkpoint for tools that cannot load factors.

It is as large as the original model, unless all MLPs are narrowed and one number in the config is their width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from eckart.model.batches import Batch
from eckart.model.experts import fuse
from eckart.model.hf_format import save
from eckart.model.layers import HeadRows, factorized, merge, narrowed_shapes
from eckart.model.module_context import eval_mode
from eckart.model.plain_widths import restore_plain_widths
from eckart.model.positions import longest_text
from eckart.model.round_trip import without_constants
from tasks.artifacts.errors import StageError
from tasks.exporting.folders import folder_of, new_folder
from tasks.models import sentence_files
from tasks.models.model_io import UNLOADABLE, load, random_inputs, saved_class
from tasks.runtime.stage_runner import quiet

_ROUNDING = 1e-4  # allowed difference ÷ largest output, because merging changes the order of float32 sums
_ROWS, _TOKENS = 4, 16  # shape of the inputs for the comparison; fewer tokens if the model has fewer positions


def to_plain(name: str, folder: Path) -> str:
    """Multiply out the factors of a candidate, and save the dense model with its tokenizer in `folder`.

    Narrowed MLPs get the widths that a plain config can state (eckart/model/plain_widths.py). The weights keep their
    dtype.

    Args:
        name: name of a candidate, or path of a Hugging Face folder.
        folder: path of the new folder.

    Returns:
        A report for the user.

    Raises:
        StageError: there is no such candidate, it is not factorized, transformers has no class for it, `folder` exists
            or cannot be written, or the merged model gives other outputs.
    """
    if folder.exists():
        raise StageError(f"{folder} exists: name a new folder")
    source = folder_of(name)
    quiet()
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        model, tokenizer = load(source, saved_class(source), torch.float32)
    except UNLOADABLE as error:
        raise StageError(f"{source} cannot be loaded: {error}") from error
    names, narrowed = list(factorized(model)), narrowed_shapes(model)
    if not (names or narrowed):
        raise StageError(f"{source} is not factorized: it is already a plain folder")
    changed: dict[str, int] = {}
    restored: list[int] = []
    compared = "outputs"
    try:
        inputs = random_inputs(model, _ROWS, min(_TOKENS, longest_text(model) or _TOKENS))
        expected = _outputs(model, inputs)
    except Exception as error:  # it reads several choices or pictures, too; the error's type depends on the model
        if narrowed or any(isinstance(model.get_submodule(layer), HeadRows) for layer in names):
            raise StageError(
                f"{source}: a {type(model).__name__} does not run on texts (batch, tokens) alone, so what narrowing or "
                f"products of query and key did cannot be compared: {error}"
            ) from error
        difference, compared = max(_merge_alone(model, layer) for layer in names), "merged layers"
        fuse(model)
    else:
        for layer in names:
            merge(model, layer)
        if narrowed:
            changed, restored = restore_plain_widths(model)
        fuse(model)
        difference = _difference(expected, _outputs(model, inputs))
    with new_folder(folder) as written:
        save(model.to(config.dtype or torch.float32), written)  # type: ignore[arg-type]
        tokenizer.save_pretrained(written)
        sentence_files.copy(source, written)
    given = [f"{attribute} = {width}" for attribute, width in changed.items()]
    given += [f"their former width, {width}" for width in restored]
    widths = f" Its narrowed MLPs have {', '.join(given)}; those with fewer neurons are filled up with zeros."
    return (
        f"{folder}: {model.num_parameters():,} parameters, {len(names)} linear layers merged, with its tokenizer."
        f"{widths if given else ''} Its {compared} are within {difference:.1g} of those of {source}, and transformers "
        "alone loads it."
    )


def _merge_alone(model: PreTrainedModel, name: str) -> float:
    """Merge a layer, and return the largest absolute difference of its outputs for random inputs.

    Raises:
        StageError: rounding cannot explain the difference.
    """
    layer: Any = model.get_submodule(name)
    merged = merge(model, name)
    inputs = torch.arange(_ROWS) if layer.reads_ids else torch.randn(_ROWS, layer.in_features)
    with torch.inference_mode():
        return _difference({name: layer(inputs)}, {name: merged(inputs)})


def _outputs(model: PreTrainedModel, inputs: Batch) -> dict[str, Tensor]:
    """Run the model; return name → output for those of its outputs that are tensors, `(rows, …)`."""
    with eval_mode(model), torch.inference_mode():
        outputs = model(**inputs)
    return {name: values for name, values in outputs.items() if isinstance(values, Tensor)}


def _difference(expected: dict[str, Tensor], merged: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between the outputs of two models.

    Raises:
        StageError: rounding cannot explain the difference.
    """
    largest = 0.0
    for name, values in expected.items():
        wanted, given = without_constants(values, merged[name])
        difference = float((wanted - given).abs().max())
        if not difference <= _ROUNDING * max(1.0, float(wanted.abs().max())):  # true for NaN, too
            raise StageError(f"merging changes the outputs: {name} differ by {difference:.2g}")
        largest = max(largest, difference)
    return largest
