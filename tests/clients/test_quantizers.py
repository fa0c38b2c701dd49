"""Tools that quantize linear layers find the factors, and what they make of a model is smaller and still right."""

from __future__ import annotations

import copy
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)

from eckart.model.hf_format import save
from eckart.model.layers import factorized, parts_of_layers
from tests import tiny
from tests.clients.conftest import RANK, distance, logits, small

HEAD = "classifier"
INT8, INT4 = 0.15, 0.9
"""Largest relative change of the logits of a model with random weights."""


def is_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != HEAD


def torchao(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization")
    int4 = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig() if bits == 8 else int4, filter_fn=is_layer)
    return model


def torchao_packed(model: PreTrainedModel, _: int) -> PreTrainedModel:
    """In int4, two weights to a byte."""
    prototype = pytest.importorskip("torchao.prototype.quantization.int4")
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, prototype.PrototypeInt4WeightOnlyConfig(group_size=RANK), filter_fn=is_layer)
    return model


def quanto(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    tool = pytest.importorskip("optimum.quanto")
    from optimum.quanto.library.extensions.cpp import ext

    # In Python what its C++ does, which users run and which takes a minute to compile: several weights to a byte.
    ext._lib = SimpleNamespace(
        unpack=lambda packed, bits: torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])
    )
    tool.quantize(model, weights=tool.qint8 if bits == 8 else tool.qint4, exclude=HEAD)
    tool.freeze(model)
    return model


def hqq(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    tool = pytest.importorskip("hqq.core.quantize")
    config = tool.BaseQuantizeConfig(nbits=bits, group_size=64)
    for name, module in list(model.named_modules()):
        if is_layer(module, name):
            model.set_submodule(name, tool.HQQLinear(module, config, compute_dtype=torch.float32, device="cpu"))
    return model


def size(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


@pytest.mark.parametrize(
    ("quantize", "bits"), [*itertools.product([torchao, quanto, hqq], [8, 4]), (torchao_packed, 4)]
)
def test_a_tool_quantizes_every_factor(quantize: Any, bits: int, compressed: PreTrainedModel) -> None:
    found = quantize(copy.deepcopy(compressed), bits)
    for name in parts_of_layers(compressed):
        before, after = compressed.get_submodule(name), found.get_submodule(name)
        assert (type(after), type(getattr(after, "weight", None))) != (type(before), nn.Parameter), name
    assert 0 < distance(logits(found), logits(compressed)) < (INT8 if bits == 8 else INT4)
    assert size(found) < 0.7 * size(compressed)
    assert factorized(found) == factorized(compressed)


def dynamic(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    quantized: PreTrainedModel = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    return quantized


@pytest.mark.parametrize("quantize", [torchao, quanto, hqq, dynamic])
def test_a_model_that_was_quantized_in_place_is_not_saved(
    quantize: Any, compressed: PreTrainedModel, tmp_path: Path
) -> None:
    """No folder of it could be loaded: quanto's own loader makes dense layers, which get no values."""
    found = quantize(copy.deepcopy(compressed), 8)
    for write in (found.save_pretrained, lambda folder: save(found, folder)):
        with pytest.raises(ValueError, match="in place"):
            write(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_training_for_quanto_saves_plain_weights(compressed: PreTrainedModel, tmp_path: Path) -> None:
    tool = pytest.importorskip("optimum.quanto")
    found = copy.deepcopy(compressed)
    tool.quantize(found, weights=tool.qint8, exclude=HEAD)
    found.save_pretrained(tmp_path)
    assert distance(logits(load(tmp_path)), logits(compressed)) < 1e-6


def torchao_config() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig(), modules_to_not_convert=[HEAD])


def bitsandbytes_config() -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=[HEAD])


def quanto_config() -> Any:
    pytest.importorskip("optimum.quanto")
    return QuantoConfig("int8", modules_to_not_convert=[HEAD])


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder, **options)


@pytest.mark.parametrize("config", [torchao_config, bitsandbytes_config])
def test_transformers_quantizes_a_compressed_folder_and_saves_both(
    config: Callable[[], Any], compressed: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    """What it saves has both methods in its config, and loads as it was."""
    found = load(folder, quantization_config=config())
    assert 0 < distance(logits(found), logits(compressed)) < INT8
    found.save_pretrained(tmp_path / "both")
    stored = json.loads((tmp_path / "both" / "config.json").read_text())["quantization_config"]
    assert stored["ranks"] == factorized(compressed)
    assert stored["quantization"]["quant_method"] == config().quant_method
    assert torch.equal(logits(load(tmp_path / "both")), logits(found))


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.t5], ids=["gpt2", "t5"])
def test_models_that_read_the_weights_of_their_layers_are_quantized(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    """transformers initializes GPT-2 by its weights' names, and T5 asks for a weight's dtype."""
    batch = {name: tiny.collate(tiny.samples(4))[name] for name in ("input_ids", "attention_mask")}
    small = tiny.factorize(make(), batch, lambda _: 8)
    save(small, tmp_path)
    found = type(small).from_pretrained(tmp_path, quantization_config=torchao_config()).eval()
    before, after = (model(**batch)[0].detach() for model in (small.eval(), found))
    assert 0 < distance(after, before) < INT8


@pytest.mark.parametrize("config", [torchao_config, bitsandbytes_config])
def test_factors_that_a_pattern_would_rename_are_loaded_as_they_were_quantized(
    config: Callable[[], Any], tmp_path: Path
) -> None:
    """Inkling 2 calls `sconv.weight_proj.weight` `sconv.weight_proj` in its folders."""
    model, batch = tiny.inkling()
    tiny.factorize(model, batch, lambda _: 8)
    save(model, tmp_path / "small")
    found = type(model).from_pretrained(tmp_path / "small", quantization_config=config()).eval()
    assert 0 < distance(tiny.logits(found, batch), tiny.logits(model, batch)) < INT8
    found.save_pretrained(tmp_path / "both")
    loaded = type(model).from_pretrained(tmp_path / "both").eval()
    assert torch.equal(tiny.logits(loaded, batch), tiny.logits(found, batch))


def test_transformers_quantizes_a_compressed_folder_by_quanto(compressed: PreTrainedModel, folder: Path) -> None:
    """Such a model cannot be saved, compressed or not."""
    found = load(folder, quantization_config=quanto_config())
    assert 0 < distance(logits(found), logits(compressed)) < INT8


@pytest.mark.parametrize("config", [torchao_config, bitsandbytes_config])
def test_a_layer_of_rank_1_stays_right(config: Callable[[], Any], tmp_path: Path) -> None:
    """torchao fails on a matrix of one column, and bitsandbytes computes noise with it."""
    model = small(rank=1)
    save(model, tmp_path)
    assert 0 < distance(logits(load(tmp_path, quantization_config=config())), logits(model)) < INT8
