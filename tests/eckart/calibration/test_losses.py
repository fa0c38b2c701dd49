"""Calibration losses with labels that the model expects or draws, in place of given ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import ModelOutput

from eckart.calibration.losses import (
    DrawnLoss,
    causal_loss,
    expected_losses,
    mean_loss_times_batch,
    predictions_of,
    span_loss,
    token_loss,
)
from eckart.calibration.predictions import logits_of
from eckart.calibration.statistics import collect
from eckart.model.batches import IGNORED, Batch, without_labels
from eckart.model.targets import find_targets
from tasks.nlp_tasks import kind_of
from tests import tiny
from tests.eckart.model.test_architectures import one_sample
from tests.workspace import a_task

LANGUAGE = kind_of(a_task("language_modeling", (), "perplexity"))
SAMPLES = tiny.samples(6)
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def case(family: str):
    """A classifier in float64 and its targets."""
    model = tiny.ARCHITECTURES[family].build().double().eval()
    return model, find_targets(model, tiny.collate(SAMPLES[:1])).targets


def probabilities(model, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits.softmax(-1)


@pytest.mark.parametrize("family", ["gpt2", "albert"])
def test_expected_statistics_are_the_sum_over_labels_weighted_by_probability(family):
    """Second moments of each example's gradient for each label, from autograd; not those of the mean gradient."""
    model, targets = case(family)
    expected: dict[tuple[str, str], Tensor] = {}
    for ids, _ in SAMPLES:
        alone = tiny.collate([(ids, 0)])
        for label, share in enumerate(probabilities(model, alone)[0]):
            for key, value in one_sample(model, targets, {**alone, "labels": torch.tensor([label])}).items():
                if key[0] != "gradients":  # no second moment
                    expected[key] = expected.get(key, 0) + share * value / len(SAMPLES)
    model.requires_grad_(False)
    batches = [tiny.collate(SAMPLES[:4], 9), tiny.collate(SAMPLES[4:])]
    found = collect(model, batches, targets, {kind for kind, _ in expected} - {"tokens"}, expected_losses)
    assert {(kind, key) for kind, some in found.items() for key in some} == set(expected)
    for (kind, key), value in expected.items():
        torch.testing.assert_close(found[kind][key], value, rtol=1e-8, atol=1e-12, msg=f"{kind} of {key}")


def test_expected_and_drawn_statistics_need_no_given_labels():
    model, targets = case("bert")
    batch = tiny.collate(SAMPLES)
    other = {**batch, "labels": (batch["labels"] + 1) % tiny.LABELS}
    without = without_labels(batch)
    for loss in (expected_losses, DrawnLoss(logits_of, 0)):
        moments = [collect(model, [one], targets, ["output_gradients"], loss) for one in (batch, other, without)]
        for name, moment in moments[0]["output_gradients"].items():
            assert all(torch.equal(some["output_gradients"][name], moment) for some in moments)


def test_drawn_labels_do_not_depend_on_batches_and_padding():
    model, targets = case("bert")
    alone, together = (
        collect(model, batches, targets, ["output_gradients"], DrawnLoss(logits_of, 3))["output_gradients"]
        for batches in (tiny.batches(SAMPLES, 1), tiny.batches(SAMPLES, 4, 11))
    )
    for name, moment in alone.items():
        torch.testing.assert_close(together[name], moment, **CLOSE)


def test_the_drawn_loss_is_the_sum_over_examples_of_their_means():
    """For blocks of one length, as in language modeling, with every token drawn on its own."""
    model, loss = tiny.causal_llama().double().eval(), DrawnLoss(LANGUAGE.predictions, 3)
    some = [{"input_ids": tiny.samples(1, 6, 6, seed)[0][0].unsqueeze(0)} for seed in range(4)]
    some = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in some]
    together = {name: torch.cat([batch[name] for batch in some]) for name in some[0]}
    each = torch.stack([loss(model, batch) for batch in some])
    torch.testing.assert_close(loss(model, together), each.sum())
    assert torch.equal(loss(model, together), loss(model, together))
    assert not torch.equal(DrawnLoss(LANGUAGE.predictions, 4)(model, together), loss(model, together))


