"""The head of a base model: its outputs take the order of the labels, and all else stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tasks.models import task_head
from tests import tiny
from tests.workspace import a_task

WIDTH = 16
LABELS = tuple(f"label {number:02}" for number in range(WIDTH))
LOADED: dict[str, Any] = {"mismatched_keys": [], "missing_keys": set()}
HEADS = {
    "BertForSequenceClassification": {**tiny.LAYERS, **tiny.LENGTH},
    "RobertaForSequenceClassification": {**tiny.LAYERS, **tiny.LENGTH},
    "ElectraForSequenceClassification": {**tiny.LAYERS, **tiny.LENGTH, "embedding_size": WIDTH},
    "DebertaV2ForSequenceClassification": {**tiny.LAYERS, **tiny.LENGTH},
    "DistilBertForSequenceClassification": {"dim": WIDTH, "n_heads": 2, "n_layers": 1, "hidden_dim": 24},
    "GPT2ForSequenceClassification": {"n_embd": WIDTH, "n_head": 2, "n_layer": 1, "n_positions": 32},
    "T5ForSequenceClassification": {**tiny.T5, "eos_token_id": 1, "decoder_start_token_id": 0},
    "BartForSequenceClassification": {**tiny.BART, **tiny.LENGTH, "eos_token_id": 1},
}


@pytest.mark.parametrize("family", HEADS)
def test_outputs_take_the_order_of_the_labels(family: str) -> None:
    """Also if a hidden layer of the head is as wide as there are labels."""
    names = dict(enumerate(reversed(LABELS)))
    everywhere = {"vocab_size": tiny.VOCABULARY, "pad_token_id": tiny.PAD, "architectures": [family]}
    model = tiny.build(family, **everywhere, **HEADS[family], id2label=names).eval()
    ids = torch.tensor([[4, 5, 6, 1], [7, 8, 9, 1]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert task_head.adapt(model, model.config, a_task("classification", LABELS, "accuracy"), LOADED) == ""
        torch.testing.assert_close(model(input_ids=ids).logits, before.flip(-1))
