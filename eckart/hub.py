"""A compressed model is an ordinary Hugging Face model.

`config.json` carries `{"quant_method": "eckart", "ranks": {…}, "rows": {…}, "heads": {…}}`. transformers then asks the
quantizer registered here to swap the modules before it loads the weights, so that after `import eckart`

    AutoModelForSequenceClassification.from_pretrained(folder)

gives the model that was saved: every architecture, safetensors, no remote code. Its weights are the same bits, its
answers the same to rounding: how some processors sum a product depends on where in memory its operands begin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from eckart.layers import factorized, head_counts, head_rows_like, low_rank_like, replace, residual_rows


@register_quantization_config("eckart")
class EckartConfig(QuantizationConfigMixin):
    """The ranks of the factorized maps, the rows of their residuals, and the heads of those whose rank is a head's.

    What is not named is dense.
    """

    def __init__(
        self,
        ranks: dict[str, int] | None = None,
        rows: dict[str, int] | None = None,
        heads: dict[str, int] | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = "eckart"  # type: ignore[assignment]
        self.ranks = ranks or {}
        self.rows = rows or {}
        self.heads = heads or {}


@register_quantizer("eckart")
class EckartQuantizer(HfQuantizer):
    """Swaps the targets named by the config for low-rank layers before the weights are loaded."""

    quantization_config: EckartConfig
    requires_calibration = True  # the weights must come from a file

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        config = self.quantization_config
        for name, rank in config.ranks.items():
            module, heads = model.get_submodule(name), config.heads.get(name)
            low = (
                head_rows_like(module, heads, rank) if heads else low_rank_like(module, rank, config.rows.get(name, 0))
            )
            replace(model, name, low)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """The factors are ordinary parameters: the Trainer may train them without adapters."""
        return True


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write `model`, factorized or dense, as a folder that `from_pretrained` reads."""
    if ranks := factorized(model):
        model.config.quantization_config = EckartConfig(ranks, residual_rows(model), head_counts(model))
    elif isinstance(getattr(model.config, "quantization_config", None), EckartConfig):
        del model.config.quantization_config  # all that was factorized when it was loaded has been merged since
    model.save_pretrained(folder)
