"""Load models that stages wrote, check models before they are used, and measure their size."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from eckart.model import hf_format
from eckart.model.macs import macs
from eckart.model.positions import longest_text
from tasks.artifacts.errors import StageError
from tasks.artifacts.results_schema import Size
from tasks.models import sentence_files
from tasks.models.device import inputs_device

TEACHER = Path("models/teacher")
UNTAUGHT = Path("models/untaught")
"""Folder of the base model with a head for the task, before it is fine-tuned on the task."""
SOURCE_FOLDERS: Mapping[str, Path] = {"teacher": TEACHER, "base": UNTAUGHT}
"""`source` of a recipe → folder of the dense model to compress."""
CONTROL = Path("models/control")
ADAPTER = "adapter_config.json"
"""Name of the config file of an adapter of PEFT."""
UNLOADABLE = (OSError, ValueError, RuntimeError, ImportError, SafetensorError)
"""Errors that transformers raises for a folder without a model, with another type of model, with damaged files, or that
needs a package."""


def load(
    folder: Path,
    auto: Any,
    dtype: torch.dtype | Literal["auto"] = "auto",
    device_map: str | dict[str, str] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that a stage wrote, and its tokenizer.

    Args:
        auto: transformers class for the kind of task, such as AutoModelForSequenceClassification.
        dtype: type of the weights; by default, the type in which they were saved.
        device_map: accelerate's placement of the layers on devices, for forward passes only; by default, on the CPU.

    Raises:
        StageError: weights of the class that was saved are missing; transformers would draw them at random.
    """
    check_weights(folder, AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model, loading = auto.from_pretrained(
        folder,
        dtype=dtype,
        device_map=device_map,
        use_safetensors=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    if type(model).__name__ in (model.config.architectures or [type(model).__name__]):  # others have a new head
        check_complete(model, loading["missing_keys"], loading["unexpected_keys"], str(folder))
    return model, load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that a stage wrote."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return tokenizer


def saved_class(folder: Path) -> type[PreTrainedModel]:
    """Return the class of transformers that the model in `folder` was saved as.

    Raises:
        StageError: transformers alone has no such class.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    architecture = (config.architectures or ["no class"])[0]
    if (family := getattr(transformers, architecture, None)) is None:
        raise StageError(
            f"{folder} was saved as {architecture}, which transformers alone does not have: load it with eckart"
        )
    return family


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a model made from the original, factorized or not, and its tokenizer as a Hugging Face folder.

    The tokenizer is read anew, because one that has cut texts would be saved with the length to which it cut them.
    """
    hf_format.save(model, folder)
    load_tokenizer(TEACHER).save_pretrained(folder)
    sentence_files.copy(TEACHER, folder)


def check_weights(folder: Path, config: PreTrainedConfig) -> list[str]:
    """Return the names of the files with weights, or raise OSError if one is a pickle, which could run code.

    The option `use_safetensors=True` does not ensure this: transformers reads whatever files a model's config or index
    names, and for an adapter any file that it finds.

    Args:
        folder: folder of the model, whose weights need not be there yet.

    Raises:
        OSError: a file other than safetensors would be read, or one outside `folder`, which DVC would not see change;
            or the model is an adapter.
    """
    if (folder / ADAPTER).exists():
        raise OSError("it is an adapter of PEFT: merge it into its model, and name the folder where you saved that")
    hf_format.forget_needed(config)
    named = getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_INDEX_NAME
    files = _listed(folder / named) if named.endswith(".json") else [named]
    if not all(file.endswith(".safetensors") for file in files):
        raise OSError("its weights are a pickle, and there is no file named model.safetensors")
    if outside := next((file for file in files if Path(file).is_absolute() or ".." in Path(file).parts), None):
        raise OSError(f"its weights are in {outside}, outside its folder: copy them into it, and change their list")
    return sorted(set(files))


def _listed(index: Path) -> list[str]:
    """Return the names of the files with weights that `index` lists; without such a list, a single name.

    Raises:
        OSError: the list is damaged, or missing beside several files.
    """
    if not index.exists():
        if not index.with_name(SAFE_WEIGHTS_NAME).exists() and any(index.parent.glob("*-of-*.safetensors")):
            raise OSError(f"its weights are in several files, but their list, {index.name}, is missing: copy it, too")
        return [SAFE_WEIGHTS_NAME]
    try:
        return [*json.loads(index.read_text())["weight_map"].values()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OSError(f"{index.name}, the list of its files with weights, is damaged: copy it again") from error


_WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes of weights that were saved inside of DistributedDataParallel or of torch.compile."""


def check_complete(model: PreTrainedModel, missing: Collection[str], unexpected: Collection[str], source: str) -> None:
    """Raise StageError if weights of `model` are `missing`. The message says so if the file has other names for them.

    Args:
        missing: names of weights, and of buffers, which are not a loss.
        unexpected: names of weights in the file that the model does not have.
        source: name of the model in the message.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if not (lost := [name for name in missing if name in parameters]):
        return
    name, saved_as = min(lost), (model.config.architectures or [type(model).__name__])[0]
    advice = "take the model.safetensors that was saved with its config.json"
    if wrapped := next((other for other in sorted(unexpected) if other.startswith(_WRAPPERS)), None):
        advice = f"the file has names such as {wrapped}: remove {wrapped.partition('.')[0]}. from them"
    elif saved_as != type(model).__name__:
        advice = f"it was saved as {saved_as}, which has none for this task: choose another base"
    raise StageError(f"{source} lacks weights, such as {name} ({len(lost)} in all): {advice}")


def check_length(model: PreTrainedModel, tokens: int, parameter: str) -> None:
    """Check that `model` has positions for `tokens` tokens. If it had too few, its forward pass would fail obscurely.

    Args:
        parameter: name of the parameter in params.yaml that sets `tokens`.

    Raises:
        StageError: the model has too few positions.
    """
    positions = longest_text(model)
    if positions is not None and tokens > positions:
        raise StageError(f"{parameter} is {tokens}, but the model has {positions} positions: lower it")


def random_inputs(model: PreTrainedModel, rows: int, tokens: int) -> dict[str, Tensor]:
    """Draw inputs `(rows, tokens)` for measurements of `model`; a decoder reads the same tokens as its encoder."""
    config = model.config.get_text_config()
    vocabulary = getattr(config, "vocab_size", 256)  # CANINE has none, since it hashes its ids
    ids = torch.randint(vocabulary, (rows, tokens), device=inputs_device(model))
    if model.config.is_encoder_decoder and config.eos_token_id is not None:
        end = torch.as_tensor(config.eos_token_id).reshape(-1)[0].item()
        ids[ids == end] = (end + 1) % vocabulary
        ids[:, -1] = end  # which classifiers of BART and T5 read, and of which each row must have as many
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "token_type_ids" in inspect.signature(model.forward).parameters:  # an exported model needs this input
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return {**inputs, "decoder_input_ids": ids} if model.config.is_encoder_decoder else inputs


def size(model: PreTrainedModel, folder: Path, tokens: int) -> Size:
    """Measure the size of a model.

    Args:
        folder: folder of the model's weights.
        tokens: length of the example for which operations are counted.
    """
    return Size(
        model_parameters=model.num_parameters(),
        macs_per_token=round(macs(model, random_inputs(model, 1, tokens)) / tokens),
        bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )
