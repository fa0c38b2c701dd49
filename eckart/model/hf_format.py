"""A compressed model is an ordinary Hugging Face model.

`config.json` carries `{"quant_method": "eckart", "ranks": {…}, …}`, the arguments of `EckartConfig`.
transformers then asks the quantizer registered here to swap the modules before it loads the weights, so that after
`import eckart`::

    AutoModelForSequenceClassification.from_pretrained(folder)

gives the model that was saved: every architecture, safetensors, no remote code. Its weights are the same bits, its
answers the same to rounding: how some processors sum a product depends on where in memory its operands begin.

transformers alone would skip a quantizer that it does not know, and answer with random weights in place of the factors.
So `config.json` names as the file of weights what is no file, in words, which transformers quotes as it fails; with
this package imported it is read as if it were not there. Whoever calls `save_pretrained` of a compressed model writes
it, the Trainer and `push_to_hub` included.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
from transformers.utils.quantization_config import QuantizationConfigMixin

from eckart.model.layers import (
    factorized,
    head_counts,
    head_rows_like,
    low_rank_like,
    pivoted,
    pivoted_like,
    replace,
    residual_rows,
    tie_head,
    tied_heads,
)
from eckart.model.module_context import eval_mode

NEEDED = "factorized: install the Python package eckart, and `import eckart` before you load this model"
"""What transformers quotes where it meets a compressed model alone."""


@register_quantization_config("eckart")
class EckartConfig(QuantizationConfigMixin):
    """The ranks of the factorized maps, the rows of their residuals, the heads of those whose rank is a head's, the
    names of those that are pivoted, and which heads are in which embeddings' factors. What has no rank is dense.
    """

    def __init__(
        self,
        ranks: dict[str, int] | None = None,
        rows: dict[str, int] | None = None,
        heads: dict[str, int] | None = None,
        pivoted: list[str] | None = None,
        tied: dict[str, str] | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = "eckart"  # type: ignore[assignment]
        self.ranks = ranks or {}
        self.rows = rows or {}
        self.heads = heads or {}
        self.pivoted = pivoted or []
        self.tied = tied or {}

    def layer(self, name: str, module: nn.Module) -> nn.Module:
        """What takes the place of the dense `module`, unfilled."""
        rank = self.ranks[name]
        if name in self.heads:
            return head_rows_like(module, self.heads[name], rank)
        return (
            pivoted_like(module, rank) if name in self.pivoted else low_rank_like(module, rank, self.rows.get(name, 0))
        )


@register_quantizer("eckart")
class EckartQuantizer(HfQuantizer):
    """Swaps the targets named by the config for low-rank layers before the weights are loaded."""

    quantization_config: EckartConfig
    requires_calibration = True  # the weights must come from a file

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        names = dict(model.named_modules(remove_duplicate=False))
        for name in self.quantization_config.ranks:
            if (place := _place(model, name, names)) is not None:
                replace(model, place, self.quantization_config.layer(name, model.get_submodule(place)))
        for head, embedding in self.quantization_config.tied.items():
            if head in names:
                tie_head(model, head, _place(model, embedding, names) or embedding)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        _guard(model)
        return model

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Of what a quantizer is asked before transformers looks for the weights, this alone sees the config."""
        forget_needed(config)
        return config

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """The factors are ordinary parameters: the Trainer may train them without adapters."""
        return True


def _place(model: PreTrainedModel, name: str, names: Collection[str]) -> str | None:
    """Where the map `name` of the model that was saved is in this one, whose modules are `names`.

    Without its head (`AutoModel`) a model has shorter names, and None in place of what was of the head.
    """
    prefix = f"{model.base_model_prefix}."
    found = next((each for each in (name, name.removeprefix(prefix), prefix + name) if each in names), None)
    return name if found is None and model.base_model is not model else found


