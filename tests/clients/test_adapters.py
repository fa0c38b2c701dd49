"""peft adapts a compressed model by the names that its layers had, and its adapters are trained, saved and merged."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig, PreTrainedModel

import eckart
from eckart.model.hf_format import save
from eckart.model.layers import PlainLinear, factorized, merge
from tests import tiny
from tests.clients.conftest import BATCH, distance, logits, small

peft = pytest.importorskip("peft")
HEAD = "classifier"
NAMES = ["query", "value"]
CASES = {
    "LoRA by name": lambda: peft.LoraConfig(target_modules=NAMES),
    "LoRA by peft's own default": lambda: peft.LoraConfig(),
    "LoRA by expression": lambda: peft.LoraConfig(target_modules=r".*self\.(query|value)"),
    "LoRA on all": lambda: peft.LoraConfig(target_modules="all-linear"),
    "DoRA": lambda: peft.LoraConfig(target_modules=NAMES, use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["key", "output.dense"], feedforward_modules=["output.dense"]),
}


def config(case: str) -> Any:
    made = CASES[case]()
    made.task_type = "SEQ_CLS"  # so that the head is trained and saved, too
    return made


def train(model: Any) -> None:
    """Take some steps, in which every adapter moves away from its start."""
    optimizer = torch.optim.AdamW([some for some in model.parameters() if some.requires_grad], lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model.train()(**tiny.collate(tiny.samples(8))).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_trained_saved_loaded_and_merged(case: str, compressed: PreTrainedModel, tmp_path: Path) -> None:
    """A merged model has the ranks that it had, because the adapter is merged into the factors."""
    adapted = peft.get_peft_model(copy.deepcopy(compressed), config(case))
    torch.testing.assert_close(logits(adapted), logits(compressed))
    reached = {name.partition(".lora_")[0].partition(".ia3_")[0] for name, _ in adapted.named_parameters()}
    factors = {name for name in reached if name.endswith((".left", ".right", ".others")) and "self.value" in name}
    assert factors or case == "IA3"
    train(adapted)
    expected = logits(adapted)
    assert distance(expected, logits(compressed)) > 0.01
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(compressed), tmp_path / "adapter")
    assert torch.equal(logits(again), expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert factorized(merged) == factorized(compressed)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(loaded), logits(merged))


def test_an_update_by_name_reaches_every_factor_and_nothing_else() -> None:
    model = small()
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=NAMES))
    prefix = "base_model.model."
    found = {name for name, module in adapted.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    expected = {name for name in factorized(model) if name.rpartition(".")[2] in NAMES}
    assert found == {f"{prefix}{name}.{side}" for name in expected for side in ("left", "right")}


def test_all_linear_adapts_factors_and_dense_layers() -> None:
    model = small()
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules="all-linear"))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = [module for module in adapted.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len(found) == len(linear)


@pytest.mark.parametrize("targets", ["all-linear", ["left", "right"], r".*\.(left|right)"])
def test_left_factors_of_rank_1_have_no_adapter(targets: Any) -> None:
    """For experts, peft takes "all-linear" for the ends of names, which left factors of rank 1 have, too."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "hidden_act": "silu"}
    model = tiny.of("MixtralForCausalLM", **tiny.LAYERS, **tiny.LENGTH, **sizes)()
    labeled = {**BATCH, "labels": BATCH["input_ids"]}
    compressed, _ = eckart.compress(model, [labeled], keep=0.5, recipe="anchored")
    plain = [name for name, module in compressed.named_modules() if isinstance(module, PlainLinear)]
    adapted = peft.get_peft_model(compressed, peft.LoraConfig(target_modules=targets))
    assert plain
    for name in plain:
        assert isinstance(adapted.get_submodule(f"base_model.model.{name}"), PlainLinear)
        assert f"base_model.model.{name.removesuffix('left')}right.lora_A.default.weight" in adapted.state_dict()


def test_a_model_with_an_adapter_is_not_saved_whole(tmp_path: Path) -> None:
    model = small()
    adapted = peft.get_peft_model(model, config("LoRA by name"))
    for given in (adapted, model):
        with pytest.raises(ValueError, match="has an adapter"):
            eckart.save(given, tmp_path / "folder")
    eckart.save(adapted.merge_and_unload(), tmp_path / "folder")
    assert factorized(eckart.load(tmp_path / "folder")) == factorized(model)


def adapted_by(made: Any, model: PreTrainedModel) -> dict[str, int]:
    """Return the names of the original model's layers that get an adapter → its rank."""
    adapted = peft.get_peft_model(copy.deepcopy(model), made)
    found = {name: some for name, some in adapted.named_modules() if isinstance(some, peft.tuners.lora.LoraLayer)}
    ranks: dict[str, list[int]] = {}
    for name, some in found.items():
        layer = name.removeprefix("base_model.model.").removesuffix(".left").removesuffix(".right")
        ranks.setdefault(layer, []).append(some.r["default"])
    for layer, values in ranks.items():  # both factors have the same rank
        assert len(values) == 1 + (layer in factorized(model))
        assert len({*values}) == 1
    return {layer: values[0] for layer, values in ranks.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear", "exclude_modules": ["query", "dense"]},
        {"target_modules": "all-linear", "exclude_modules": r".*\.query"},
        {"target_modules": ["query", "key"], "exclude_modules": ["0.attention.self.query"]},
        {"target_modules": ["query", "key"], "rank_pattern": {"query": 2, r"0\..*key": 3}},
        {"target_modules": "all-linear", "rank_pattern": {"query": 2}},
        {"target_modules": "all-linear", "rank_pattern": {"query": 2, r"layer\.0\..*": 3}},
        {"target_modules": ["query", "classifier"], "rank_pattern": {r"layer\.0\..*": 3, "query": 2, "classifier": 4}},
    ],
)
def test_settings_by_name_mean_what_they_mean_for_the_original(settings: dict[str, Any]) -> None:
    model = small()
    dense = copy.deepcopy(model)
    for name in factorized(model):
        merge(dense, name)
    assert adapted_by(peft.LoraConfig(**settings), model) == adapted_by(peft.LoraConfig(**settings), dense)


