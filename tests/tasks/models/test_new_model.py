"""A new model: its vocabulary is the words of the training text, and what its config cannot be is refused."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

from tasks.artifacts.errors import StageError
from tasks.artifacts.task_spec import Task
from tasks.config.schema import Model, NewModel
from tasks.models.new_model import make, word_tokenizer
from tests.workspace import a_task

TEXT = a_task("language_modeling", (), "perplexity")
BERT = {"hidden_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 4}
TRAIN = pd.DataFrame({"text": ["the plot is dull\n", "the <unk> is N , n't it\n"]})


def new(**settings: Any) -> NewModel:
    return NewModel(**{"model_type": "eckart_lstm", "config": {"embedding_size": 4, "hidden_size": 6}, **settings})


def test_words_are_the_most_frequent_ones_and_a_line_break_is_a_token() -> None:
    tokenizer = word_tokenizer(new(vocabulary=3), TRAIN["text"])
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == ["<pad>", "<unk>", "\n", "is", "the", ","]
    assert tokenizer("the <unk>\nis, is N\n", add_special_tokens=False)["input_ids"] == [4, 1, 2, 1, 3, 1, 2]


def test_a_word_that_is_spelled_as_padding_leaves_no_gap() -> None:
    tokenizer = word_tokenizer(new(), ["a <pad> b", "b"])
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_punctuation_ends_a_word_only_where_that_is_asked() -> None:
    for words, tokens in (("spaces", ["it,", "n't"]), ("punctuation", ["it", ",", "n", "'", "t"])):
        tokenizer = word_tokenizer(new(words=words), ["it, n't"])
        assert tokenizer.tokenize("it, n't") == tokens


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (new(), TEXT),
        (
            new(model_type="bert", config=BERT),
            a_task("classification", ("a", "b"), "accuracy"),
        ),
    ],
)
def test_a_model_of_the_config_has_a_row_for_each_word_and_the_head_of_the_task(model: NewModel, task: Task) -> None:
    torch.manual_seed(0)
    made = make(model, "float32", task, TRAIN)
    assert made.model.get_input_embeddings().num_embeddings == len(made.tokenizer) == 11
    ids = made.tokenizer(["the plot is dull"], return_tensors="pt")["input_ids"]
    assert made.model(input_ids=ids).logits.shape == ((1, 4, 11) if task is TEXT else (1, 2))


def test_texts_begin_and_end_with_tokens_of_the_new_vocabulary() -> None:
    """GPT-2's own end of text is token 50,256, and Llama's beginning of text the unknown word."""
    layers = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8}
    for model in (
        new(),
        new(model_type="gpt2", config={"n_embd": 12, "n_layer": 1}),
        new(model_type="llama", config=layers),
    ):
        config = make(model, "float32", TEXT, TRAIN).model.config
        assert (config.bos_token_id, config.eos_token_id) == (None, 2)
    told = new(model_type="llama", config={**layers, "eos_token_id": 1})
    assert make(told, "float32", TEXT, TRAIN).model.config.eos_token_id == 1
    with pytest.raises(StageError, match=r"eos_token_id is 999: .* 10"):
        make(new(model_type="llama", config={**layers, "eos_token_id": 999}), "float32", TEXT, TRAIN)


@pytest.mark.parametrize("wrong", [{"hiden_size": 8}, {"vocab_size": 8}])
def test_a_value_that_the_config_does_not_have_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(StageError, match=next(iter(wrong))):
        make(new(config=wrong), "float32", TEXT, TRAIN)


def test_a_model_is_either_new_or_has_a_base() -> None:
    for settings in ({"base": None}, {"new": new()}):
        with pytest.raises(ValueError, match="base or new"):
            Model(**settings)
    assert Model(base=None, new=new()).new
