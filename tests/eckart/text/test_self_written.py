"""Text that a model writes: the chances of its tokens, where its documents begin, and what it does not depend on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import eckart
from eckart.model.lstm import LSTMConfig, LSTMForCausalLM
from tests.tiny import VOCABULARY, build, causal_llama, drawn, t5

BEGIN, END = 1, 2


def settled(*chances: float, **special: int | list[int]) -> PreTrainedModel:
    """Return a model in training mode that gives each token these chances, whatever it has read."""
    config = LSTMConfig(vocab_size=len(chances), embedding_size=2, hidden_size=2, num_hidden_layers=1, **special)
    model = LSTMForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.lm_head.bias.copy_(torch.tensor(chances).log())
    return model


def ids(model: PreTrainedModel, examples: int, length: int, **options: Any) -> Tensor:
    return torch.cat([batch["input_ids"] for batch in eckart.write_text(model, examples, length, **options)])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_token_is_as_frequent_as_the_model_has_it(temperature: float) -> None:
    chances = torch.tensor([0.6, 0.3, 0.1, 0.0])
    written = ids(settled(*chances.tolist()), 300, 21, temperature=temperature, batch_size=300)
    powers = chances ** (1 / temperature)
    frequencies = written[:, 1:].flatten().bincount(minlength=4) / 6000
    torch.testing.assert_close(frequencies, powers / powers.sum(), atol=0.03, rtol=0)
    starts = written[:, 0].bincount(minlength=4) / 300
    torch.testing.assert_close(starts, torch.full((4,), 0.25), atol=0.1, rtol=0)


@pytest.mark.parametrize(
    "build_model",
    [
        causal_llama,
        lambda: build("GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2),
        lambda: build("OpenAIGPTLMHeadModel", vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2),
        lambda: build("MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4),
        lambda: drawn(LSTMForCausalLM, LSTMConfig(vocab_size=VOCABULARY, embedding_size=8, hidden_size=8)),
    ],
    ids=["llama", "gpt2", "openai-gpt without a cache", "mamba", "lstm"],
)
def test_it_is_what_reading_the_whole_text_for_each_token_gives(build_model: Callable[[], PreTrainedModel]) -> None:
    model = build_model().eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    written = ids(model, 5, 12, first="random", seed=3)
    generator = torch.Generator().manual_seed(3)
    text = written[:, :1]
    for _ in range(11):
        with torch.no_grad():
            chances = model(input_ids=text).logits[:, -1].softmax(-1)
        text = torch.cat([text, chances.multinomial(1, generator=generator)], 1)
    assert torch.equal(written, text)
    assert len(set(map(tuple, written.tolist()))) == 5


@pytest.mark.parametrize("end", [END, [END, 3]])
def test_after_an_end_of_text_a_document_begins(end: int | list[int]) -> None:
    """In the same block. The model itself never writes the beginning of a text."""
    model = settled(0.4, 0.0, 0.3, 0.3, bos_token_id=BEGIN, eos_token_id=end)
    ends = {end} if isinstance(end, int) else {*end}
    written = ids(model, 20, 16, first="bos").tolist()
    for block in written:
        assert block[0] == BEGIN
        assert all((after == BEGIN) == (before in ends) for before, after in itertools.pairwise(block))
    assert any(block.count(BEGIN) > 2 for block in written)
    prompts = ([0, BEGIN], [BEGIN, BEGIN])
    starts = []
    for block in ids(model, 20, 16, prompts=prompts).tolist():
        places = [0, *(place + 1 for place, token in enumerate(block) if token in ends)]
        starts += [block[place : place + 2] for place in places if place < 15]
    assert {tuple(start) for start in starts} == {tuple(prompt) for prompt in prompts}


def test_a_token_that_ends_a_text_and_begins_one_is_there_once() -> None:
    """As for GPT-2. Every second token ends a text, and only the draws decide which."""
    written = ids(settled(0.5, 0.0, 0.5, eos_token_id=END), 100, 20, first="bos", batch_size=100)
    assert (written[:, 0] == END).all()
    assert (written[:, 1:] == END).float().mean() == pytest.approx(0.5, abs=0.05)


def test_the_same_seed_gives_the_same_text_and_nothing_else_decides() -> None:
    model = causal_llama().train()
    torch.manual_seed(1)
    first = ids(model, 5, 12, batch_size=2)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    model.generation_config.repetition_penalty, model.generation_config.max_length = 5.0, 3
    assert torch.equal(ids(model, 5, 12, batch_size=2), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.generation_config.repetition_penalty == 5.0
    assert not torch.equal(ids(model, 5, 12, batch_size=2, seed=1), first)


def test_a_model_is_calibrated_with_its_own_text() -> None:
    model = causal_llama().to(torch.bfloat16)
    batches = eckart.write_text(model, 6, 12, batch_size=4)
    assert [batch["labels"].shape for batch in batches] == [(4, 12), (2, 12)]
    small, _ = eckart.compress(model, batches, keep=0.6, recipe="kfac")
    assert small.num_parameters() < model.num_parameters()


@pytest.mark.parametrize(
    ("model", "options", "named"),
    [
        (t5, {}, "T5"),
        (causal_llama, {"length": 33}, "32"),
        (causal_llama, {"length": 1}, "length"),
        (causal_llama, {"prompts": []}, "prompts"),
        (causal_llama, {"prompts": [[]]}, "prompts"),
        (causal_llama, {"prompts": [[1] * 8]}, "prompts"),
        (causal_llama, {"prompts": [[10_000]]}, "tokenizer"),
        (causal_llama, {"batch_size": 0}, "batch_size"),
        (causal_llama, {"first": "eos"}, "random"),
        (causal_llama, {"temperature": 0.0}, "temperature"),
        (lambda: settled(0.5, 0.5), {"first": "bos"}, "random"),
    ],
)
def test_what_cannot_be_written_is_an_error_that_names_it(
    model: Callable[[], PreTrainedModel], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        eckart.write_text(model(), 2, **{"length": 8, **options})
