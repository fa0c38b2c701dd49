"""Load models that stages wrote, check what is loaded, and measure its size."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file, find_adapter_config_file

from eckart.model.hf_format import forget_needed
from eckart.model.macs import macs
from tasks.artifacts.results_schema import Size
from tasks.runtime.stage_runner import StageError

TEACHER = Path("models/teacher")
UNTAUGHT = Path("models/untaught")
"""The base model with a head for the task, before it learned the task."""
DENSE: Mapping[str, Path] = {"teacher": TEACHER, "base": UNTAUGHT}
"""The source of a recipe → folder of that model."""
CONTROL = Path("models/control")
UNLOADABLE = (OSError, ValueError, RuntimeError, SafetensorError)
"""Errors of transformers for a folder without a model, with another one, or with a damaged one."""


def load(
    folder: Path,
    auto: Any,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device_map: str | dict[str, str] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that a stage wrote, and its tokenizer.

    Args:
        auto: the transformers class that loads it, with the head of its kind of task.
        dtype: by default the one that it was saved in.
        device_map: how accelerate spreads it over the devices, for forward passes alone; by default it is on the CPU.
    """
    check_weights(folder, AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model = auto.from_pretrained(
        folder, dtype=dtype, device_map=device_map, use_safetensors=True, trust_remote_code=False
    )
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def place(model: PreTrainedModel) -> str:
    """Move `model` to the accelerator, unless there is none or a device map placed it; return its inputs' device."""
    if getattr(model, "hf_device_map", None) is None:
        model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    return inputs_device(model)


def inputs_device(model: PreTrainedModel) -> str:
    """Return the device for inputs of `model`; accelerate moves them to weights that wait on the CPU or the disk."""
    return "cpu" if model.device.type == "meta" else str(model.device)


def check_weights(source: str | Path, config: PreTrainedConfig, revision: str | None = None) -> None:
    """Refuse a model whose weights would be read from a pickle, which could run code.

    To load with `use_safetensors` is not enough: transformers reads any file that a model's config or index names, and
    for an adapter any file that it finds.

    Args:
        source: a folder, or the id of a model on the hub.

    Raises:
        OSError: a file that is no safetensors would be read, or the model is an adapter.
    """
    if find_adapter_config_file(str(source), revision=revision):
        raise OSError("it is an adapter of PEFT: merge it into its model, and name the folder where you saved that")
    forget_needed(config)
    named = getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_INDEX_NAME
    files = _indexed(source, named, revision) if named.endswith(".json") else [named]
    if not all(file.endswith(".safetensors") for file in files):
        raise OSError("its weights are a pickle, and there is no file named model.safetensors")


def _indexed(source: str | Path, index: str, revision: str | None) -> list[str]:
    """Return the files that an index of weights names; none if there is no such index."""
    try:
        file = cached_file(source, index, revision=revision)
    except OSError:
        return []
    return list(json.loads(Path(str(file)).read_text())["weight_map"].values())


def check_length(model: PreTrainedModel, tokens: int, parameter: str) -> None:
    """Refuse examples that are longer than the model has positions: they would fail deep inside the model.

    Raises:
        StageError: `tokens`, which `parameter` of params.yaml sets, is too many.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():  # RoBERTa counts its positions from after the padding's
        if isinstance(module, nn.Embedding) and module.num_embeddings == positions and module.padding_idx is not None:
            positions -= module.padding_idx + 1
            break
    if positions is not None and tokens > positions:
        raise StageError(f"{parameter} is {tokens}, but the model has {positions} positions: lower it")


def random_inputs(model: PreTrainedModel, rows: int, tokens: int) -> dict[str, Tensor]:
    """Draw inputs `(rows, tokens)` to measure `model` on; a decoder beside an encoder reads as many tokens."""
    ids = torch.randint(model.config.vocab_size, (rows, tokens), device=inputs_device(model))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "token_type_ids" in inspect.signature(model.forward).parameters:  # an exported model makes none up
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return {**inputs, "decoder_input_ids": ids} if model.config.is_encoder_decoder else inputs


def size(model: PreTrainedModel, folder: Path, tokens: int) -> Size:
    """Measure `model`, whose weights are in `folder`, for examples of so many tokens."""
    return Size(
        model_parameters=model.num_parameters(),
        macs_per_token=round(macs(model, random_inputs(model, 1, tokens)) / tokens),
        bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )
