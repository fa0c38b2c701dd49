"""A compressed model is an ordinary Hugging Face model: what is saved comes back, and trains."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    T5EncoderModel,
    Trainer,
    TrainingArguments,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import eckart  # noqa: F401  teaches transformers the format
from eckart.factorization.pivoted_storage import pivot
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model.hf_format import save
from eckart.model.layers import factorize_target, factorized, merge, pivoted
from eckart.model.targets import find_targets, weight_of
from tests import tiny

SAMPLES = tiny.samples(8)
BATCH = tiny.collate(SAMPLES)
FAMILIES = pytest.mark.parametrize("family", tiny.FAMILIES)


def compress(model: PreTrainedModel, every: int = 1) -> PreTrainedModel:
    """Factorize every `every`-th target, at ranks that differ."""
    targets = find_targets(model, BATCH, exclude=["*.left", "*.right"]).targets
    for index, target in enumerate(targets[::every]):
        result = decompose(weight_of(model.get_submodule(target.name)), ErrorNorm())
        factorize_target(model, target.name, *result.truncate(1 + index % 5))
    return model


def load(folder: Path, **options) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder, **options)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**{key: tensor for key, tensor in BATCH.items() if key != "labels"}).logits


def assert_same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    tiny.assert_same(model, other, {key: tensor for key, tensor in BATCH.items() if key != "labels"})


@FAMILIES
@pytest.mark.parametrize("every", [1, 3])
def test_a_compressed_model_comes_back(family, every, tmp_path):
    model = compress(tiny.FAMILIES[family](), every)
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is type(model)
    assert factorized(loaded) == factorized(model) != {}
    assert_same(loaded, model)


@FAMILIES
def test_a_model_of_pivots_and_factors_comes_back(family, tmp_path):
    model = compress(tiny.FAMILIES[family](), every=2)
    pivot(model)
    names = pivoted(model)
    compress(model)
    assert len(factorized(model)) > len(names) > 0
    save(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["pivoted"] == names
    loaded = load(tmp_path)
    assert factorized(loaded) == factorized(model)
    assert pivoted(loaded) == names
    assert_same(loaded, model)


@FAMILIES
def test_a_dense_model_comes_back(family, tmp_path):
    model = tiny.FAMILIES[family]()
    save(model, tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same(load(tmp_path), model)


def test_a_model_with_shared_layers_comes_back(tmp_path):
    model = compress(tiny.albert())
    save(model, tmp_path)
    assert_same(load(tmp_path), model)


def test_a_head_that_is_tied_to_the_embedding_stays_tied(tmp_path):
    model = tiny.causal_llama()
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        factorize_target(model, name, *decompose(weight_of(model.get_submodule(name)), ErrorNorm()).truncate(2))
    save(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(loaded, model)


def test_a_model_that_looks_at_the_weights_of_its_maps_runs_and_comes_back(tmp_path):
    model = tiny.t5().eval()
    tokens = {key: BATCH[key] for key in ("input_ids", "attention_mask")}
    for target in find_targets(model, tokens).targets:
        factorize_target(
            model, target.name, *decompose(weight_of(model.get_submodule(target.name)), ErrorNorm()).truncate(2)
        )
    save(model, tmp_path)
    tiny.assert_same(T5EncoderModel.from_pretrained(tmp_path), model, tokens)


def test_half_precision_comes_back(tmp_path):
    model = compress(tiny.llama()).bfloat16()
    save(model, tmp_path)
    assert_same(load(tmp_path, dtype=torch.bfloat16), model)


def test_a_factorized_head_comes_back(tmp_path):
    model = tiny.bert()
    factorize_target(model, "classifier", *decompose(model.classifier.weight.detach(), ErrorNorm()).truncate(1))
    save(model, tmp_path)
    assert_same(load(tmp_path), model)


@FAMILIES
def test_the_folder_holds_safetensors_and_no_pickles(family, tmp_path):
    save(compress(tiny.FAMILIES[family]()), tmp_path)
    suffixes = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert ".safetensors" in suffixes
    assert suffixes <= {".safetensors", ".json"}


def test_the_configuration_says_what_is_factorized(tmp_path):
    model = compress(tiny.bert(), every=3)
    save(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "eckart"
    assert written["ranks"] == factorized(model)


def test_the_folder_is_smaller_where_the_model_is(tmp_path):
    save(tiny.bert(), tmp_path / "dense")
    save(compress(tiny.bert()), tmp_path / "compressed")
    sizes = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("dense", "compressed")}
    assert sizes["compressed"] < sizes["dense"]


# --- training --------------------------------------------------------------------------------------------------------


def train(model: PreTrainedModel, folder: Path) -> None:
    """Two steps with the Trainer, as any other model."""
    examples = [{key: tensor[0] for key, tensor in tiny.collate([sample], 8).items()} for sample in SAMPLES]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        save_steps=2,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=examples).train()


@FAMILIES
def test_a_loaded_model_trains_and_comes_back_bit_for_bit(family, tmp_path):
    model = compress(tiny.FAMILIES[family](), every=2)
    save(model, tmp_path / "first")
    loaded = load(tmp_path / "first")
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    train(loaded, tmp_path / "training")
    for name in factorized(loaded):
        for part in ("left", "right"):
            key = f"{name}.{part}"
            assert not torch.equal(loaded.get_parameter(key), model.get_parameter(key)), key
    save(loaded, tmp_path / "second")
    assert_same(load(tmp_path / "second"), loaded)


def test_save_pretrained_keeps_the_format_of_a_loaded_model(tmp_path):
    """As the Trainer calls it for its checkpoints."""
    save(compress(tiny.bert()), tmp_path / "first")
    loaded = load(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    assert_same(load(tmp_path / "second"), loaded)


def test_a_loaded_model_can_be_compressed_further(tmp_path):
    """What is factorized later joins the ranks in the configuration."""
    save(compress(tiny.bert(), every=3), tmp_path / "first")
    loaded = load(tmp_path / "first")
    before = factorized(loaded)
    compress(loaded, every=2)
    save(loaded, tmp_path / "second")
    assert len(factorized(loaded)) > len(before)
    assert_same(load(tmp_path / "second"), loaded)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_rank_for_a_module_that_is_not_there_is_an_error(tmp_path):
    save(compress(tiny.bert()), tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    written["quantization_config"]["ranks"]["bert.no.such.module"] = 2
    file.write_text(json.dumps(written))
    with pytest.raises(AttributeError):
        load(tmp_path)


def test_the_same_model_gives_the_same_bytes(tmp_path):
    for name in ("first", "second"):
        save(compress(tiny.bert()), tmp_path / name)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_saving_leaves_the_model_as_it_was(tmp_path):
    model = compress(tiny.bert())
    expected = logits(model)
    save(model, tmp_path)
    assert torch.equal(logits(model), expected)
    assert factorized(model)


@FAMILIES
def test_it_loads_without_its_head(family, tmp_path):
    """Under other names, and without what was factorized of the head; with a new head it is whole again."""
    model = compress(tiny.FAMILIES[family]())
    save(model, tmp_path / "whole")
    bare = AutoModel.from_pretrained(tmp_path / "whole")
    assert bare.base_model is bare
    prefix = f"{model.base_model_prefix}."
    ranks = factorized(model)
    assert factorized(bare) == {name.removeprefix(prefix): ranks[name] for name in ranks if name.startswith(prefix)}
    state, whole = bare.state_dict(), model.state_dict()
    assert all(torch.equal(value, whole[f"{prefix}{name}"]) for name, value in state.items())
    save(bare, tmp_path / "bare")
    again = load(tmp_path / "bare", num_labels=tiny.LABELS)
    assert factorized(again) == {name: rank for name, rank in ranks.items() if name.startswith(prefix)}
    again = again.base_model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in state.items())


def test_a_map_that_the_model_has_not_is_an_error(tmp_path):
    save(compress(tiny.bert()), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["ranks"]["bert.absent"] = 3
    file.write_text(json.dumps(config))
    with pytest.raises(AttributeError, match="absent"):
        load(tmp_path)


def test_transformers_without_this_package_fails_and_names_it(tmp_path, monkeypatch):
    """Otherwise it would skip the unknown quantizer and load random weights."""
    save(compress(tiny.llama()), tmp_path)
    assert not hasattr(load(tmp_path).config, "transformers_weights")
    monkeypatch.delitem(AUTO_QUANTIZER_MAPPING, "eckart")
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "eckart")
    with pytest.raises(ValueError, match=r"\beckart\b"):
        load(tmp_path)


def test_what_is_dense_needs_nothing(tmp_path):
    save(tiny.llama(), tmp_path)
    assert "transformers_weights" not in json.loads((tmp_path / "config.json").read_text())


def guarded(folder: Path) -> bool:
    return "eckart" in json.loads((folder / "config.json").read_text()).get("transformers_weights", "")


def test_whoever_saves_it_writes_what_transformers_alone_refuses(tmp_path, monkeypatch):
    """The Trainer in its checkpoints, a copy, one that was pickled, one that was loaded, and the hub."""
    model = compress(tiny.bert())
    save(model, tmp_path / "saved")
    loaded = load(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "loaded")
    copy.deepcopy(loaded).save_pretrained(tmp_path / "copied")
    pickle.loads(pickle.dumps(loaded)).save_pretrained(tmp_path / "pickled")
    train(loaded, tmp_path / "trained")
    hub = MagicMock()
    monkeypatch.setattr("transformers.utils.hub.hf_api", hub)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", hub)
    monkeypatch.setattr(
        PreTrainedModel,
        "_upload_modified_files",
        lambda _, folder, *args, **options: shutil.copytree(folder, tmp_path / "uploaded"),
    )
    loaded.save_pretrained(tmp_path / "pushed", push_to_hub=True, repo_id="some/one")
    assert hub().create_repo.call_args.args == ("some/one",)
    for folder in ("saved", "loaded", "copied", "pickled", "trained/checkpoint-2", "pushed", "uploaded"):
        assert guarded(tmp_path / folder), folder
        assert factorized(load(tmp_path / folder)) == factorized(model)


def test_what_was_merged_is_saved_as_any_model(tmp_path):
    model = compress(tiny.bert())
    save(model, tmp_path / "small")
    for name in factorized(model):
        merge(model, name)
    save(model, tmp_path / "merged")
    assert guarded(tmp_path / "small")
    assert not guarded(tmp_path / "merged")


def test_the_model_in_a_compressed_model_is_guarded_too(tmp_path):
    """They share a config, which names factors."""
    model = compress(tiny.bert())
    save(model, tmp_path / "whole")
    model.bert.save_pretrained(tmp_path / "part")
    assert guarded(tmp_path / "part")
    assert factorized(AutoModel.from_pretrained(tmp_path / "part")) == factorized(model.bert)
