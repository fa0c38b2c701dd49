"""Inputs and limits of models whose text model has a config of its own, as Gemma 3 has, which also reads pictures."""

from __future__ import annotations

import pytest

from tasks.models.model_io import check_length, random_inputs
from tasks.nlp_tasks import kind_of
from tasks.runtime.stage_runner import StageError
from tests import tiny
from tests.workspace import a_task


def test_random_inputs_are_tokens_of_the_text_model() -> None:
    model, _ = tiny.llava()
    inputs = random_inputs(model, 2, 4)
    assert inputs["input_ids"].shape == (2, 4)
    assert model(**inputs).logits.shape == (2, 4, model.config.text_config.vocab_size)


def test_positions_are_those_of_the_text_model() -> None:
    model, _ = tiny.llava()
    positions = model.config.text_config.max_position_embeddings
    check_length(model, positions // 2, "data.max_length")
    with pytest.raises(StageError, match="lower it"):
        check_length(model, positions + 1, "data.max_length")
    with pytest.raises(ValueError, match="lower it"):
        kind_of(a_task("language_modeling", (), "perplexity")).check_room(model, positions)
