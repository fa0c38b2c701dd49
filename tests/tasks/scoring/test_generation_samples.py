"""What language models write on: greedy decoding by hand, and which text they read."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from tasks.artifacts.task_spec import SPLITS, Task
from tasks.nlp_tasks import kind_of
from tasks.scoring.generation_samples import continuations
from tests.tasks.nlp_tasks.test_language_modeling import END, TEXT, model, task, tokenizer
from tests.workspace import a_task


def write_test_split(root: Path, one: Task, text: str = TEXT) -> None:
    (root / SPLITS).mkdir(parents=True)
    (root / SPLITS / "task.json").write_text(one.model_dump_json())
    pd.DataFrame({"text": [text]}).to_parquet(root / SPLITS / "test.parquet")


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_continuation_is_the_likeliest_token_after_token(workspace: Path) -> None:
    """Behind the first tokens of the first block, of that a third and of that two thirds into the split."""
    write_test_split(workspace, task(16))
    one, words = model(), tokenizer()
    blocks = kind_of(task(16)).encode(pd.DataFrame({"text": [TEXT]}), words, "test")["input_ids"]
    found = continuations(one, words, 5)
    for part, each in zip(range(3), found, strict=True):
        ids = blocks[part * len(blocks) // 3][:5]
        assert each.beginning == words.decode(ids)
        for _ in range(5):
            with torch.no_grad():
                ids = [*ids, int(one(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
            if ids[-1] == END:
                break
        assert each.text == words.decode(ids[5:], skip_special_tokens=True)
    assert len({each.text for each in found}) > 1


def test_dropout_is_off(workspace: Path) -> None:
    write_test_split(workspace, task(16))
    one = model()
    for layer in one.model.layers:
        layer.self_attn.attention_dropout = 0.9
    assert continuations(one.train(), tokenizer(), 5) == continuations(one.eval(), tokenizer(), 5)


def test_no_more_than_half_a_block_is_read_and_nothing_behind_the_end(workspace: Path) -> None:
    write_test_split(workspace, task(8))
    one = model()
    assert {len(each.beginning) for each in continuations(one, tokenizer(), 1000)} == {4}
    one.lm_head = torch.nn.Linear(16, END + 1)
    with torch.no_grad():  # whatever it reads, the end is likeliest
        one.lm_head.weight.zero_()
        one.lm_head.bias.copy_(torch.arange(END + 1))
    assert {each.text for each in continuations(one, tokenizer(), 4)} == {""}


def test_fewer_blocks_give_fewer_texts(workspace: Path) -> None:
    write_test_split(workspace, task(8), "the plot is dull")  # 16 bytes
    assert [each.beginning for each in continuations(model(), tokenizer(), 4)] == ["the ", " is "]


@pytest.mark.parametrize(
    ("one", "tokens"),
    [(task(8), 0), (task(1), 4), (a_task("classification", ("no", "yes"), "accuracy"), 4)],
    ids=["none is asked for", "no room", "no language model"],
)
def test_nothing_is_written(workspace: Path, one: Task, tokens: int) -> None:
    write_test_split(workspace, one)
    assert continuations(model(), tokenizer(), tokens) == ()
