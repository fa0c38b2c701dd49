"""Tiny models of four families, with every weight and bias drawn at random, and padded batches for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

Sample = tuple[Tensor, int]
"""Token ids `(tokens,)` and a label."""

VOCABULARY, LABELS, PAD = 30, 3, 0


def bert() -> PreTrainedModel:
    """Separate query, key and value; dropout on, as by default."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=32,
        num_labels=LABELS,
    )
    return drawn(BertForSequenceClassification, config)


def gpt2() -> PreTrainedModel:
    """Conv1D everywhere, query, key and value in one."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, num_labels=LABELS, pad_token_id=PAD
    )
    return drawn(GPT2ForSequenceClassification, config)


def llama() -> PreTrainedModel:
    """Two key-value heads for four query heads, no biases."""
    return drawn(LlamaForSequenceClassification, _llama_config())


def causal_llama() -> PreTrainedModel:
    """The same with a head that is tied to the embedding."""
    return drawn(LlamaForCausalLM, _llama_config())


def albert() -> PreTrainedModel:
    """One layer that runs three times."""
    config = AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        num_labels=LABELS,
    )
    return drawn(AlbertForSequenceClassification, config)


def t5() -> PreTrainedModel:
    """An encoder whose blocks read the type of the weight of their last layer before they call it."""
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, pad_token_id=PAD)
    return drawn(T5EncoderModel, config)


def words() -> PreTrainedTokenizerBase:
    """A tokenizer with a word for each id of the tiny models; it returns ids and a mask, as for decoders."""
    vocabulary = {"<pad>": PAD, "<unk>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", model_input_names=names
    )


FAMILIES = {"bert": bert, "gpt2": gpt2, "llama": llama}


def _llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        num_labels=LABELS,
        pad_token_id=PAD,
        tie_word_embeddings=True,
    )


def drawn(family: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build the same model every time, with no parameter at zero or one, so that a forgotten bias shows."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = family(config)
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def samples(count: int, shortest: int = 2, longest: int = 7, seed: int = 0) -> list[Sample]:
    """Draw examples of different lengths without the padding token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = draw(shortest, longest + 1, count).tolist()
    return [(draw(PAD + 1, VOCABULARY, length), int(draw(0, LABELS))) for length in lengths]


def collate(some: Sequence[Sample], length: int = 0, side: str = "right") -> dict[str, Tensor]:
    """Return a batch, padded on `side` to the longest example or to `length`; positions count from the first token."""
    length = max(length, *(len(ids) for ids, _ in some))
    ids = torch.full((len(some), length), PAD)
    mask = torch.zeros_like(ids)
    for row, (sample, _) in enumerate(some):
        where = slice(0, len(sample)) if side == "right" else slice(length - len(sample), length)
        ids[row, where], mask[row, where] = sample, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = torch.tensor([label for _, label in some])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


def batches(some: Sequence[Sample], size: int, length: int = 0, side: str = "right") -> list[dict[str, Tensor]]:
    """Return examples in batches of `size`."""
    return [collate(some[start : start + size], length, side) for start in range(0, len(some), size)]


def assert_same(model: PreTrainedModel, other: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """Assert that weights are equal bit for bit, and outputs up to rounding.

    How a product is summed depends on where in memory its operands begin, and loaded weights are elsewhere.
    """
    some, others = model.state_dict(), other.state_dict()
    assert set(some) == set(others)
    for name, tensor in some.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name
    with torch.no_grad():
        found, expected = other.eval()(**batch), model.eval()(**batch)
    for name in [name for name, value in expected.items() if isinstance(value, Tensor)]:
        torch.testing.assert_close(found[name], expected[name])
