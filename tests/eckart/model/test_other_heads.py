"""A compressed folder loads with another head, and in another dtype, as a dense folder does."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering, PreTrainedModel

from eckart.factorization.pivoted_storage import pivot
from eckart.model.hf_format import save
from eckart.model.layers import LowRankLayer, factorized, merge, tied_heads
from eckart.model.targets import find_targets
from tests import tiny

ENCODER = ("", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering", "ForPreTraining", "ForCausalLM")
DECODER = ("", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def at_full_rank(model: PreTrainedModel, batch: tiny.Batch, **options: Any) -> PreTrainedModel:
    """Return a copy that computes the same with factors."""
    for target in find_targets(model, batch, **options).targets:
        tiny.factorize_layer(model, target.name, min(target.out_features, target.in_features))
    assert factorized(model)
    return model.eval()


def layers_of(names: Collection[str]) -> set[str]:
    """Return the names of parameters without the names of factors, which no dense model has."""
    return {re.sub(r"(\.(left|right))?\.(weight|bias)$", "", name) for name in names}


def outputs(model: PreTrainedModel, batch: tiny.Batch) -> list[Tensor]:
    with torch.no_grad():
        found = model.eval()(**batch)
    return [value for value in found.to_tuple() if isinstance(value, Tensor)]


def assert_loads_as_dense(
    build: Callable[[], PreTrainedModel], family: Any, batch: tiny.Batch, read: tiny.Batch, folder: Path, **options: Any
) -> None:
    """Load a dense and a compressed folder, and compare the reports, and the outputs for `read`.

    Weights that the reports name as missing are drawn anew, so they are copied from one model to the other.
    """
    save(build(), folder / "dense")
    save(at_full_rank(build(), batch, **options), folder / "compressed")
    told = {"output_loading_info": True} | ({"num_labels": 2} if family is AutoModelForQuestionAnswering else {})
    (dense, of_dense), (compressed, of_compressed) = (
        family.from_pretrained(folder / name, **told) for name in ("dense", "compressed")
    )
    for kind in ("missing_keys", "unexpected_keys"):
        assert layers_of(of_compressed[kind]) == layers_of(of_dense[kind]), kind
    assert set(of_compressed["missing_keys"]) == set(of_dense["missing_keys"])
    with torch.no_grad():
        for name in of_dense["missing_keys"]:
            compressed.get_parameter(name).copy_(dense.get_parameter(name))
    expected, found = outputs(dense, read), outputs(compressed, read)
    assert expected
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    compressed.save_pretrained(folder / "again")
    again, of_again = family.from_pretrained(folder / "again", **told)
    assert not of_again["missing_keys"]
    torch.testing.assert_close(outputs(again, read), found)


MODELS: dict[str, tuple[str, dict[str, Any], Collection[str]]] = {
    "bert": ("bert", {}, ENCODER),
    "bert, head and embeddings": ("bert", {"heads": True, "embeddings": True}, ENCODER),
    "roberta, head of two layers": ("roberta", {"heads": True}, ENCODER),
    "albert": ("albert", {}, ENCODER[:-1]),
    "gpt2, embeddings": ("gpt2", {"embeddings": True}, DECODER),
    "llama": ("llama", {}, DECODER),
    "bart": ("bart", {}, ("", "ForCausalLM", "ForQuestionAnswering")),
    "t5": ("t5", {}, ("", "ForTokenClassification", "ForTextEncoding")),
}


@pytest.mark.parametrize(
    ("name", "head"), [(name, head) for name, (_, _, heads) in MODELS.items() for head in heads], ids=str
)
def test_a_model_loads_with_any_head(name: str, head: str, tmp_path: Path) -> None:
    """Also without the pooler, the decoder or the head that it was saved with."""
    architecture, options, _ = MODELS[name]
    kind, build = tiny.ARCHITECTURES[architecture].kind, tiny.ARCHITECTURES[architecture].build
    batch = tiny.padded(tiny.unpadded(kind))
    read = {key: values for key, values in batch.items() if key in ("input_ids", "attention_mask")}
    if head == "" and kind == "seq2seq":
        read["decoder_input_ids"] = read["input_ids"]
    assert_loads_as_dense(build, getattr(transformers, f"AutoModel{head}"), batch, read, tmp_path, **options)


def clip() -> PreTrainedModel:
    text = {**tiny.LAYERS, **tiny.LENGTH, "vocab_size": tiny.VOCABULARY, "eos_token_id": 2, "projection_dim": 16}
    vision = {**tiny.LAYERS, "image_size": 8, "patch_size": 4}
    return tiny.build("CLIPModel", text_config=text, vision_config=vision, projection_dim=16)


@pytest.mark.parametrize("part", ["CLIPTextModel", "CLIPTextModelWithProjection", "CLIPVisionModel"])
def test_a_part_of_a_model_loads_whose_layers_have_other_names(part: str, tmp_path: Path) -> None:
    """It is saved as any other, and so is the whole model after it was loaded."""
    generator = torch.Generator().manual_seed(0)
    texts = {"input_ids": torch.randint(3, tiny.VOCABULARY, (4, 8), generator=generator)}
    texts["attention_mask"] = torch.ones_like(texts["input_ids"])
    pictures = {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
    read = pictures if "Vision" in part else texts
    family = getattr(transformers, part)
    assert_loads_as_dense(clip, family, texts | pictures, read, tmp_path)
    loaded = family.from_pretrained(tmp_path / "compressed")
    assert factorized(loaded)
    save(loaded, tmp_path / "part")
    tiny.assert_same(family.from_pretrained(tmp_path / "part"), loaded, read)
    whole = transformers.CLIPModel.from_pretrained(tmp_path / "compressed")
    for name in factorized(whole):
        merge(whole, name)
    save(whole, tmp_path / "merged")
    assert "eckart" not in (tmp_path / "merged" / "config.json").read_text()


@pytest.mark.parametrize("stored", ["factors", "pivoted"])
def test_a_new_head_is_tied_to_the_factors_of_the_embedding(stored: str, tmp_path: Path) -> None:
    """In pivoted storage it cannot be, so that it is new."""
    batch = tiny.collate(tiny.samples(4))
    model = at_full_rank(tiny.gpt2(), batch, embeddings=True)
    if stored == "pivoted":
        pivot(model)
    save(model, tmp_path / "first")
    causal, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", output_loading_info=True)
    missing = {"factors": set(), "pivoted": {"lm_head.weight"}}[stored]
    assert set(loading["missing_keys"]) == missing
    assert tied_heads(causal) == ({} if missing else {"lm_head": "transformer.wte"})
    save(causal, tmp_path / "second")
    read = {"input_ids": batch["input_ids"]}
    tiny.assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second"), causal, read)


def test_the_bias_of_a_new_tied_head_is_zero_and_that_of_a_saved_one_is_read(tmp_path: Path) -> None:
    model = tiny.of("ElectraModel", **tiny.LAYERS, **tiny.LENGTH, embedding_size=16)()
    tiny.factorize_layer(model, "embeddings.word_embeddings", 4)
    save(model, tmp_path / "first")
    for folder in ("first", "second"):
        head = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / folder)
        assert tied_heads(head) == {"generator_lm_head": "electra.embeddings.word_embeddings"}
        bias = head.generator_lm_head.bias
        assert bias.eq(0.0 if folder == "first" else 7.0).all()
        nn.init.constant_(bias, 7.0)
        head.save_pretrained(tmp_path / "second")


@pytest.mark.parametrize("stored", ["factors", "pivoted", "rows"])
def test_a_layer_that_another_head_did_not_need_is_new_and_dense_afterwards(stored: str, tmp_path: Path) -> None:
    """As factors without values it could not be drawn anew."""
    model = tiny.bert()
    tiny.factorize_layer(model, "bert.pooler.dense", 1, slice(0, 2) if stored == "rows" else None)
    if stored == "pivoted":
        pivot(model)
    save(model, tmp_path / "first")
    transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "first").save_pretrained(
        tmp_path / "second"
    )
    back = transformers.AutoModel.from_pretrained(tmp_path / "second")
    assert type(back.pooler.dense) is nn.Linear
    assert outputs(back, {"input_ids": tiny.collate(tiny.samples(4))["input_ids"]})[1].isfinite().all()


@pytest.mark.parametrize("load", [True, False], ids=["loaded", "not saved"])
@pytest.mark.parametrize("stored", ["factors", "pivoted"])
@pytest.mark.parametrize("build", [tiny.bert, tiny.gpt2, tiny.llama])
def test_the_dtype_of_a_compressed_model_can_be_changed(build: Any, stored: str, load: bool, tmp_path: Path) -> None:
    """The outputs follow, up to rounding, and `float` after `bfloat16` gives the rounded weights."""
    batch = tiny.collate(tiny.samples(4))
    model = at_full_rank(build(), batch)
    if stored == "pivoted":
        pivot(model)
    expected = tiny.logits(model, batch)
    if load:
        save(model, tmp_path)
        model = type(model).from_pretrained(tmp_path)
    for cast, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32)):
        model = getattr(model, cast)()
        assert {values.dtype for values in model.parameters()} == {dtype}
        found = tiny.logits(model, batch)
        assert found.dtype == dtype
        assert (found.float() - expected).norm() < 0.05 * expected.norm(), cast


def test_a_folder_loads_with_fewer_layers(tmp_path: Path) -> None:
    save(at_full_rank(tiny.bert(), tiny.collate(tiny.samples(4))), tmp_path)
    small = transformers.AutoModel.from_pretrained(tmp_path, num_hidden_layers=1, add_pooling_layer=False)
    kinds = {type(module) for name, module in small.named_modules() if name.endswith(("query", "dense"))}
    assert kinds
    assert all(issubclass(kind, LowRankLayer) and not issubclass(kind, nn.Linear) for kind in kinds)