def test_a_config_can_be_used_for_several_models() -> None:
    """Of candidates with several keeps, each has other layers that stay dense."""
    first, second = small(), small()
    merge(second, name := next(iter(factorized(second))))
    for targets in ("all-linear", [name.rpartition(".")[2]]):
        config, expected = peft.LoraConfig(target_modules=targets), peft.LoraConfig(target_modules=targets)
        adapted_by(config, first)
        assert adapted_by(config, second) == adapted_by(expected, second)


def test_adapters_on_all_layers_are_added_up() -> None:
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    adapted = peft.get_peft_model(small(), config)
    adapted.add_adapter("other", config)
    adapted.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="linear")
    adapted.set_adapter("both")
    assert config.target_modules == "all-linear"
    assert torch.isfinite(logits(adapted)).all()


def test_merging_into_factors_that_a_head_shares_is_warned_of() -> None:
    model = tiny.causal_llama()
    labeled = tiny.batches(tiny.samples(8), 4)
    batches = [{**batch, "labels": batch["input_ids"]} for batch in labeled]
    compressed, _ = eckart.compress(model, batches, keep=0.6, recipe="svd", embeddings=True, tied=True)
    with pytest.warns(UserWarning, match="lm_head"):
        peft.get_peft_model(copy.deepcopy(compressed), peft.LoraConfig(target_modules=["embed_tokens"]))
    for name in ("lm_head", "embed_tokens"):
        copied = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=[name])
        with pytest.warns(UserWarning, match="cannot be saved"):
            peft.get_peft_model(copy.deepcopy(compressed), copied)


@pytest.mark.parametrize("by_peft", [True, False], ids=["peft", "transformers"])
def test_an_adapter_of_the_original_is_refused(by_peft: bool, compressed: PreTrainedModel, tmp_path: Path) -> None:
    peft.get_peft_model(tiny.bert(), config("LoRA by name")).save_pretrained(tmp_path)
    small = copy.deepcopy(compressed)
    with pytest.raises(ValueError, match="trained on another model"):
        peft.PeftModel.from_pretrained(small, tmp_path) if by_peft else small.load_adapter(tmp_path)


@pytest.mark.parametrize("order", ["eckart, peft", "peft, eckart"])
def test_methods_of_peft_work_in_any_order_of_imports(order: str) -> None:
    code = f"""
import {order}, copy
from tests.clients.conftest import small
for method in (peft.LoraConfig, peft.VeraConfig, peft.RandLoraConfig):
    adapted = peft.get_peft_model(small(), method(target_modules=["query"]))
    assert any("query.right" in name for name, some in adapted.named_parameters() if some.requires_grad), method
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ia3_scales_the_map_as_it_would_the_dense_layer() -> None:
    """Outputs of the key are multiplied by one vector, inputs of the output layer by another."""
    layers, vectors = ("self.key", "0.output.dense"), {}
    model = small()
    adapted = peft.get_peft_model(copy.deepcopy(model), config("IA3"))
    for name, values in adapted.named_parameters():
        if "ia3_l" in name:
            nn.init.uniform_(values, 0.5, 2.0)
            vectors[name] = values.detach().flatten()
    merged = adapted.merge_and_unload()
    assert sum(name.endswith(layers) for name in factorized(model)) == 3  # two keys and an output layer
    for name in factorized(model):
        scales = [values for key, values in vectors.items() if f"{name}." in key]
        if name.endswith(layers):
            (scale,) = scales
            outputs = name.endswith("key")
            expected = model.get_submodule(name).dense() * (scale[:, None] if outputs else scale)
            torch.testing.assert_close(merged.get_submodule(name).dense(), expected)


def test_transformers_adds_an_adapter_itself() -> None:
    model = small()
    model.add_adapter(peft.LoraConfig(target_modules=NAMES))
    assert any("query.left.lora_A" in name for name, _ in model.named_parameters())


def test_an_adapter_trains_on_8_bits(tmp_path: Path) -> None:
    """A base that Eckart compressed and bitsandbytes quantized."""
    pytest.importorskip("bitsandbytes")
    save(small(), tmp_path / "compressed")
    bits = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=[HEAD])

    def base() -> PreTrainedModel:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / "compressed", quantization_config=bits)

    adapted = peft.get_peft_model(base(), config("LoRA by name"))
    before = logits(adapted)
    train(adapted)
    assert distance(logits(adapted), before) > 0.01
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(adapted))
