"""Embeddings: how they are pooled, and the loss that calibrates a model without labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

import eckart
from eckart.calibration.embeddings import Pooling, embedding_loss, embeddings
from eckart.calibration.losses import DrawnLoss
from eckart.calibration.statistics import collect
from eckart.model.batches import Batch, without_labels
from eckart.model.targets import find_targets
from tests import tiny

SAMPLES = tiny.samples(12)
BATCHES = [without_labels(batch) for batch in tiny.batches(SAMPLES, 6)]
DRAWS = 2000


def encoder() -> PreTrainedModel:
    return tiny.of("BertModel", **tiny.LAYERS, **tiny.LENGTH)().eval()


def outputs(states: Any) -> ModelOutput:
    return ModelOutput(last_hidden_state=torch.tensor(states, dtype=torch.float32))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("mean", [0.8, 0.6]), ("max", [4 / 32**0.5, 4 / 32**0.5]), ("cls", [0.0, 1.0]), ("lasttoken", [1.0, 0.0])],
)
@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_padding_does_not_count_on_either_side(pooling: Pooling, expected: list[float], side: str) -> None:
    """Tokens (0, 4), (4, 2) and (4, 0) have the mean (8, 6) ÷ 3 and the maximum (4, 4); padding is larger than all."""
    states, mask = [[0.0, 4.0], [4.0, 2.0], [4.0, 0.0]], [1, 1, 1]
    padding = [[9.0, -9.0]] * 2
    batch = {"attention_mask": torch.tensor([{"left": [0, 0, *mask], "right": [*mask, 0, 0], "none": mask}[side]])}
    padded = {"left": padding + states, "right": states + padding, "none": states}[side]
    torch.testing.assert_close(embeddings(pooling)(outputs([padded]), batch), torch.tensor([expected]))
    if side == "none":
        torch.testing.assert_close(embeddings(pooling)(outputs([padded]), {}), torch.tensor([expected]))


def moment(loss_of: Any, at: Tensor, batch: Batch) -> Tensor:
    """Return the mean over draws of g gᵀ for the gradient g of the loss by `at`, flattened."""
    at.requires_grad_()
    gradients = [torch.autograd.grad(loss_of(seed)(lambda **_: ModelOutput(x=at), batch), at) for seed in range(DRAWS)]
    stacked = torch.stack([gradient.flatten() for (gradient,) in gradients])
    return stacked.T @ stacked / DRAWS


def test_second_moments_over_draws_are_the_squared_change_of_answers() -> None:
    """For answers W x_n of two texts, J_nᵀ J_n is I ⊗ x_n x_nᵀ; draws of two texts are independent, so these add up."""
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    batch = {"input_ids": torch.tensor([[5, 6], [5, 7]])}
    found = moment(lambda seed: DrawnLoss(lambda out, _: x @ out["x"].T, seed, classes=False), torch.ones(2, 2), batch)
    torch.testing.assert_close(found, torch.kron(torch.eye(2), x.T @ x), rtol=0, atol=0.7)


def test_the_length_of_a_state_does_not_matter_because_embeddings_have_length_1() -> None:
    """The Jacobian of s ÷ ‖s‖ is (I − e eᵀ) ÷ ‖s‖; for s = (3, 4), e is (0.6, 0.8)."""
    batch = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])}
    states = torch.tensor([[[3.0, 4.0]]])

    def loss_of(seed: int) -> Any:
        loss = embedding_loss("mean", seed)
        return lambda model, batch: loss(lambda **_: ModelOutput(last_hidden_state=model().x), batch)

    expected = torch.tensor([[0.64, -0.48], [-0.48, 0.36]]) / 25
    torch.testing.assert_close(moment(loss_of, states, batch), expected, rtol=0.1, atol=1e-9)


def test_the_value_is_the_same_for_all_models() -> None:
    model, other = encoder(), encoder()
    with torch.no_grad():
        for values in other.parameters():
            values.mul_(1.5)
    loss = embedding_loss("cls")
    torch.testing.assert_close(loss(model, BATCHES[0]), loss(other, BATCHES[0]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_draws_do_not_depend_on_batches_and_padding(side: str) -> None:
    model = encoder().double()

    def batches(size: int, length: int) -> list[Batch]:
        some = tiny.batches(SAMPLES, size, length, side)
        return [without_labels(batch) for batch in some]

    targets = find_targets(model, batches(1, 0)[0]).targets
    alone, together = (
        collect(model, some, targets, ["output_gradients"], embedding_loss("lasttoken", 3))["output_gradients"]
        for some in (batches(1, 0), batches(4, 11))
    )
    assert any(bool(moment.any()) for moment in alone.values())
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-9, atol=1e-12)


def test_without_a_mask_all_tokens_count_and_without_tokens_there_is_no_draw() -> None:
    model, loss = encoder(), embedding_loss("mean")
    ids = torch.tensor([[5, 6, 7]])
    with_mask = loss(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    torch.testing.assert_close(loss(model, {"input_ids": ids}), with_mask)
    with pytest.raises(ValueError, match="input_ids"):
        loss(model, {"inputs_embeds": torch.ones(1, 3, model.config.hidden_size)})


@pytest.mark.parametrize(
    ("given", "match"),
    [("median", "lasttoken"), (3, "int.*SentenceTransformer"), (None, "NoneType"), (nn.Sequential(), "Sequential")],
)
def test_what_has_no_embeddings_is_refused(given: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        embedding_loss(given)


def test_a_model_of_transformers_is_refused_and_poolings_are_named() -> None:
    with pytest.raises(ValueError, match=r"BertModel.*mean, cls"):
        embedding_loss(encoder())
    with pytest.raises(ValueError, match="last_hidden_state"):
        eckart.compress(tiny.bert(), BATCHES, 0.5, "kfac", loss=embedding_loss("mean"))


@pytest.mark.parametrize("recipe", ["fwsvd", "anchored", "aa_svd", "lems"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_without_a_head_is_compressed_without_labels(recipe: str) -> None:
    """lems also compares the models' answers: here embeddings."""
    model = encoder()
    settings = eckart.recipes()[recipe]
    if recipe == "lems":
        settings = settings.model_copy(update={"ranks": settings.ranks.model_copy(update={"examples": 6})})
    small, report = eckart.compress(model, BATCHES, 0.5, settings, loss=embedding_loss("mean"))
    assert report.keep <= 0.5
    texts = BATCHES[0]
    before, after = (embeddings("mean")(some(**texts), texts) for some in (model, small))
    assert 0.5 < float((before * after).sum(1).mean()) < 1


