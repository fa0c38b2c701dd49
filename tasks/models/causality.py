"""Check that a language model predicts tokens that it has not read."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from eckart.model.module_context import eval_mode
from tasks.artifacts.errors import StageError
from tasks.models.model_io import inputs_device

_TOKENS = 8
_ROUNDING = 1e-2  # largest relative change of logits that counts as rounding, as in bfloat16


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Check that another last token does not change the logits before it.

    Raises:
        StageError: the model reads the tokens that it is to predict, as BERT does unless its config says is_decoder.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = (vocabulary // 2 + torch.arange(_TOKENS + 1, device=inputs_device(model)))[None] % vocabulary
    text, other = ids[:, :-1], torch.cat([ids[:, :-2], ids[:, -1:]], 1)
    mask = torch.ones_like(text)
    with eval_mode(model):
        first, second = (model(input_ids=each, attention_mask=mask).logits[:, :-1].float() for each in (text, other))
    if (first - second).norm() > _ROUNDING * first.norm():
        raise StageError(
            f"a {type(model).__name__} reads the tokens that it is to predict, so its perplexity means nothing: take a "
            "decoder, such as a GPT; or write is_decoder: true in config.json of model.base, and train it on the text"
        )
