"""Models that other tools have quantized or adapted are refused before anything is computed; the way out works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.ao.quantization import quantize_dynamic
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedModel,
    QuantoConfig,
    TorchAoConfig,
)

import eckart
from tests import tiny
from tests.clients.conftest import WIDTH

BATCHES = [tiny.collate(tiny.samples(8))]
NAMES = ["query", "value"]


def dense() -> PreTrainedModel:
    sizes = {**tiny.LAYERS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    return tiny.of("BertForSequenceClassification", **sizes, **tiny.LENGTH)().eval()


def loaded(folder: Path, config: Any) -> PreTrainedModel:
    dense().save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=config)


def by_torchao(folder: Path) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization")
    return loaded(folder, TorchAoConfig(quantization.Int8WeightOnlyConfig()))


def by_torchao_in_place(_: Path) -> PreTrainedModel:
    quantization = pytest.importorskip("torchao.quantization")
    model = dense()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def by_quanto(folder: Path) -> PreTrainedModel:
    pytest.importorskip("optimum.quanto")
    return loaded(folder, QuantoConfig(weights="int8"))


def by_quanto_in_place(_: Path) -> PreTrainedModel:
    quanto = pytest.importorskip("optimum.quanto")
    model = dense()
    quanto.quantize(model, weights=quanto.qint8)
    return model


def by_torch(_: Path) -> PreTrainedModel:
    model: PreTrainedModel = quantize_dynamic(dense(), {nn.Linear})
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("quantized", "name"),
    [
        (by_torchao, "torchao"),
        (by_torchao_in_place, "torchao"),
        (by_quanto, "quanto"),
        (by_quanto_in_place, "quanto"),
        (by_torch, r"torch\.ao"),
    ],
)
def test_a_quantized_model_is_refused(quantized: Callable[[Path], PreTrainedModel], name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"quantized by .*{name}"):
        eckart.compress(quantized(tmp_path), BATCHES, 0.5, "svd")


@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes_is_refused_and_dequantized(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = loaded(tmp_path, BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4))
    with pytest.raises(ValueError, match=r"bitsandbytes.*dequantize\(\)"):
        eckart.compress(model, BATCHES, 0.5, "svd")
    assert eckart.compress(model.dequantize(), BATCHES, 0.5, "svd").report.ranks


def with_own_adapter(model: PreTrainedModel, config: Any) -> Any:
    model.add_adapter(config)
    return model


ADAPTED: dict[str, Callable[[Any, PreTrainedModel, Any], Any]] = {
    "PeftModel": lambda peft, model, config: peft.get_peft_model(model, config),
    "the model inside": lambda peft, model, config: peft.get_peft_model(model, config).base_model.model,
    "add_adapter": lambda _, model, config: with_own_adapter(model, config),
}


@pytest.mark.parametrize("case", ADAPTED)
def test_a_model_with_an_adapter_is_refused(case: str) -> None:
    peft = pytest.importorskip("peft")
    model = ADAPTED[case](peft, dense(), peft.LoraConfig(target_modules=NAMES))
    with pytest.raises(ValueError, match="merge_and_unload"):
        eckart.compress(model, BATCHES, 0.5, "svd")


def test_a_merged_model_is_compressed(tmp_path: Path) -> None:
    """Also with an adapter of `add_adapter`, as the message says."""
    peft = pytest.importorskip("peft")
    model = with_own_adapter(dense(), peft.LoraConfig(target_modules=NAMES, init_lora_weights=False))
    expected = tiny.logits(model, BATCHES[0])
    model.save_pretrained(tmp_path / "adapter")
    merged = peft.PeftModel.from_pretrained(dense(), tmp_path / "adapter").merge_and_unload()
    assert (tiny.logits(merged, BATCHES[0]) - expected).norm() < 1e-3 * expected.norm()
    assert eckart.compress(merged, BATCHES, 0.5, "svd").report.ranks
