"""Number of tokens that a model can read."""

from torch import nn
from transformers import PreTrainedModel


def longest_text(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that `model` has positions for, or None if its config states none."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is None or positions < 1:  # XLNet states -1
        return None
    for module in model.modules():  # RoBERTa's positions start after the index of the padding
        if isinstance(module, nn.Embedding) and module.num_embeddings == positions and module.padding_idx is not None:
            return int(positions - module.padding_idx - 1)
    return int(positions)
