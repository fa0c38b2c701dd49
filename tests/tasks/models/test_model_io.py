"""Folders load whole or not at all. Inputs and limits are those of the text model, which may have its own config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BartForSequenceClassification, T5ForSequenceClassification

from eckart.model import hf_format
from tasks.artifacts.errors import StageError
from tasks.models.model_io import check_length, load, random_inputs
from tasks.nlp_tasks import kind_of
from tests import tiny
from tests.workspace import a_task


def test_random_inputs_are_tokens_of_the_text_model() -> None:
    model, _ = tiny.llava()
    inputs = random_inputs(model, 2, 4)
    assert inputs["input_ids"].shape == (2, 4)
    assert model(**inputs).logits.shape == (2, 4, model.config.text_config.vocab_size)


def test_random_inputs_suit_a_model_without_a_vocabulary() -> None:
    sizes = {"num_hash_buckets": 64, "local_transformer_stride": 16, "max_position_embeddings": 32}
    model = tiny.build("CanineForSequenceClassification", **tiny.LAYERS, **sizes)
    assert model(**random_inputs(model, 2, 20)).logits.shape == (2, 2)


@pytest.mark.parametrize("family", [BartForSequenceClassification, T5ForSequenceClassification])
def test_classifiers_that_read_the_end_of_a_text_find_one_in_each_row(family: Any) -> None:
    sizes = {
        "d_model": 16,
        "decoder_layers": 1,
        "encoder_layers": 1,
        "num_layers": 1,
        "d_kv": 8,
        "num_heads": 2,
        "d_ff": 16,
    }
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = family(family.config_class(vocab_size=20, decoder_start_token_id=0, **sizes)).eval()
    for seed in range(5):
        torch.manual_seed(seed)
        assert model(**random_inputs(model, 8, 16)).logits.shape == (8, model.config.num_labels)


def test_positions_are_those_of_the_text_model() -> None:
    model, _ = tiny.llava()
    positions = model.config.text_config.max_position_embeddings
    check_length(model, positions // 2, "data.max_length")
    with pytest.raises(StageError, match="lower it"):
        check_length(model, positions + 1, "data.max_length")
    with pytest.raises(ValueError, match="lower it"):
        kind_of(a_task("language_modeling", (), "perplexity")).check_room(model, positions)


def test_a_folder_with_missing_weights_is_an_error(tmp_path: Path) -> None:
    """transformers would draw them at random, and an export would hold the draw."""
    hf_format.save(tiny.bert(), tmp_path)
    tiny.words().save_pretrained(tmp_path)
    load(tmp_path, AutoModelForSequenceClassification)
    file = tmp_path / "model.safetensors"
    save_file({name.replace("bert.", "model."): value for name, value in load_file(file).items()}, file)
    with pytest.raises(StageError, match=r"bert\.embeddings"):
        load(tmp_path, AutoModelForSequenceClassification)
