"""sentence-transformers embeds, scores, trains, saves and loads with a compressed model in the place of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.modeling_outputs import ModelOutput

import eckart
from eckart.calibration.embeddings import Pooling, embeddings
from eckart.model.layers import factorized
from tasks.models import sentence_files
from tasks.nlp_tasks import kind_of
from tests.workspace import REPOSITORY, a_task, reviews, write_base

package = pytest.importorskip("sentence_transformers")
parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TEXTS = reviews()["text"].tolist()
PAIRS = list(zip(TEXTS[:24], TEXTS[24:48], strict=True))
POOLINGS: Sequence[Pooling] = ("mean", "max", "cls", "lasttoken")


def embedder(folder: Path, pooling: Pooling = "mean") -> Any:
    """Return a SentenceTransformer of a tiny BERT."""
    write_base(folder)
    transformer = parts.Transformer(str(folder))
    modules = [transformer, parts.Pooling(32, pooling), parts.Normalize()]
    return package.SentenceTransformer(modules=modules, device="cpu")


def scorer(folder: Path, labels: int = 1) -> Any:
    write_base(folder)
    with torch.random.fork_rng(devices=[]):  # for the head, which the base has not
        torch.manual_seed(0)
        return package.CrossEncoder(str(folder), num_labels=labels, device="cpu")


def batches(model: Any, texts: Sequence[Any]) -> list[Mapping[str, Tensor]]:
    columns = zip(*texts, strict=True) if isinstance(texts[0], tuple) else [texts]
    return [model.tokenizer(*map(list, columns), padding=True, truncation=True, return_tensors="pt")]


def compress(model: Any, texts: Sequence[Any], keep: float) -> None:
    """Compress a model in place, by the lines of docs/how-to/embeddings.md."""
    small, report = eckart.compress(model[0].model, batches(model, texts), keep, loss=eckart.embedding_loss(model))
    model[0].model = small
    assert report.ranks


def trained(model: Any) -> list[Tensor]:
    return [values.detach().clone() for values in model.parameters()]


def test_an_embedder_is_compressed_saved_loaded_and_trained(tmp_path: Path) -> None:
    model = embedder(tmp_path / "base")
    original = model.encode(TEXTS)
    compress(model, TEXTS, 0.3)
    expected = model.encode(TEXTS)
    cosines = (expected * original).sum(1)
    assert 0.95 < cosines.mean() < 1 - 1e-6
    model.save_pretrained(str(tmp_path / "small"))
    again = package.SentenceTransformer(str(tmp_path / "small"), device="cpu")
    numpy.testing.assert_array_equal(again.encode(TEXTS), expected)
    assert factorized(again[0].model) == factorized(model[0].model)

    before = trained(again)
    data = Dataset.from_dict({"anchor": TEXTS[:8], "positive": TEXTS[8:16]})
    settings = package.SentenceTransformerTrainingArguments(
        str(tmp_path / "training"), max_steps=2, per_device_train_batch_size=4, report_to="none", use_cpu=True
    )
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    loss = losses.MultipleNegativesRankingLoss(again)
    package.SentenceTransformerTrainer(again, settings, train_dataset=data, loss=loss).train()
    moved = [not torch.equal(*pair) for pair in zip(trained(again), before, strict=True)]
    assert sum(moved) > len(moved) / 2
    again.save_pretrained(str(tmp_path / "tuned"))
    tuned = package.SentenceTransformer(str(tmp_path / "tuned"), device="cpu")
    numpy.testing.assert_array_equal(tuned.encode(TEXTS), again.encode(TEXTS))


@pytest.mark.parametrize("labels", [1, 3])
def test_a_cross_encoder_is_compressed_saved_and_loaded(labels: int, tmp_path: Path) -> None:
    model = scorer(tmp_path / "base", labels)
    original = model.predict(PAIRS)
    compress(model, PAIRS, 0.3)
    expected = model.predict(PAIRS)
    assert 0 < numpy.abs(expected - original).max() < 0.2
    model.save_pretrained(str(tmp_path / "small"))
    again = package.CrossEncoder(str(tmp_path / "small"), device="cpu")
    numpy.testing.assert_array_equal(again.predict(PAIRS), expected)
    assert factorized(again[0].model) == factorized(model[0].model)


def test_another_process_needs_eckart_and_gets_it_by_its_command(tmp_path: Path) -> None:
    model = embedder(tmp_path / "base")
    compress(model, TEXTS, 0.3)
    model.save_pretrained(str(tmp_path / "small"))
    program = (
        "import sys, numpy; from sentence_transformers import SentenceTransformer; "
        "numpy.save(sys.argv[2], SentenceTransformer(sys.argv[1], device='cpu').encode(['the plot is warm']))"
    )
    arguments = [program, str(tmp_path / "small"), str(tmp_path / "found.npy")]
    without = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True)
    assert "install or update the Python package eckart" in without.stderr
    command = [sys.executable, str(REPOSITORY / "eckart_command.py"), "with", sys.executable, "-c", *arguments]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    numpy.testing.assert_allclose(numpy.load(tmp_path / "found.npy"), model.encode(["the plot is warm"]), rtol=1e-5)


@pytest.mark.parametrize("make", [embedder, scorer])
def test_what_is_refused_names_the_model_in_it(make: Any, tmp_path: Path) -> None:
    model = make(tmp_path)
    with pytest.raises(ValueError, match=r"compress\(model\[0\]\.model, .*model\[0\]\.model = small"):
        eckart.compress(model, batches(model, TEXTS))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_poolings_are_those_of_the_package(pooling: Pooling, side: str) -> None:
    states = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([[5], [3], [1]])
    mask = (torch.arange(5) < lengths).long()
    mask = mask.flip(1) if side == "left" else mask
    features = {"token_embeddings": states, "attention_mask": mask}
    expected = parts.Normalize()(parts.Pooling(4, pooling)(dict(features)))["sentence_embedding"]
    found = embeddings(pooling)(ModelOutput(last_hidden_state=states), {"attention_mask": mask})
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_loss_of_an_embedder_is_that_of_its_pooling(pooling: Pooling, tmp_path: Path) -> None:
    model = embedder(tmp_path, pooling)
    inner, (batch,) = model[0].model, batches(model, TEXTS)
    first, second = (
        torch.autograd.grad(loss(inner, batch), list(inner.encoder.parameters()))
        for loss in (eckart.embedding_loss(model), eckart.embedding_loss(pooling))
    )
    assert any(bool(gradient.any()) for gradient in first)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


def test_modules_after_the_model_keep_their_gradients_and_their_mode(tmp_path: Path) -> None:
    """In training mode, dropout would make every pass another one."""
    model = embedder(tmp_path)
    model.append(parts.Dense(32, 8))
    model.append(parts.Dropout(0.5))
    model.train()
    loss, (batch,) = eckart.embedding_loss(model), batches(model, TEXTS)
    inner = model[0].model.eval()
    first, second = (
        torch.autograd.grad(loss(inner, batch), inner.encoder.layer[0].output.dense.weight) for _ in range(2)
    )
    assert torch.equal(first[0], second[0])
    compress(model, TEXTS, 0.3)
    assert all(values.grad is None and values.requires_grad for values in model[3].parameters())
    assert model[4].training


def test_the_folder_of_a_candidate_is_read_with_the_pipelines_embeddings(tmp_path: Path) -> None:
    """A base model without files of sentence-transformers gets them, with the pooling of the study."""
    task = a_task("embedding", (), "recall_at_10").model_copy(update={"pooling": "cls"})
    write_base(tmp_path)
    model, tokenizer = AutoModel.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    sentence_files.write(tmp_path, sentence_files.of_base(tmp_path, model.config, tokenizer, task))
    answers = kind_of(task).answers(model, tokenizer, pandas.DataFrame({"text": TEXTS}), 8)
    found = package.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    numpy.testing.assert_allclose(found, [answer["embedding"] for answer in answers], atol=1e-5)
