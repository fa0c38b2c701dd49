"""The LSTM made of nn.Linear equals torch's own, and compresses like any other Hugging Face model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForCausalLM

from eckart.model.lstm import LSTMForCausalLM, LSTMModel
from tests import tiny

VOCABULARY, EMBEDDING, HIDDEN = tiny.VOCABULARY, 6, 8
IDS = torch.stack([ids for ids, _ in tiny.samples(3, 5, 5)])
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, another order of additions


def parts(layers: int = 2, tied: bool = False, head_bias: bool = True, **options) -> tuple:
    """A plain torch model in float64: embedding, LSTM and head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        width = HIDDEN if tied else EMBEDDING
        embedding = nn.Embedding(VOCABULARY, width)
        lstm = nn.LSTM(width, HIDDEN, layers, **({"batch_first": True} | options))
        head = nn.Linear(HIDDEN, VOCABULARY, bias=head_bias)
    if tied:
        head.weight = embedding.weight
    return embedding.double(), lstm.double(), head.double()


def plain_logits(embedding: nn.Embedding, lstm: nn.LSTM, head: nn.Linear, ids: Tensor) -> Tensor:
    x = embedding(ids)
    return head(lstm(x)[0] if lstm.batch_first else lstm(x.transpose(0, 1))[0].transpose(0, 1))


def tiny_lstm() -> LSTMForCausalLM:
    return LSTMForCausalLM.from_torch(*parts()).float()


def padded(side: str = "right") -> dict[str, Tensor]:
    """Return texts of 2 to 5 tokens, padded with a token that would change outputs if it were read."""
    batch = tiny.collate(tiny.samples(4, 2, 5), 7, side)
    ids, mask = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 9), batch["attention_mask"]
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def assert_same(model: LSTMForCausalLM, other: LSTMForCausalLM) -> None:
    assert list(model.state_dict()) == list(other.state_dict())
    tiny.assert_same(model, other, {"input_ids": IDS})


# --- against torch ---------------------------------------------------------------------------------------------------

PLAIN = {
    "one layer": {"layers": 1},
    "two layers": {"layers": 2},
    "time first": {"batch_first": False},
    "no biases": {"bias": False, "head_bias": False},
    "tied": {"tied": True},
}


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_logits_and_gradients_equal_those_of_torch(options):
    plain = parts(**options)
    model = LSTMForCausalLM.from_torch(*plain)
    logits, expected = model(IDS).logits, plain_logits(*plain, IDS)
    torch.testing.assert_close(logits, expected, **EXACT)

    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    embedding, lstm, head = plain
    pairs = [(model.model.embed_tokens.weight, embedding.weight), (model.lm_head.weight, head.weight)]
    for index, layer in enumerate(model.model.layers):
        for name, module in (("ih", layer.input_map), ("hh", layer.hidden_map)):
            pairs += [(p, lstm.get_parameter(f"{kind}_{name}_l{index}")) for kind, p in module.named_parameters()]
    assert model.num_parameters() == sum(p.numel() for p in {p for part in plain for p in part.parameters()})
    for ours, torchs in pairs:
        torch.testing.assert_close(ours.grad, torchs.grad, **EXACT)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lstm": nn.LSTM(EMBEDDING, HIDDEN, bidirectional=True)}, "bidirectional"),
        ({"lstm": nn.LSTM(EMBEDDING, HIDDEN, proj_size=3)}, "proj_size=0"),
        ({"lstm": nn.GRU(EMBEDDING, HIDDEN)}, "GRU"),
        ({"lstm": nn.LSTM(EMBEDDING + 1, HIDDEN)}, r"\b7\b"),
        ({"embedding": nn.Embedding(VOCABULARY, EMBEDDING, max_norm=1.0)}, "max_norm=None"),
        ({"head": nn.Linear(HIDDEN + 1, VOCABULARY)}, r"\b9\b"),
        ({"head": nn.Linear(HIDDEN, 4)}, r"\b4\b"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, named):
    plain = dict(zip(("embedding", "lstm", "head"), parts(), strict=True))
    with pytest.raises(ValueError, match=named):
        LSTMForCausalLM.from_torch(**plain | change)


# --- a model of Hugging Face -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_with_and_without_its_head(tied, tmp_path):
    model = LSTMForCausalLM.from_torch(*parts(tied=tied)).float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LSTMForCausalLM
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert_same(loaded, model)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is LSTMModel
    with torch.no_grad():
        torch.testing.assert_close(model.lm_head(base(IDS).last_hidden_state), model(IDS).logits)


def test_the_loss_is_the_cross_entropy_of_the_next_tokens():
    model = tiny_lstm()
    labels = IDS.clone()
    labels[0, 1], labels[1, 3:] = -100, -100
    outputs = model(IDS, labels=labels)
    chances = outputs.logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(outputs.loss, -chances[labels[:, 1:] != -100].mean())


def test_hidden_states_are_the_embeddings_and_the_outputs_of_the_layers():
    model = tiny_lstm()
    assert model(IDS).hidden_states is None
    outputs = model(IDS, output_hidden_states=True)
    assert [state.shape[-1] for state in outputs.hidden_states] == [EMBEDDING, HIDDEN, HIDDEN]
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(IDS))
    assert torch.equal(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    tuples = model(IDS, output_hidden_states=True, return_dict=False)
    assert torch.equal(tuples[0], outputs.logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_output_and_no_gradient(side):
    model, batch = LSTMForCausalLM.from_torch(*parts()), padded(side)
    logits = model(**batch).logits
    total = 0.0
    for row, real in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][row : row + 1, real]
        alone = model(ids).logits
        torch.testing.assert_close(logits[row : row + 1, real], alone, **EXACT)
        total = total + cross_entropy(alone[0, :-1], ids[0, 1:], reduction="sum")
    predicted = (batch["labels"][:, 1:] != -100) & batch["attention_mask"][:, :-1].bool()
    sums = cross_entropy(logits[:, :-1][predicted], batch["labels"][:, 1:][predicted], reduction="sum")
    parameters = list(model.parameters())
    for ours, alone in zip(torch.autograd.grad(sums, parameters), torch.autograd.grad(total, parameters), strict=True):
        torch.testing.assert_close(ours, alone, **EXACT)
