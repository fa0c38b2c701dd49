"""Encode texts as model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.artifacts.errors import StageError
from tasks.nlp_tasks.nlp_task import Tokenizer


def check_room(tokenizer: Tokenizer, max_length: int, texts: int = 1) -> None:
    """Check that the special tokens leave room for text. Else the tokenizer cuts all text, or nothing.

    Args:
        texts: number of texts in an input, 1 or 2.

    Raises:
        StageError: they leave none.
    """
    special = tokenizer.num_special_tokens_to_add(pair=texts == 2)
    if max_length <= special:
        raise StageError(
            f"data.max_length is {max_length}, but the tokenizer adds {special} tokens to each input: raise it"
        )


def encode_texts(tokenizer: Tokenizer, *texts: Sequence[str], max_length: int) -> dict[str, Any]:
    """Encode texts, or pairs of texts, each cut to `max_length` tokens.

    An empty text has no token if the tokenizer adds no special one. It gets the padding token as its only token, since
    no model reads a batch without tokens, and no pooling has a result for it.

    Returns:
        Name of a model input → list with the values of each text.

    Raises:
        StageError: `max_length` leaves no room for text.
    """
    check_room(tokenizer, max_length, len(texts))
    inputs = dict(tokenizer(*texts, truncation=True, max_length=max_length))
    only = {"input_ids": tokenizer.pad_token_id, "attention_mask": 1}
    for row in [row for row, ids in enumerate(inputs["input_ids"]) if not ids]:
        for name, values in inputs.items():
            values[row] = [only.get(name, 0)]
    return inputs
