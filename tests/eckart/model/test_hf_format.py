"""A compressed model is an ordinary Hugging Face model: it is saved, loaded and trained as any other."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EncoderDecoderModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import eckart
from eckart.factorization.pivoted_storage import pivot
from eckart.model import hf_format
from eckart.model.batches import without_labels
from eckart.model.hf_format import save
from eckart.model.layers import factorized, low_rank_layers, merge, pivoted
from eckart.model.targets import find_targets
from tests import tiny

SAMPLES = tiny.samples(8)
BATCH = tiny.collate(SAMPLES)


def compress(model: PreTrainedModel, every: int = 1) -> PreTrainedModel:
    """Factorize every `every`-th target, at ranks that differ."""
    targets = find_targets(model, BATCH).targets
    for index, target in enumerate(targets[::every]):
        tiny.factorize_layer(model, target.name, 1 + index % 5)
    return model


def load(folder: Path, **options) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder, **options)


def assert_same(model: PreTrainedModel, other: PreTrainedModel) -> None:
    tiny.assert_same(model, other, without_labels(BATCH))


def with_factorized_head() -> PreTrainedModel:
    model = tiny.bert()
    tiny.factorize_layer(model, "classifier", 1)
    return model


MODELS = {
    "gpt2, every third target": lambda: compress(tiny.gpt2(), 3),
    "shared layers": lambda: compress(tiny.albert()),
    "half precision": lambda: compress(tiny.llama()).bfloat16(),
    "a factorized head": with_factorized_head,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_compressed_model_loads_as_it_was_saved(build, tmp_path):
    model = build()
    save(model, tmp_path)
    loaded = load(tmp_path, dtype=model.dtype)
    assert type(loaded) is type(model)
    assert factorized(loaded) == factorized(model) != {}
    assert_same(loaded, model)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (written["quant_method"], written["ranks"]) == ("eckart", factorized(model))


@pytest.mark.parametrize("every", [1, 2])
def test_layers_that_a_folder_of_the_family_joins_are_saved_one_by_one(every, tmp_path):
    """NomicBERT's queries, keys and values, of other ranks, or some of them dense; once more after loading."""
    model = compress(tiny.build("NomicBertModel", vocab_size=tiny.VOCABULARY, **tiny.LAYERS, **tiny.LENGTH), every)
    inputs = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    for number in range(2):
        save(model, tmp_path / str(number))
        loaded = AutoModel.from_pretrained(tmp_path / str(number))
        tiny.assert_same(loaded, model, inputs)
        model = loaded
    for name in factorized(model):
        merge(model, name)
    save(model, tmp_path / "merged")
    tiny.assert_same(AutoModel.from_pretrained(tmp_path / "merged"), model, inputs)


def test_a_pattern_for_a_dense_weight_does_not_rename_its_factors(tmp_path):
    """Inkling 2 calls `sconv.weight_proj.weight` `sconv.weight_proj` in its folders."""
    model, batch = tiny.inkling()
    small, report = eckart.compress(model, [batch], 0.5, "svd", check=False)
    assert any("sconv" in name for name in report.ranks)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        eckart.save(small, folder)
        loaded = eckart.load(folder)
        torch.testing.assert_close(tiny.logits(loaded, batch), tiny.logits(small, batch))
        base = AutoModel.from_pretrained(folder)
        torch.testing.assert_close(base(**batch).last_hidden_state, loaded.model(**batch).last_hidden_state)
        small = loaded


def test_a_dense_model_is_saved_as_any_other(tmp_path):
    model = tiny.llama()
    save(model, tmp_path)
    assert not {"quantization_config", "transformers_weights"} & set(json.loads((tmp_path / "config.json").read_text()))
    assert_same(load(tmp_path), model)


def test_a_model_of_pivots_and_factors_loads_as_it_was_saved(tmp_path):
    model = compress(tiny.gpt2(), every=2)
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


