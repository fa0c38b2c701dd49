"""Mamba's classifiers read all of a text and nothing of its padding; they compress and train as other models do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.mamba import modeling_mamba
from transformers.models.mamba2 import modeling_mamba2

import eckart
from eckart.model.mamba import (
    Mamba2Config,
    Mamba2ForSequenceClassification,
    MambaConfig,
    MambaForSequenceClassification,
)
from tests import tiny

LENGTHS = (7, 4, 1)


def mamba(**options: object) -> PreTrainedModel:
    return tiny.drawn(MambaForSequenceClassification, MambaConfig(**{**tiny.MAMBA, **options})).eval()


def mamba2(**options: object) -> PreTrainedModel:
    sizes = {**tiny.MAMBA, "time_step_rank": 1, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    return tiny.drawn(Mamba2ForSequenceClassification, Mamba2Config(**{**sizes, **options})).eval()


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, tiny.VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded(side: str) -> dict[str, Tensor]:
    """The texts, padded with a word that also stands in them."""
    ids = torch.full((len(LENGTHS), max(LENGTHS) + 2), 5)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts()):
        place = slice(0, len(text)) if side == "right" else slice(ids.shape[1] - len(text), None)
        ids[row, place], mask[row, place] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("build", [mamba, mamba2])
def test_a_text_has_the_logits_that_it_has_alone(build, side):
    model = build().double()
    alone = torch.cat([tiny.logits(model, {"input_ids": text[None]}) for text in texts()])
    torch.testing.assert_close(tiny.logits(model, padded(side)), alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("build", [mamba, mamba2])
def test_logits_depend_on_every_token_and_are_those_of_its_vectors(build):
    model, ids = build(), texts()[0][None]
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=vectors).logits
    assert torch.equal(logits, model(input_ids=ids).logits)
    logits.square().sum().backward()
    assert vectors.grad.abs().sum(-1).gt(0).all()


@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("single_label_classification", torch.tensor([0, 2, 1])),
        ("multi_label_classification", torch.tensor([[0.0, 1, 1], [0, 0, 0], [1, 0, 0]])),
        ("regression", torch.randn(3, 3)),
    ],
)
def test_the_loss_is_that_of_the_problem(problem_type, labels):
    outputs = mamba(problem_type=problem_type)(**padded("right"), labels=labels)
    losses = {
        "single_label_classification": torch.nn.CrossEntropyLoss(),
        "multi_label_classification": torch.nn.BCEWithLogitsLoss(),
        "regression": torch.nn.MSELoss(),
    }
    torch.testing.assert_close(outputs.loss, losses[problem_type](outputs.logits, labels))


def test_weights_in_bfloat16_have_logits_in_it():
    """With residual_in_fp32 the states are float32."""
    assert tiny.logits(mamba().bfloat16(), padded("right")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("build", "module", "kernel"),
    [(mamba, modeling_mamba, "mamba_inner_fn"), (mamba2, modeling_mamba2, "mamba2_split_conv1d_scan_combined")],
)
def test_no_fused_kernel_passes_by_the_projections_in_training(build, module, kernel, monkeypatch):
    """Such a kernel reads the weights of the projections, which are none in factors."""

    def fused(*_: object, **__: object) -> Tensor:
        raise AssertionError(kernel)

    monkeypatch.setattr(module, kernel, fused)
    model = build().train()
    assert model.training
    model(**padded("right")).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("build", [mamba, mamba2])
def test_a_compressed_model_is_saved_and_loaded(build, tmp_path: Path):
    batch = padded("right") | {"labels": torch.tensor([0, 2, 1])}
    compressed = eckart.compress(build(), [batch], 0.6, "svd")
    eckart.save(compressed.model, tmp_path)
    expected = tiny.logits(compressed.model, padded("left"))
    for loaded in (AutoModelForSequenceClassification.from_pretrained(tmp_path), eckart.load(tmp_path)):
        assert type(loaded) is type(compressed.model)
        assert torch.equal(tiny.logits(loaded, padded("left")), expected)