def test_labels_are_drawn_by_their_probabilities():
    """With one prediction for each example the loss is −log p of the drawn label."""
    shares = torch.tensor([0.5, 0.3, 0.2])
    model = lambda input_ids, attention_mask: ModelOutput(logits=shares.log().expand(len(input_ids), 3))  # noqa: E731
    drawn: Counter[float] = Counter()
    for seed in range(500):
        batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
        drawn[round(float(DrawnLoss(logits_of, seed)(model, batch).neg().exp()), 3)] += 1
    assert set(drawn) == {0.5, 0.3, 0.2}
    assert all(abs(count / 500 - share) < 0.07 for share, count in drawn.items())


def test_predictions_of_a_causal_loss_are_those_that_the_loss_reads():
    """An answer of one token is predicted at the last token of the prompt."""
    model = tiny.causal_llama().eval()
    batch = tiny.collate(SAMPLES, side="left")
    answers = [(row, place) for row, place in batch["attention_mask"].nonzero().tolist() if (row + place) % 3 == 0]
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for row, place in answers:
        labels[row, place] = batch["input_ids"][row, place]
    batch = {**batch, "labels": labels}
    outputs = model(**batch)
    real = batch["attention_mask"].bool()
    expected = [outputs.logits[row, place - 1] for row, place in answers if place and real[row, place - 1]]
    assert 0 < len(expected) < len(answers)
    torch.testing.assert_close(predictions_of(causal_loss, None)(outputs, batch), torch.stack(expected))


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        ("LlamaForCausalLM", causal_loss),
        ("LlamaForCausalLM", mean_loss_times_batch),
        ("BertForTokenClassification", token_loss),
        ("BertForTokenClassification", mean_loss_times_batch),
        ("BertForQuestionAnswering", span_loss),
        ("BertForQuestionAnswering", mean_loss_times_batch),
        ("BertForSequenceClassification", mean_loss_times_batch),
    ],
)
def test_predictions_of_any_loss_do_not_depend_on_padding(family, loss):
    """So a distance of predictions, which is a mean over them, does not depend on it either."""
    options = tiny.GROUPED if "Llama" in family else {**tiny.LAYERS, **tiny.LENGTH}
    model = tiny.of(family, **options, **({"num_labels": 2} if "Question" in family else {}))().eval()

    def predictions(length: int) -> Tensor:
        batch = dict(tiny.collate(SAMPLES, length))
        tokens = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        if "Question" in family:
            ends = batch.pop("labels").clamp(max=1)
            batch |= {"start_positions": ends, "end_positions": ends}
        elif "Sequence" not in family:
            batch["labels"] = tokens if "Causal" in family else tokens.clamp(max=tiny.LABELS - 1)
        found = predictions_of(loss, None)(model(**batch), batch)
        return found.log_softmax(-1).exp().sort(descending=True).values[:, :2]

    with torch.no_grad():
        torch.testing.assert_close(predictions(0), predictions(20), rtol=1e-4, atol=1e-5)


def test_predictions_of_a_loss_of_ones_own_are_at_the_tokens_that_the_logits_are_about():
    @dataclass
    class Own:  # which cannot be hashed
        weight: float = 1.0

        def __call__(self, model, batch: Batch) -> Tensor:
            return self.weight * model(**batch).loss

    predictions, logits = predictions_of(Own(), None), torch.randn(2, 5, 3)
    words = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    decoded = ModelOutput(logits=logits, encoder_last_hidden_state=torch.zeros(2, 4, 8))
    source = torch.ones(2, 5)
    for batch in ({"decoder_attention_mask": words}, {"labels": words.masked_fill(words == 0, IGNORED)}):
        assert torch.equal(predictions(decoded, {"attention_mask": source, **batch}), logits[words == 1])
    with_image = {"attention_mask": torch.ones(2, 3)}  # two tokens of an image come before those of the text
    assert torch.equal(predictions(ModelOutput(logits=logits), with_image), logits.flatten(0, 1))
