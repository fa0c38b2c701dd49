"""Check that a compressed model is the same after it is saved and loaded again."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from eckart.model.batches import Batch
from eckart.model.hf_format import COMPUTED, computed_weights, save
from eckart.model.module_context import eval_mode

_ROUNDING = {True: 1e-3, False: 5e-2}
"""Whether a model is in float32 or float64 → largest relative change of its outputs that counts as rounding."""
_CONSTANT = -1e5  # below it, two numbers that are about equal are taken for a constant of the head


def check_saved(model: PreTrainedModel, batch: Batch) -> None:
    """Check that `model` gives the same outputs for `batch` after it is saved and loaded again.

    Raises:
        ValueError: the model cannot be saved, loaded or run after that, or the loaded model's outputs differ.
    """
    with tempfile.TemporaryDirectory(prefix="eckart-") as folder, ExitStack() as at_exit:
        if is_progress_bar_enabled():
            disable_progress_bar()
            at_exit.callback(enable_progress_bar)
        try:
            save(model, Path(folder))
            loaded: Any = type(model).from_pretrained(
                folder, dtype=model.dtype, use_safetensors=True, trust_remote_code=False
            )
            for name, part in model.named_modules():
                if isinstance(part, PreTrainedModel):  # attentions differ in the outputs at padding
                    loaded.get_submodule(name).config._attn_implementation = part.config._attn_implementation
            loaded.to(model.device)
            change, exact = _change(model, loaded, batch), model.dtype in (torch.float32, torch.float64)
            dtypes = {name: buffer.dtype for name, buffer in loaded.named_buffers()}
            if change <= _ROUNDING[exact]:
                return
            # Where rounding sends a token to another expert, the outputs in bfloat16 may differ by more.
            if not exact and _change(copy.deepcopy(model).float(), loaded.float(), batch) <= _ROUNDING[True]:
                return
        except Exception as error:  # the type of the error depends on the model family
            raise ValueError(
                f"a compressed {type(model).__name__} cannot be saved, loaded and run: {error}. To get it anyway, give "
                "check=False"
            ) from error
    cast = [name for name, buffer in model.named_buffers() if dtypes.get(name, buffer.dtype) != buffer.dtype]
    cause = "its state_dict does not hold all that it computes with"
    computed, again = computed_weights(model), computed_weights(loaded)
    if (name := next((name for name in computed if name not in again), None)) is not None:
        cause = f"{name} {COMPUTED}"
    if cast:
        cause = f"{cast[0]} was cast; load the model with dtype={model.dtype}"
    raise ValueError(
        f"the outputs of a compressed {type(model).__name__} change by {change:.1%} when it is saved and loaded: "
        f"{cause}. To get it anyway, give check=False"
    )


def _change(model: PreTrainedModel, loaded: PreTrainedModel, batch: Batch) -> float:
    """Return the largest relative difference between the outputs of two models for `batch`."""
    with eval_mode(model), eval_mode(loaded):
        outputs = zip(_outputs(model, batch), _outputs(loaded, batch), strict=True)
        pairs = (without_constants(*pair) for pair in outputs)
        return max((float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs), default=0.0)


def without_constants(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return two models' outputs, with 0 where both have about the same number below -100,000.

    Some heads add such a constant to impossible predictions, beside which no other difference would count.
    """
    constant = (one < _CONSTANT) & (other < _CONSTANT) & ((one - other).abs() <= 1e-3 * one.abs())
    return one.masked_fill(constant, 0.0), other.masked_fill(constant, 0.0)


@torch.no_grad()
def _outputs(model: PreTrainedModel, batch: Batch) -> list[Tensor]:
    """Return the model's floating-point outputs except the loss; random draws are the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = model(**batch)
    if isinstance(outputs, Mapping):
        outputs = tuple(value for name, value in outputs.items() if name != "loss")
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return [value.float() for value in values if isinstance(value, Tensor) and value.is_floating_point()]