def test_a_head_that_is_tied_to_the_embedding_stays_tied(tmp_path):
    model = tiny.causal_llama()
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        tiny.factorize_layer(model, name, 2)
    save(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(loaded, model)


# --- training --------------------------------------------------------------------------------------------------------


def train(model: PreTrainedModel, folder: Path) -> None:
    """Train two steps with the Trainer."""
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


def write_as_long_ago(model: PreTrainedModel, folder: Path) -> None:
    """Save `model` with the names that tensors had when factors were parameters of their layers."""
    save(model, folder)
    config = json.loads((folder / "config.json").read_text())
    storage = config["quantization_config"]
    assert storage.pop("format") == 2
    config["transformers_weights"] = hf_format._NEEDED_1
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in storage["ranks"]:
        layer = model.get_submodule(name)
        for old, new in layer.renamed().items():
            if f"{name}.{new}" in tensors:
                values = tensors.pop(f"{name}.{new}")
                turned = layer.reads_ids and old in ("right", "residual")
                tensors[f"{name}.{old}"] = values.T.contiguous() if turned else values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("stored", ["factors", "pivoted", "rows"])
@pytest.mark.parametrize("build", [tiny.bert, tiny.gpt2])
def test_a_folder_with_the_former_names_is_loaded_and_saved_with_the_present_ones(build, stored, tmp_path):
    """Also embeddings, without the head, and with half of the model on the disk."""
    model, rows = build(), slice(1, 3) if stored == "rows" else None
    for target in find_targets(model, BATCH, embeddings=True).targets:
        tiny.factorize_layer(model, target.name, 2, rows)
    if stored == "pivoted":
        pivot(model)
    write_as_long_ago(model, tmp_path / "old")
    loaded = load(tmp_path / "old")
    assert_same(loaded, model)
    body = AutoModel.from_pretrained(tmp_path / "old").state_dict()
    assert all(torch.equal(values, model.base_model.state_dict()[name]) for name, values in body.items())
    half = {name: "disk" if "encoder" in name or name.endswith("h") else "cpu" for name, _ in parts_of(model)}
    offloaded = load(tmp_path / "old", device_map=half, offload_folder=tmp_path / "offloaded")
    torch.testing.assert_close(tiny.logits(offloaded, BATCH), tiny.logits(model, BATCH))
    save(loaded, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]["format"] == 2
    assert set(load_file(tmp_path / "new" / "model.safetensors")) == set(model.state_dict())
    assert_same(load(tmp_path / "new"), model)


def parts_of(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the second level, and the head."""
    for name, module in model.named_children():
        inner = [(f"{name}.{part}", child) for part, child in module.named_children()]
        yield from inner or [(name, module)]


def test_a_folder_of_a_later_version_is_refused(tmp_path):
    save(compress(tiny.bert()), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(ValueError, match="upgrade"):
        load(tmp_path)


def test_a_loaded_model_can_be_trained_and_saved_again(tmp_path):
    model = compress(tiny.gpt2(), every=2)
    save(model, tmp_path / "first")
    loaded = load(tmp_path / "first")
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    train(loaded, tmp_path / "training")
    for name in factorized(loaded):
        for part in ("left.weight", "right.weight"):
            key = f"{name}.{part}"
            assert not torch.equal(loaded.get_parameter(key), model.get_parameter(key)), key
    save(loaded, tmp_path / "second")
    assert_same(load(tmp_path / "second"), loaded)


def test_a_loaded_model_can_be_compressed_further(tmp_path):
    """The new ranks are added to those in the config."""
    save(compress(tiny.bert(), every=3), tmp_path / "first")
    loaded = load(tmp_path / "first")
    before = factorized(loaded)
    compress(loaded, every=2)
    save(loaded, tmp_path / "second")
    assert len(factorized(loaded)) > len(before)
    assert_same(load(tmp_path / "second"), loaded)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_compressed_model_loads_without_its_head(family, tmp_path):
    """Its layers have shorter names then, and a factorized head is left out; saved like that, it can get a new head."""
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


def test_transformers_without_this_package_fails_and_names_it(tmp_path, monkeypatch):
    """Otherwise it would skip the unknown quantizer and load random weights."""
    save(compress(tiny.llama()), tmp_path)
    assert not hasattr(load(tmp_path).config, "transformers_weights")
    monkeypatch.delitem(AUTO_QUANTIZER_MAPPING, "eckart")
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "eckart")
    with pytest.raises(ValueError, match=r"\beckart\b"):
        load(tmp_path)


def guarded(folder: Path) -> bool:
    return "eckart" in json.loads((folder / "config.json").read_text()).get("transformers_weights", "")


def test_every_way_to_save_writes_what_transformers_alone_refuses(tmp_path, monkeypatch):
    """The Trainer, a loaded model, a copy, a pickled model, and an upload to the hub."""
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


def test_a_merged_model_is_saved_as_any_other(tmp_path):
    model = compress(tiny.bert())
    save(model, tmp_path / "small")
    for name in factorized(model):
        merge(model, name)
    save(model, tmp_path / "merged")
    assert guarded(tmp_path / "small")
    assert not guarded(tmp_path / "merged")


def test_the_base_model_of_a_compressed_model_is_guarded_too(tmp_path):
    """They share a config, which names the factors."""
    model = compress(tiny.bert())
    save(model, tmp_path / "whole")
    model.bert.save_pretrained(tmp_path / "part")
    assert guarded(tmp_path / "part")
    assert factorized(AutoModel.from_pretrained(tmp_path / "part")) == factorized(model.bert)


def test_a_compressed_model_inside_another_is_saved_with_its_format(tmp_path):
    save(compress(tiny.bert()), tmp_path / "part")
    whole = EncoderDecoderModel.from_encoder_decoder_pretrained(tmp_path / "part", tmp_path / "part").eval()
    assert factorized(whole)
    whole.save_pretrained(tmp_path / "whole")
    assert guarded(tmp_path / "whole")
    again = EncoderDecoderModel.from_pretrained(tmp_path / "whole")
    assert factorized(again) == factorized(whole)
    inputs = {**BATCH, "decoder_input_ids": BATCH["input_ids"]}
    inputs.pop("labels")
    assert torch.equal(again(**inputs).logits, whole(**inputs).logits)


def test_layers_that_were_merged_are_saved_as_they_are(tmp_path):
    """Also by `save_pretrained` itself, and by that of a model inside."""
    model = compress(tiny.bert())
    save(model, tmp_path / "factors")
    first, *others = factorized(model)
    merge(model, first)
    model.save_pretrained(tmp_path / "one", True, None, False)  # arguments by position
    one = load(tmp_path / "one")
    assert list(factorized(one)) == others
    assert_same(one, model)
    for name in others:
        merge(model, name)
    save(model.bert, tmp_path / "body")  # shares the config
    model.save_pretrained(tmp_path / "all")
    assert "quantization_config" not in json.loads((tmp_path / "all" / "config.json").read_text())
    assert_same(load(tmp_path / "all"), model)


def test_a_dense_model_with_the_config_of_a_compressed_one_is_saved_as_it_is(tmp_path):
    """A folder whose config names factors that it does not have is refused, and not filled at random."""
    model = compress(tiny.bert())
    save(model, tmp_path / "factors")
    for config in (model.config, AutoConfig.from_pretrained(tmp_path / "factors")):
        dense = type(model)(config)
        dense.save_pretrained(tmp_path / "dense")
        assert not guarded(tmp_path / "dense")
        assert_same(load(tmp_path / "dense"), dense.eval())
    shutil.copy(tmp_path / "factors/config.json", tmp_path / "dense")
    with pytest.raises(ValueError, match="save the model again"):
        load(tmp_path / "dense")


def test_a_folder_is_loaded_with_the_config_of_a_compressed_model(tmp_path):
    model = compress(tiny.bert())
    save(model, tmp_path)
    assert_same(type(model).from_pretrained(tmp_path, config=model.config).eval(), model)


def test_factors_with_a_mask_are_not_saved(tmp_path):
    model = compress(tiny.bert())
    name = next(iter(low_rank_layers(model)))
    prune.random_unstructured(model.get_submodule(name).right, "weight", 0.5)
    with pytest.raises(ValueError, match=rf"{name}\.right .*prune\.remove"):
        save(model, tmp_path)
    prune.remove(model.get_submodule(name).right, "weight")
    save(model, tmp_path)
    assert_same(load(tmp_path), model)


def test_a_merged_layer_keeps_its_weight_if_the_model_is_initialized():
    model = compress(tiny.bert())
    name = next(iter(factorized(model)))
    weight = merge(model, name).weight.clone()
    model.init_weights()
    assert torch.equal(model.get_submodule(name).weight, weight)


def test_a_factorized_embedding_of_a_model_that_asks_for_its_padding_is_loaded(tmp_path):
    sizes = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [1, 1]}
    model = tiny.build("FunnelForSequenceClassification", vocab_size=tiny.VOCABULARY, **sizes)
    tiny.factorize_layer(model, "funnel.embeddings.word_embeddings", 4)
    save(model, tmp_path)
    assert_same(load(tmp_path), model)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path):
    """transformers would write nothing, and go on."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="name a folder"):
        save(tiny.bert(), tmp_path / "file")


def test_factors_of_a_layer_that_transformers_initializes_by_its_name_are_loaded(tmp_path):
    """It gives a gate of an xLSTM a certain bias, which the first of two factors lacks."""
    sizes = {"hidden_size": 64, "num_blocks": 2, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 4}
    rounding = {"ffn_round_up_to_multiple_of": 8, "mlstm_round_up_to_multiple_of": 8, "mode": "inference"}
    model = tiny.build("xLSTMForCausalLM", **sizes, **rounding, qk_dim_factor=1.0, v_dim_factor=1.0, vocab_size=64)
    batch = {"input_ids": torch.arange(3, 15)[None]}
    small, report = eckart.compress(model.eval(), [batch], 0.9, "svd", check=False)
    assert any("igate" in name for name in report.ranks)
    eckart.save(small, tmp_path)
    torch.testing.assert_close(tiny.logits(eckart.load(tmp_path), batch), tiny.logits(small, batch))
