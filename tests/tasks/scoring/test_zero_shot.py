"""Zero-shot tasks: lm-evaluation-harness asks a tiny language model; its data come from here instead of the hub."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import lm_eval.tasks
import pytest
import torch
from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tasks.artifacts.errors import StageError
from tasks.scoring.zero_shot import zero_shot
from tests.workspace import tiny_tokenizer as words

QUESTIONS = [("the plot is", ["dull", "fresh"], 0), ("the cast and the music", ["is warm", "and and"], 1)] * 3


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = words()
    tokenizer.eos_token = "[SEP]"  # as every language model has
    return tokenizer


def model() -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=len(tiny_tokenizer()), max_position_embeddings=64, **sizes)
        return LlamaForCausalLM(config).eval()


@cache
def some_tasks() -> TaskManager:
    """PIQA's alone: of all tasks thousands of files are read."""
    return TaskManager(include_path=str(Path(lm_eval.tasks.__file__).with_name("piqa")), include_defaults=False)


@pytest.fixture(autouse=True)
def _one_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", some_tasks)


@pytest.fixture
def piqa(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of PIQA are six of ours."""
    rows = Dataset.from_list(
        [{"goal": goal, "sol1": one, "sol2": other, "label": label} for goal, (one, other), label in QUESTIONS]
    )
    split: dict[str, Any] = {"train": rows, "validation": rows}
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: DatasetDict(split))


def likelihood(goal: str, answer: str) -> float:
    """Log-probability of the answer after the question, as PIQA puts it, by hand."""
    tokenizer, one = tiny_tokenizer(), model()
    context = tokenizer(f"Question: {goal}\nAnswer:", add_special_tokens=False)["input_ids"]
    whole = tokenizer(f"Question: {goal}\nAnswer: {answer}", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        scores = one(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(scores[place - 1, whole[place]]) for place in range(len(context), len(whole)))


@pytest.mark.usefixtures("piqa")
def test_the_likelier_answer_is_the_model_s() -> None:
    found = zero_shot(model(), tiny_tokenizer(), ["piqa"], 2)
    right = [label == (likelihood(goal, one) < likelihood(goal, other)) for goal, (one, other), label in QUESTIONS]
    assert found["piqa"]["acc"] == pytest.approx(sum(right) / len(right))
    assert set(found["piqa"]) == {"acc", "acc_norm"}


def test_data_that_come_with_a_script_are_an_error_that_names_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{tmp_path.name}.py").write_text("")
    load = datasets.load_dataset
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: load(str(tmp_path)))
    with pytest.raises(StageError, match=r"^evaluate\.zero_shot: .*\bpiqa\b.*\bscripts\b"):
        zero_shot(model(), tiny_tokenizer(), ["piqa"], 2)


def test_an_unknown_task_is_an_error_that_names_it() -> None:
    with pytest.raises(StageError, match=r"no_such_task.*`lm-eval ls tasks`"):
        zero_shot(model(), tiny_tokenizer(), ["no_such_task"], 2)


def test_without_the_harness_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.scoring.zero_shot.find_spec", lambda name: None)
    with pytest.raises(StageError, match=r"pip install 'eckart\[lm-eval\]'"):
        zero_shot(model(), tiny_tokenizer(), ["piqa"], 2)


@pytest.mark.usefixtures("piqa")
def test_numbers_without_a_limit_are_left_out_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the perplexity of a model that has collapsed; a file of results would hold no number for it."""
    found = {"results": {"piqa": {"acc,none": 0.5, "word_perplexity,none": float("inf"), "f1,none": float("nan")}}}
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda *_, **__: found)
    assert zero_shot(model(), tiny_tokenizer(), ["piqa"], 2) == {"piqa": {"acc": 0.5}}

    for error in (OverflowError("math range error"), ModuleNotFoundError("No module named 'langdetect'")):
        monkeypatch.setattr("lm_eval.simple_evaluate", Mock(side_effect=error))
        with pytest.raises(StageError, match=rf"lm-eval cannot run piqa: {error}"):
            zero_shot(model(), tiny_tokenizer(), ["piqa"], 2)