@pytest.mark.parametrize(
    "ranks", ["tolerance", "zero_sum", {"kind": "borrowed", "ranks": {"kind": "tolerance"}}], ids=str
)
def test_ranks_that_judge_by_the_loss_are_refused_before_any_work(ranks: Any) -> None:
    """Its value and its mean gradient say nothing about a model."""
    recipe = {"weighting": "inputs", "ranks": ranks}
    with pytest.raises(ValueError, match=r"ranks .*drawn"):
        eckart.compress(encoder(), BATCHES, 0.5, recipe, loss=embedding_loss("mean"))


def test_a_model_without_a_head_is_told_of_the_loss() -> None:
    with pytest.raises(ValueError, match=r'loss=eckart\.embedding_loss\("mean"\)'):
        eckart.compress(encoder(), BATCHES, 0.5)


class SentenceTransformer(nn.Sequential):
    """Stands in for that of the package; tests/clients/test_sentence_transformers.py has the real one."""

    __module__ = "sentence_transformers.sentence_transformer.model"


def test_a_sentence_transformer_is_told_how_to_compress_the_model_in_it() -> None:
    first = nn.Module()
    first.model = encoder()
    lines = r"eckart\.compress\(model\[0\]\.model, .*loss=eckart\.embedding_loss\(model\)\); model\[0\]\.model = small"
    with pytest.raises(ValueError, match=lines):
        eckart.compress(SentenceTransformer(first), BATCHES, 0.5)  # type: ignore[call-overload]


def test_a_first_module_that_does_more_than_a_forward_is_refused() -> None:
    first = nn.Module()
    first.modality_config = {"text": {"method": "get_text_features"}}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="forward"):
        embedding_loss(SentenceTransformer(first))
