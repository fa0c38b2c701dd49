"""Checks of models, before compression and before saving: that no other tool has quantized or adapted them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

MERGE_FIRST = (
    "merge them first, and compress what merge_and_unload() of the PeftModel returns. Without a PeftModel, write the "
    "adapters with save_pretrained(folder), and make it: PeftModel.from_pretrained(base, folder)"
)
_QUANTIZING = ("bitsandbytes", "torchao", "optimum.quanto", "torch.ao.nn.quantized", "hqq", "gptqmodel", "awq")
"""Packages whose modules or parameters hold quantized weights."""


def check_base(model: PreTrainedModel) -> None:
    """Check, without running `model`, that it can be compressed and saved afterwards.

    Raises:
        ValueError: the model is quantized, has adapters, or changes its own weights; the message says what to do.
    """
    if getattr(model.config, "rescale_every", 0):
        raise ValueError(
            "an RWKV model divides weights in place when it runs: set rescale_every in its config to 0, which is only "
            "for float16"
        )
    if not _is_unpacked_gguf(model):
        check_unquantized(model.config)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"the model has adapters, and save_pretrained would write only these: {MERGE_FIRST}")
    if (name := _adapted(model)) is not None:
        raise ValueError(f"{name} has an adapter, which would be compressed as a layer: {MERGE_FIRST}")
    for name, part in (*model.named_modules(), *model.named_parameters()):
        if tool := _quantizing(part):
            raise ValueError(_quantized(tool, f"{name} is"))


def check_unadapted(model: nn.Module) -> None:
    """Check that no module of `model` has an adapter of peft, since no folder with its parts could be loaded.

    Raises:
        ValueError: a module has; the message says what to do.
    """
    if (name := _adapted(model)) is not None:
        raise ValueError(
            f"{name or 'the model'} has an adapter, and a folder with its parts could not be loaded: write the adapter "
            "with save_pretrained (the PeftModel's, if there is one), or save what merge_and_unload() returns"
        )


def _adapted(model: nn.Module) -> str | None:
    """Return the name of the first module or parameter of `model` that peft has replaced, or None."""
    parts = (*model.named_modules(), *model.named_parameters())
    return next((name for name, part in parts if type(part).__module__.startswith("peft.")), None)


def check_saved_weights(model: PreTrainedModel) -> None:
    """Check that no tool has quantized weights of a compressed model in place, since no folder of it could be loaded.

    Weights that a tool trains before it quantizes them are plain, and are saved.

    Raises:
        ValueError: a tool has; the message says what to do.
    """
    if _value(getattr(model.config, "quantization_config", None), "quantization") is not None:
        return  # transformers quantized it at load, and the config says so
    for name, part in (*model.named_modules(), *model.named_parameters()):
        # if the weight of a tool's module is a parameter, that says whether it is quantized
        if (tool := _quantizing(part)) and not isinstance(getattr(part, "weight", None), nn.Parameter):
            raise ValueError(
                f"{name} was quantized by {tool} in place, and a folder of such a model could not be loaded: save the "
                "model before you quantize it, or load the saved folder with a quantization_config, and save that"
            )


def _quantizing(part: object) -> str | None:
    """Return the quantizing package that the class of a module or parameter comes from, or None."""
    return next((tool for tool in _QUANTIZING if f"{type(part).__module__}.".startswith(f"{tool}.")), None)


def check_unquantized(config: PreTrainedConfig) -> None:
    """Check that no other method has quantized the model of `config`.

    Raises:
        ValueError: another method has; the message says what to do.
    """
    stored = getattr(config, "quantization_config", None)
    name = _value(stored, "quant_method")
    if name == "eckart":
        name = _value(_value(stored, "quantization"), "quant_method")
    if name is not None:
        raise ValueError(_quantized(name, "the model is"))


def _value(config: Any, name: str) -> Any:
    """Return a value of a quantization config, which is a dict if it comes from a file."""
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return getattr(value, "value", value)


def _quantized(method: str, what: str) -> str:
    """Return the message for a model that `method` has quantized, with transformers' way to dense weights."""
    config: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    quantizers: list[Any] = [kind for name, kind in AUTO_QUANTIZER_MAPPING.items() if name.startswith(method)]
    if config and "dequantize" in inspect.signature(config).parameters:
        advice = f"load it with quantization_config={config.__name__}(dequantize=True)"
    elif any(kind._dequantize is not HfQuantizer._dequantize for kind in quantizers):
        advice = "load it with from_pretrained, and call its dequantize()"
    else:
        advice = "transformers cannot dequantize it, so load the model that was quantized"
    return (
        f"{what} quantized by {method}, but compression needs dense weights: {advice}. The compressed model can be "
        "quantized again"
    )


def forget_gguf(model: PreTrainedModel) -> None:
    """Remove what transformers leaves on a model that it has unpacked from a GGUF file, and which cannot be saved."""
    if _is_unpacked_gguf(model):
        quantizer: Any = model.hf_quantizer
        quantizer.remove_quantization_config(model)


def _is_unpacked_gguf(model: PreTrainedModel) -> bool:
    """Whether `model` is from a GGUF file, and its weights are dense."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or quantizer.quantization_config.quant_method != "gguf":
        return False
    return all(values.is_floating_point() for values in model.parameters())
