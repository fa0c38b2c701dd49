"""Number of tokens that a model can read."""

from torch import nn
from transformers import PreTrainedModel


def longest_text(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that `model` has positions for, or None if its config states none."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None or positions < 1:  # XLNet states -1
        return None
    for name, module in model.named_modules():  # RoBERTa's positions start after the index of the padding
        if isinstance(module, nn.Embedding) and "position" in name and module.num_embeddings == positions:
            return int(positions if module.padding_idx is None else positions - module.padding_idx - 1)
    return int(positions)
