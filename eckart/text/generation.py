"""Greedy continuation of texts by a causal language model, and what all text that models write here has in common."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel


@torch.inference_mode()
def continued(model: PreTrainedModel, ids: Tensor, mask: Tensor, tokens: int) -> Tensor:
    """Return the likeliest next tokens of each text, one after the other, until an end-of-text token.

    The model's own settings for generation are not used. A penalty for repetition, for instance, would count padding as
    text, so that a text's continuation would depend on the other texts of its batch.

    Args:
        ids: token ids `(batch, length)`, padded on the left.
        mask: 0 at padding, `(batch, length)`.
        tokens: largest number of new tokens.

    Returns:
        New tokens `(batch, new)`, filled up with padding, or end-of-text tokens if the model has no padding token.
    """
    ends = special_tokens(model, "eos_token_id")
    padding = [token for token in special_tokens(model, "pad_token_id") if token >= 0] or ends  # LLaMA's was -1
    settings = GenerationConfig(
        max_new_tokens=tokens,
        use_cache=model.generation_config.use_cache,
        eos_token_id=ends or None,
        pad_token_id=padding[0] if padding else None,
    )
    written: Tensor = with_settings(model, settings).generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=mask
    )
    return written[:, ids.shape[1] :]


def with_settings(model: PreTrainedModel, settings: GenerationConfig) -> PreTrainedModel:
    """Return the model with other settings for generation; all its modules are shared with `model`.

    As an argument of `generate` they would not do: it fills their gaps with the model's own. And these must stay where
    they are, because a server answers several requests at once.
    """
    other = copy.copy(model)
    other.generation_config = settings
    return other


def special_tokens(model: PreTrainedModel, name: str) -> list[int]:
    """Return special tokens of the model. Its config may lack those that its settings for generation have."""
    for config in (model.generation_config, model.config, model.config.get_text_config()):
        if (token := getattr(config, name, None)) is not None:
            return token if isinstance(token, list) else [token]
    return []
