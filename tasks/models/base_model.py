"""Load the base model from a Python package, a folder or GGUF file under models/base, or the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_NAME

from eckart.model.quantized_or_adapted import MERGE_FIRST, check_base, check_unquantized
from tasks.artifacts.errors import StageError
from tasks.artifacts.input_folders import BASE
from tasks.artifacts.task_spec import Task
from tasks.config.schema import Model
from tasks.data import pypi_archives
from tasks.data.hub_ids import hub_id
from tasks.models import model_license, sentence_files, task_head
from tasks.models.hub_snapshot import snapshot
from tasks.models.model_io import ADAPTER, UNLOADABLE, check_complete, check_weights
from tasks.nlp_tasks import kind_of

_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; '
    "weights = torch.load('pytorch_model.bin', weights_only=True, map_location='cpu'); "
    "save_file({name: value.contiguous().clone() for name, value in weights.items()}, "
    "'model.safetensors', {'format': 'pt'})\""
)
"""Command that converts a pickle to safetensors; it reads only tensors, so it runs no code of the pickle."""


class Base(NamedTuple):
    """Base model with a head for the task."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    license: model_license.License
    fit: task_head.Fit
    """Fit of the base model's original head to the task."""
    head: str
    """Sentence on what was done with the original head; may be empty."""
    files: Mapping[str, str] = MappingProxyType({})
    """Further files of the model, name → content."""
    has_head: bool = True
    """Whether the base model has weights for the task's head; if not, they are drawn at random."""


def load_base(params: Model, task: Task) -> Base:
    """Load the base model with a head for `task`: its original head if that fits the task, else a new one.

    Raises:
        StageError: the model or its tokenizer cannot be loaded, or does not fit the task.
    """
    assert params.base is not None
    with ExitStack() as stack:
        folder, extra = located(params.base, params.revision, stack)
        try:
            config = _load_config(folder, extra)
            weights = check_weights(folder, config)
            if hub_id(params.base):
                snapshot(params.base, folder.name, [*weights, SAFE_WEIGHTS_NAME])  # read in place of shards
            options: dict[str, Any] = {"trust_remote_code": False, **extra}
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            kind = kind_of(task)
            if extra:  # packed weights would need a kernel of the hub, and could neither be trained nor saved
                options["quantization_config"] = GgufConfig(dequantize=True)
                stack.enter_context(redirect_stderr(StringIO()))  # hides a progress bar that no option turns off
            model, loading = kind.auto.from_pretrained(
                folder,
                use_safetensors=True,
                dtype=getattr(torch, params.dtype),
                ignore_mismatched_sizes=True,  # task_head.adapt checks them
                output_loading_info=True,
                **options,
                **kind.head(),
            )
            check_base(model)
            terms = model_license.of_base(params.base, folder, **extra)
            files = sentence_files.of_base(folder, config, tokenizer, task)
        except UNLOADABLE as error:
            raise StageError(
                f"model.base {params.base} cannot be loaded for this task: {reason(str(error))}"
            ) from error
    _prepare_padding(tokenizer, model, params.base)
    _check_ids(tokenizer, model, params.base)
    _check_prefix(config, task)
    fit = task_head.fit(config, task.kind, task.labels)
    if not config.architectures and task_head.is_new(model, loading):
        fit = "none"  # the names of its outputs were written for a head that it is to get
    lost = [name for name in loading["missing_keys"] if not task_head.may_be_new(model, name, fit)]
    check_complete(model, lost, loading["unexpected_keys"], f"model.base {params.base}")
    head = task_head.adapt(model, config, task, loading)
    return Base(model, tokenizer, terms, fit, head, files, has_head=not task_head.is_new(model, loading))


def _load_config(folder: Path, extra: Mapping[str, str]) -> PreTrainedConfig:
    """Load the config of a base model.

    Args:
        extra: option `gguf_file` of a GGUF file, whose packed weights are read in full precision.

    Raises:
        ValueError: the model has adapters, is quantized, or asks for code.
    """
    if (folder / ADAPTER).exists():
        raise ValueError(f"it holds adapters: {MERGE_FIRST}")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **extra)
    if "/" in (kernel := str(config._attn_implementation)):  # transformers would run its code from the hub
        raise ValueError(
            f"it asks for the kernel {kernel}, which is code: remove _attn_implementation from config.json"
        )
    if not extra:
        check_unquantized(config)
    return config