def describe(model: PreTrainedModel) -> None:
    """Have `model` say how it is stored, so that `save_pretrained` and `push_to_hub` write all of it."""
    if ranks := factorized(model):
        model.config.quantization_config = EckartConfig(
            ranks, residual_rows(model), head_counts(model), pivoted(model), tied_heads(model)
        )
        _guard(model)
    elif isinstance(getattr(model.config, "quantization_config", None), EckartConfig):
        del model.config.quantization_config  # all that was factorized when it was loaded has been merged since
        _unguard(model)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write `model`, factorized or dense, as a folder that `from_pretrained` reads."""
    describe(model)
    model.save_pretrained(folder)


class _GuardedSave:
    """`save_pretrained` of a compressed model, which names NEEDED in config.json.

    transformers drops that from any config that it writes, so it is added afterwards. An object, not a closure: it is
    copied and pickled with its model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(
        self, save_directory: str | os.PathLike[str], *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        hub = {name: kwargs.pop(name) for name in _UPLOAD if name in kwargs} if push_to_hub else {}
        type(self._model).save_pretrained(self._model, save_directory, *args, **kwargs)
        file = Path(save_directory) / "config.json"
        if kwargs.get("is_main_process", True) and file.exists():
            content = {**json.loads(file.read_text()), "transformers_weights": NEEDED}
            file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        if push_to_hub:  # all of it once more, as it is now
            upload: Any = self._model.push_to_hub
            upload(hub.pop("repo_id", None) or Path(save_directory).name, **hub)


_UPLOAD = ("repo_id", "commit_message", "private", "token", "revision", "create_pr", "commit_description", "tags")


def _guard(model: PreTrainedModel) -> None:
    """Have it, and the models in it, which share its config, save so."""
    for one in model.modules():
        if isinstance(one, PreTrainedModel):
            one.save_pretrained = _GuardedSave(one)  # type: ignore[method-assign]


def _unguard(model: PreTrainedModel) -> None:
    for one in model.modules():
        vars(one).pop("save_pretrained", None)


def check_base(model: PreTrainedModel) -> None:
    """Refuse what cannot be saved once it is compressed.

    Raises:
        ValueError: the model is quantized, or has adapters; the message says what to load in its place.
    """
    check_unquantized(model.config)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model has adapters, and save_pretrained would write these alone: merge them first, by "
            "merge_and_unload() of a PeftModel"
        )


def check_unquantized(config: PreTrainedConfig) -> None:
    """Refuse a model whose config says that it is quantized by another method than this.

    Raises:
        ValueError: it does; the message says what to load in its place.
    """
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    name = getattr(method, "value", method)
    if found is None or name == "eckart":
        return
    advice = "load it unquantized, compress it, and quantize what comes out"
    if name == "gguf":
        advice = "load it with quantization_config=GgufConfig(dequantize=True)"
    raise ValueError(f"the model is quantized by {name}, and a config has one place for how it is stored: {advice}")


def check_saved(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """Save `model`, load it, and compare what both answer to `batch`.

    Raises:
        ValueError: it cannot be saved or loaded, or answers otherwise then.
    """
    with tempfile.TemporaryDirectory(prefix="eckart-") as folder, _without_bars():
        try:
            save(model, Path(folder))
            loaded: Any = type(model).from_pretrained(
                folder, dtype=model.dtype, use_safetensors=True, trust_remote_code=False
            )
            loaded.to(model.device)
        except Exception as error:  # of each family its own
            raise ValueError(
                f"a compressed {type(model).__name__} cannot be saved and loaded: {error}. check=False gives it "
                "nevertheless"
            ) from error
    with eval_mode(model), eval_mode(loaded):
        pairs = zip(_answers(model, batch), _answers(loaded, batch), strict=True)
        change = max((float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs), default=0.0)
    if not change <= _ROUNDING[model.dtype in (torch.float32, torch.float64)]:
        raise ValueError(
            f"a compressed {type(model).__name__} answers otherwise once it is saved and loaded, by {change:.1%}: not "
            "all that it computes with is in its state. check=False gives it nevertheless"
        )


_ROUNDING = {True: 1e-3, False: 5e-2}
"""What saving and loading may change: how some processors sum depends on where in memory operands begin."""


@torch.no_grad()
def _answers(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """What a model returns of floats, but for the loss; of one that draws at random, by the same lots."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = model(**batch)
    some = [value for name, value in outputs.items() if name != "loss"]
    return [value.float() for value in some if isinstance(value, Tensor) and value.is_floating_point()]


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bars of transformers, which a check has not asked for."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()


def forget_needed(config: PreTrainedConfig) -> None:
    """Have `config` name no file of weights, where what it names is NEEDED."""
    if getattr(config, "transformers_weights", None) == NEEDED:
        del config.transformers_weights
