"""A compressed model is an ordinary Hugging Face model.

`config.json` carries `{"quant_method": "eckart", "ranks": {…}, …}`, the arguments of `EckartConfig`.
transformers then asks the quantizer registered here to swap the modules before it loads the weights, so that after
`import eckart`::

    AutoModelForSequenceClassification.from_pretrained(folder)

gives the model that was saved: every architecture, safetensors, no remote code. Its weights are the same bits, its
answers the same to rounding: how some processors sum a product depends on where in memory its operands begin.

transformers alone would skip a quantizer that it does not know, and answer with random weights in place of the factors.
So `config.json` names as the file of weights what is no file, in words, which transformers quotes as it fails; with
this package imported it is read as if it were not there.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from eckart.layers import (
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
    """Have the config of `model` say how it is stored, so that `save_pretrained` and `push_to_hub` write all of it."""
    if ranks := factorized(model):
        model.config.quantization_config = EckartConfig(
            ranks, residual_rows(model), head_counts(model), pivoted(model), tied_heads(model)
        )
    elif isinstance(getattr(model.config, "quantization_config", None), EckartConfig):
        del model.config.quantization_config  # all that was factorized when it was loaded has been merged since


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write `model`, factorized or dense, as a folder that `from_pretrained` reads."""
    describe(model)
    model.save_pretrained(folder)
    if factorized(model):
        file = folder / "config.json"
        content = {**json.loads(file.read_text()), "transformers_weights": NEEDED}
        file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def forget_needed(config: PreTrainedConfig) -> None:
    """Have `config` name no file of weights, where what it names is NEEDED."""
    if getattr(config, "transformers_weights", None) == NEEDED:
        del config.transformers_weights
