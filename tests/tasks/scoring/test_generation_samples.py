"""Continuations by language models: compared with greedy decoding written out, and the texts that they continue."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from tasks.artifacts.task_spec import Task
from tasks.nlp_tasks import kind_of
from tasks.scoring.generation_samples import continuations
from tests.tasks.nlp_tasks.test_language_modeling import END, TEXT, model, task, tokenizer
from tests.workspace import a_task

TEST = pd.DataFrame({"text": [TEXT]})


def test_a_continuation_is_the_likeliest_token_after_token() -> None:
    """After the first tokens of three blocks: the first, and those at one and two thirds of the split."""
    llama, words = model().train(), tokenizer()
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.9  # which is off
    blocks = kind_of(task(16)).encode(TEST, words, "test")["input_ids"]
    samples = continuations(llama, words, task(16), TEST, 5)
    for part, sample in zip(range(3), samples, strict=True):
        ids = blocks[part * len(blocks) // 3][:5]
        assert sample.beginning == words.decode(ids)
        for _ in range(5):
            with torch.no_grad():
                ids = [*ids, int(llama(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
            if ids[-1] == END:
                break
        assert sample.text == words.decode(ids[5:], skip_special_tokens=True)
    assert len({sample.text for sample in samples}) > 1


def test_no_more_than_half_a_block_is_read_and_nothing_behind_the_end() -> None:
    llama = model()
    assert {len(sample.beginning) for sample in continuations(llama, tokenizer(), task(8), TEST, 1000)} == {4}
    llama.lm_head = torch.nn.Linear(16, END + 1)
    with torch.no_grad():  # whatever it reads, the end is likeliest
        llama.lm_head.weight.zero_()
        llama.lm_head.bias.copy_(torch.arange(END + 1))
    assert {sample.text for sample in continuations(llama, tokenizer(), task(8), TEST, 4)} == {""}


def test_fewer_blocks_give_fewer_texts() -> None:
    short = pd.DataFrame({"text": ["the plot is dull"]})  # 16 bytes
    assert [sample.beginning for sample in continuations(model(), tokenizer(), task(8), short, 4)] == ["the ", " is "]


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [(task(8), 0), (task(1), 4), (a_task("classification", ("no", "yes"), "accuracy"), 4)],
    ids=["none is asked for", "no room", "no language model"],
)
def test_nothing_is_written(spec: Task, tokens: int) -> None:
    assert continuations(model(), tokenizer(), spec, TEST, tokens) == ()
