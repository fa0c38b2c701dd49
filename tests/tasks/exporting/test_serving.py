"""Pipelines of transformers on candidates: they answer what the model in memory does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertModel, pipeline

import eckart as eckart  # teaches transformers the format
from eckart.model import hf_format
from eckart.model.layers import factorized
from tests import tiny
from tests.tasks.exporting.test_merged_checkpoint import compress

TEXTS = ["w2 w3 w4", "w9"]


@pytest.mark.parametrize("stored", ["factors", "rows"])
def test_a_text_generation_pipeline_writes_what_the_model_does(stored: str, tmp_path: Path) -> None:
    small, words = compress(tiny.causal_llama(), stored), tiny.words()
    hf_format.save(small, tmp_path)
    words.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", str(tmp_path), tokenizer=words)
    assert factorized(pipe.model) == factorized(small) != {}
    for text in TEXTS:
        ids = words(text, return_tensors="pt")["input_ids"]
        expected = small.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        (generated,) = pipe(text, max_new_tokens=5, do_sample=False, return_full_text=False)
        assert generated["generated_text"].split() == words.decode(expected, skip_special_tokens=True).split()


def test_a_feature_extraction_pipeline_gives_the_last_hidden_state(tmp_path: Path) -> None:
    """The model is a classifier, whose head is left out."""
    small, words = compress(tiny.bert(), "pivoted"), tiny.words()
    hf_format.save(small, tmp_path)
    words.save_pretrained(tmp_path)
    pipe = pipeline("feature-extraction", str(tmp_path))
    assert isinstance(pipe.model, BertModel)
    for text in TEXTS:
        with torch.no_grad():
            expected = small(**words(text, return_tensors="pt"), output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(torch.tensor(pipe(text)), expected)
