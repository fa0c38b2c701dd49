"""Another method may quantize a compressed model: it finds the factors, and the folder says both."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from eckart.factorization.pivoted_storage import pivot
from eckart.model.batches import without_labels
from eckart.model.hf_format import save
from eckart.model.layers import LowRankLayer, factorized, low_rank_layers, parts_of_layers
from eckart.model.quantized_or_adapted import check_base
from tests import tiny

BATCH = without_labels(tiny.collate(tiny.samples(8)))
LEVELS = 4


def compressed(build: Any = tiny.bert, stored: str = "factors") -> PreTrainedModel:
    model = tiny.factorize(build(), BATCH, lambda number: 2 + number % 3)
    if stored == "pivoted":
        pivot(model)
    return model.eval()


def load(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder, **options)


def rounded(weight: Tensor) -> Tensor:
    step = weight.abs().max() / LEVELS
    return (weight / step).round() * step


class ToyConfig(QuantizationConfigMixin):
    """Config of a method that rounds the weights of linear layers as they are loaded."""

    def __init__(self, levels: int = LEVELS, **_: Any) -> None:
        self.quant_method = "toy"  # type: ignore[assignment]
        self.levels = levels


class Rounding(ConversionOps):
    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: rounded(values[0] if isinstance(values, list) else values) for name, values in input_dict.items()}


class ToyQuantizer(HfQuantizer):
    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        place, _, last = param_name.rpartition(".")
        return isinstance(model.get_submodule(place), nn.Linear) and last == "weight"

    def get_quantize_ops(self) -> Rounding:
        return Rounding()

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "toy", ToyConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "toy", ToyQuantizer)


@pytest.mark.parametrize("stored", ["factors", "pivoted"])
@pytest.mark.parametrize("build", [tiny.bert, tiny.gpt2])
def test_another_method_quantizes_the_factors_when_it_loads_the_model(build: Any, stored: str, tmp_path: Path) -> None:
    """A saved folder is quantized: both methods stand in its config, and it is not quantized once more."""
    model = compressed(build, stored)
    save(model, tmp_path / "compressed")
    found = load(tmp_path / "compressed", quantization_config=ToyConfig())
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert names >= {f"{name}.right" for name in factorized(model)}
    for name, values in model.named_parameters():
        place, _, last = name.rpartition(".")
        expected = rounded(values) if place in names and last == "weight" else values
        assert torch.equal(found.get_parameter(name), expected), name
    assert not found.hf_quantizer.is_trainable
    found.save_pretrained(tmp_path / "both")
    config = json.loads((tmp_path / "both" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quantization"]["quant_method"]) == ("eckart", "toy")
    assert config["ranks"] == factorized(model)
    for options in ({}, {"quantization_config": ToyConfig()}):
        again = load(tmp_path / "both", **options)
        tiny.assert_same(again, found, BATCH)
        with pytest.raises(ValueError, match="quantized by toy"):
            check_base(again)


def test_the_method_of_a_folder_cannot_be_changed(tmp_path: Path) -> None:
    save(compressed(), tmp_path / "compressed")
    load(tmp_path / "compressed", quantization_config=ToyConfig()).save_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match=r"ToyConfig.*BitsAndBytesConfig"):
        load(tmp_path / "both", quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_a_dense_model_is_quantized_as_ever(tmp_path: Path) -> None:
    tiny.bert().save_pretrained(tmp_path)
    found = load(tmp_path, quantization_config=ToyConfig())
    assert found.config.quantization_config.quant_method == "toy"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stored", ["factors", "pivoted"])
def test_torch_quantizes_the_factors(stored: str) -> None:
    """Its layers have a method `weight`, and the compressed model still answers for its own layers."""
    model = compressed(stored=stored)
    small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    kinds = {type(small.get_submodule(name)).__module__ for name in parts_of_layers(model)}
    assert all("quantized" in kind for kind in kinds)
    assert factorized(small) == factorized(model)
    expected, found = tiny.logits(model, BATCH), tiny.logits(small, BATCH)
    assert 0 < (found - expected).norm() < 0.2 * expected.norm()


def test_t5_whose_forward_reads_a_weight_runs_in_torchs_int8() -> None:
    model, batch = tiny.t5().eval(), {"input_ids": torch.ones(1, 8, dtype=torch.long)}
    tiny.factorize(model, batch, lambda _: 2)
    assert low_rank_layers(model)
    small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    assert small(**batch).last_hidden_state.isfinite().all()
    assert any(isinstance(module, LowRankLayer) for module in small.modules())
