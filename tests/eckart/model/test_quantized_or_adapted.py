"""A model that is quantized, or has adapters, is refused before anything is computed, and the message says what to do.

tests/clients/test_bases.py does the same with the tools themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, GgufConfig, GPTQConfig, PreTrainedModel, RwkvConfig, RwkvForCausalLM

import eckart
from eckart.model.hf_format import save
from eckart.model.quantized_or_adapted import check_unquantized, forget_gguf
from tests import tiny

QUERY = "bert.encoder.layer.0.attention.self.query"


def refused(model: Any, match: str) -> None:
    """Assert that `model` is refused before a batch is read."""

    def batches() -> Iterator[Mapping[str, Tensor]]:
        raise AssertionError("a batch was read")
        yield {}

    with pytest.raises(ValueError, match=match):
        eckart.compress(model, batches(), 0.5)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"bitsandbytes.*\bdequantize\(\)"),
        (BitsAndBytesConfig(load_in_4bit=True), r"bitsandbytes.*\bdequantize\(\)"),
        ({"quant_method": "gguf"}, r"gguf.*GgufConfig\(dequantize=True\)"),
        ({"quant_method": "mxfp4"}, r"mxfp4.*Mxfp4Config\(dequantize=True\)"),
        (GPTQConfig(bits=4), r"gptq.*cannot dequantize"),
        *(
            ({"quant_method": name}, rf"{name}.*cannot dequantize")
            for name in ("awq", "torchao", "quanto", "something new")
        ),
        ({"quant_method": "eckart", "quantization": {"quant_method": "torchao"}}, "torchao"),
    ],
)
def test_a_quantized_model_is_named_with_the_way_to_dense_weights(config: Any, match: str) -> None:
    model = tiny.bert()
    model.config.quantization_config = config
    with pytest.raises(ValueError, match=match):
        check_unquantized(model.config)
    refused(model, match)


def from_package(package: str, kind: type) -> Any:
    """Return a subclass of `kind` that looks like one of `package`."""
    return type("Linear", (kind,), {"__module__": package})


def with_query(replacement: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    model = tiny.bert()
    model.set_submodule(QUERY, replacement(model.get_submodule(QUERY)))
    return model


def quantized_module(_: nn.Linear) -> nn.Module:
    return from_package("optimum.quanto.nn.qlinear", nn.Linear)(16, 16)


def quantized_weight(layer: nn.Linear) -> nn.Module:
    layer.weight = from_package("torchao.quantization", nn.Parameter)(layer.weight.detach())
    return layer


def adapted(_: nn.Linear) -> nn.Module:
    return from_package("peft.tuners.lora.layer", nn.Linear)(16, 16)


@pytest.mark.parametrize(
    ("replacement", "match"),
    [
        (quantized_module, rf"{QUERY} is quantized by optimum\.quanto"),
        (quantized_weight, rf"{QUERY}\.weight is quantized by torchao"),
        (adapted, rf"{QUERY} has an adapter.*merge_and_unload"),
    ],
)
def test_what_the_config_does_not_say_is_found_in_the_model(
    replacement: Callable[[nn.Linear], nn.Module], match: str
) -> None:
    """The model inside of a PeftModel, and one that a tool has quantized in place."""
    refused(with_query(replacement), match)


def test_weights_that_were_quantized_in_place_are_not_saved(tmp_path: Path) -> None:
    """Neither transformers nor the tool could load the folder."""
    model = tiny.factorize(tiny.bert(), tiny.collate(tiny.samples(4)), lambda _: 2)
    layer = model.get_submodule(f"{QUERY}.left")
    quantized_weight(layer)
    with pytest.raises(ValueError, match=rf"{QUERY}\.left\.weight was quantized by torchao in place"):
        model.save_pretrained(tmp_path / "folder")


def test_a_layer_with_an_adapter_is_not_saved(tmp_path: Path) -> None:
    """The folder would have names of peft in place of the weights'."""
    model = with_query(adapted)
    with pytest.raises(ValueError, match=rf"{QUERY} has an adapter.*save_pretrained.*merge_and_unload"):
        save(model, tmp_path / "dense")
    compressed = tiny.factorize(tiny.bert(), tiny.collate(tiny.samples(4)), lambda _: 2)
    compressed.set_submodule(f"{QUERY}.left", adapted(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match=rf"{QUERY}\.left has an adapter"):
        save(compressed, tmp_path / "compressed")
    assert not [*tmp_path.rglob("*.safetensors")]
    compressed.save_pretrained(tmp_path / "checkpoint")  # from which a training resumes, with the adapter in the model


def test_adapters_of_transformers_are_refused() -> None:
    model = tiny.bert()
    model._hf_peft_config_loaded = True
    refused(model, "merge_and_unload")


def test_a_wrapper_with_adapters_is_refused() -> None:
    wrapper = nn.Sequential(tiny.bert())
    refused(wrapper, "transformers model")
    wrapper.merge_and_unload = lambda: wrapper[0]  # type: ignore[assignment]
    refused(wrapper, "merge_and_unload")


def test_packed_weights_of_gguf_are_refused() -> None:
    model = tiny.bert()
    config = model.config.quantization_config = GgufConfig()
    model.hf_quantizer = SimpleNamespace(quantization_config=config)  # type: ignore[assignment]
    model.register_parameter("packed", nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    refused(model, r"GgufConfig\(dequantize=True\)")
    forget_gguf(model)
    assert model.config.quantization_config is config


def test_a_model_that_is_partly_compressed_is_not_refused() -> None:
    batch = tiny.collate(tiny.samples(8))
    small, report = eckart.compress(tiny.bert(), [batch], 0.5, "svd", include="*query")
    assert report.ranks
    assert eckart.compress(small, [batch], 0.5, "svd").report.ranks


def test_a_model_that_divides_its_weights_when_it_runs_is_refused_unless_its_config_says_that_it_does_not() -> None:
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = RwkvConfig(vocab_size=64, context_length=64, rescale_every=1, **sizes)
    refused(RwkvForCausalLM(config), "rescale_every")
    config.rescale_every = 0
    model = RwkvForCausalLM(config)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = torch.randint(5, 64, (6, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    small, report = eckart.compress(model, [batch], 0.6, "kfac")
    assert report.targets
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert small(**batch).loss.isfinite()