def _prepare_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, base: str) -> None:
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise StageError(f"model.base {base} has no tokenizer: put the tokenizer's files beside the model")
    if tokenizer.pad_token is None:  # many decoders have none; any token serves, since it is masked
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise StageError(f"the tokenizer of model.base {base} has no padding token: give it a pad_token")
    tokenizer.padding_side = "right"  # on the left it would shift the positions of some models (GPT-2)
    model.config.pad_token_id = tokenizer.pad_token_id


def _check_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, base: str) -> None:
    """Raise StageError if the tokenizer can give an id for which the model has no embedding.

    Special tokens count only if the tokenizer adds them itself: Gemma's tokenizer has one for images, which its text
    models have no embedding for.
    """
    try:
        embedding: Any = model.get_input_embeddings()
        rows = len(embedding.weight)
    except (AttributeError, NotImplementedError):  # CANINE has none, since it hashes its ids
        return
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    added = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, *tokenizer("", "")["input_ids"]}
    ids = ({*tokenizer.get_vocab().values()} - special) | added - {None}
    if (largest := max(ids)) >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise StageError(
            f"the tokenizer of model.base {base} has the id {largest} ({token}), but the model has embeddings for "
            f"{rows} ids: put the model's own tokenizer beside it, or save the model after "
            "model.resize_token_embeddings(len(tokenizer))"
        )


def _check_prefix(config: PreTrainedConfig, task: Task) -> None:
    """Raise StageError if the model was trained with a prefix before each text, as T5 was, and data.prefix is null."""
    prefix = (getattr(config, "task_specific_params", None) or {}).get(task.kind, {}).get("prefix", "")
    if prefix.strip() and task.prefix is None:
        raise StageError(
            f"model.base was trained with {prefix!r} before each text: set data.prefix to it, or to '' to omit it"
        )


def reason(error: str) -> str:
    """Return the reason why a model cannot be loaded, with a remedy if Eckart knows one."""
    if "trust_remote_code" in error:
        return "it needs code of its own, which Eckart does not run: choose a model that transformers itself can load"
    missing = "`tiktoken` is required" in error or "requires the SentencePiece library" in error
    if missing and find_spec("sentencepiece") is None:
        return "its tokenizer needs a package: pip install sentencepiece, or tiktoken if it is in that format"
    if "file named model.safetensors" in error:
        return (
            "it has no model.safetensors, and pickles (pytorch_model.bin) are not read, since they can run code. "
            f"Convert it under {BASE}; in its folder: {_CONVERT}"
        )
    if "deserializing header" in error:  # without the name of the file
        return f"a file of its weights is damaged or incomplete, so copy all of them again ({error})"
    return error


def located(base: str, revision: str | None, stack: ExitStack) -> tuple[Path, dict[str, str]]:
    """Return the folder of a model for `from_pretrained`, and the option `gguf_file` if it is a GGUF file.

    If the model is in a Python package, its folder exists only until `stack` is closed. If it is on the hub, the folder
    has all files but the weights.

    Raises:
        StageError: the model does not exist, lies outside models/base, so that DVC would not see it change, or cannot
            be had from the hub.
    """
    if base.startswith(pypi_archives.SCHEME):
        return _folder(stack.enter_context(pypi_archives.member(base)))
    path = Path(os.path.normpath(base))
    if path.is_relative_to(BASE) and not path.exists():
        raise StageError(f"{base} does not exist: correct model.base")
    if path.exists() and not path.is_relative_to(BASE):
        raise StageError(f"{base} is outside {BASE}: put it there, so that DVC sees when it changes")
    return (snapshot(base, revision), {}) if hub_id(base) else _folder(path)


def _folder(path: Path) -> tuple[Path, dict[str, str]]:
    """Return `path` and no options or, for a GGUF file, its folder and the option with the file's name.

    A GGUF file also holds the config and the tokenizer.
    """
    return (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
