"""Merged models: plain folders that answer as the candidates, written whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from eckart.factorization.pivoted_storage import pivot
from eckart.factorization.weighted_svd import decompose
from eckart.factorization.weightings import ErrorNorm
from eckart.model import hf_format
from eckart.model.layers import factorize_target, factorized
from eckart.model.targets import find_targets, weight_of
from flows.cli import app
from tasks.artifacts.errors import StageError
from tasks.exporting import merged_checkpoint
from tasks.exporting.merged_checkpoint import to_plain
from tests import tiny
from tests.eckart.model.test_attention_products import compressed
from tests.workspace import digests

BATCH = {name: tiny.collate(tiny.samples(8))[name] for name in ("input_ids", "attention_mask")}
FAMILIES = {**tiny.FAMILIES, "causal llama": tiny.causal_llama, "phi3": tiny.phi3}


def compress(model: PreTrainedModel, stored: str) -> PreTrainedModel:
    """Every target at rank 3, as factors or pivots, or with two rows of what the factors leave."""
    for target in find_targets(model, BATCH).targets:
        weight = weight_of(model.get_submodule(target.name))
        left, right = (factor.float() for factor in decompose(weight, ErrorNorm()).truncate(3))
        layer = factorize_target(model, target.name, left, right, weight - left @ right if stored == "rows" else None)
        layer.keep_rows(slice(1, 3))
    if stored == "pivoted":
        pivot(model)
    return model.eval()


def write(model: PreTrainedModel, folder: str) -> None:
    hf_format.save(model, Path(folder))
    tiny.words().save_pretrained(folder)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**BATCH).logits


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "stored"), [("bert", "factors"), ("gpt2", "rows"), ("llama", "rows"), ("causal llama", "pivoted")]
)
def test_a_merged_model_gives_the_same_logits_and_is_plain(family: str, stored: str) -> None:
    dense, small = FAMILIES[family](), compress(FAMILIES[family](), stored)
    write(small, "small")
    to_plain("small", Path("some/plain"))
    auto = AutoModelForCausalLM if family == "causal llama" else AutoModelForSequenceClassification
    loaded = auto.from_pretrained("some/plain")
    assert factorized(loaded) == {}
    assert set(loaded.state_dict()) == set(dense.state_dict())
    assert {"quantization_config", "transformers_weights"}.isdisjoint(
        json.loads(Path("some/plain/config.json").read_text())
    )
    torch.testing.assert_close(logits(loaded), logits(small), rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained("some/plain")("w2 w3") == tiny.words()("w2 w3")
    assert [path.name for path in Path("some").iterdir()] == ["plain"]


def test_a_product_of_queries_and_keys_is_merged() -> None:
    small, _ = compressed(2)
    write(small, "small")
    to_plain("small", Path("plain"))
    loaded = type(small).from_pretrained("plain")
    assert factorized(loaded) == {}
    torch.testing.assert_close(logits(loaded), logits(small), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "widths", "changed"),
    [
        ("causal llama", (20, 20), {"intermediate_size": 20}),
        ("causal llama", (12, 20), {"intermediate_size": 20}),
        ("causal llama", (0, 20), {}),
        ("phi3", (12, 20), {"intermediate_size": 20}),
        ("phi3", (0, 20), {}),
        ("gpt2", (20, 12), {"n_inner": 20}),  # its config has None there, as the width follows from another number
        ("gpt2", (20, 0), {}),
    ],
)
def test_narrowed_mlps_get_one_width(family: str, widths: tuple[int, ...], changed: dict[str, int]) -> None:
    dense, small = FAMILIES[family](), tiny.narrow(FAMILIES[family](), widths)
    write(small, "small")
    to_plain("small", Path("plain"))
    assert {"quantization_config", "transformers_weights"}.isdisjoint(json.loads(Path("plain/config.json").read_text()))
    loaded = type(small).from_pretrained("plain")
    before, after = (
        {name: value for name, value in model.config.to_dict().items() if type(value) is int}
        for model in (dense, loaded)
    )
    assert after == {**before, **changed}
    torch.testing.assert_close(logits(loaded), logits(small), rtol=1e-4, atol=1e-4)


def test_transformers_alone_loads_it() -> None:
    small = tiny.narrow(tiny.causal_llama(), (16, 20))
    tiny.factorize_layer(small, "model.layers.0.self_attn.q_proj", 3)
    write(small, "small")
    to_plain("small", Path("plain"))
    code = (
        "import sys; from transformers import AutoModelForCausalLM; "
        "AutoModelForCausalLM.from_pretrained('plain'); assert 'eckart' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_type_of_the_weights_stays() -> None:
    write(compress(tiny.causal_llama(), "factors").to(torch.bfloat16), "small")
    to_plain("small", Path("plain"))
    loaded, small = (AutoModelForCausalLM.from_pretrained(folder) for folder in ("plain", "small"))
    assert loaded.dtype == torch.bfloat16
    torch.testing.assert_close(logits(loaded), logits(small), rtol=0.1, atol=0.1)


def test_a_merge_that_changes_outputs_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write(compress(tiny.causal_llama(), "factors"), "small")
    merge = merged_checkpoint.merge

    def wrong(model: PreTrainedModel, name: str) -> None:
        with torch.no_grad():
            merge(model, name).get_parameter("weight").mul_(1.01)

    monkeypatch.setattr(merged_checkpoint, "merge", wrong)
    with pytest.raises(StageError, match="logits"):
        to_plain("small", Path("plain"))
    assert [path.name for path in Path().iterdir()] == ["small"]


def test_layers_are_compared_one_by_one_if_a_model_does_not_run_on_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny.choices()
    small = tiny.factorize(model, batch, lambda _: 3, embeddings=True)
    write(small, "small")
    to_plain("small", Path("plain"))
    loaded = type(small).from_pretrained("plain")
    assert factorized(loaded) == {}
    torch.testing.assert_close(tiny.logits(loaded, batch), tiny.logits(small, batch), rtol=1e-4, atol=1e-4)
    merge = merged_checkpoint.merge

    def wrong(model: PreTrainedModel, name: str) -> nn.Module:
        merged = merge(model, name)
        with torch.no_grad():
            merged.get_parameter("weight").mul_(1.01)
        return merged

    monkeypatch.setattr(merged_checkpoint, "merge", wrong)
    with pytest.raises(StageError, match="merging changes"):
        to_plain("small", Path("other"))
    assert not Path("other").exists()


def test_a_failed_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: PreTrainedModel, folder: Path) -> None:
        folder.mkdir()
        raise OSError("no space")

    write(compress(tiny.causal_llama(), "factors"), "small")
    monkeypatch.setattr(merged_checkpoint, "save", full)
    with pytest.raises(StageError, match=r"plain.*no space"):
        to_plain("small", Path("plain"))
    assert [path.name for path in Path().iterdir()] == ["small"]


def test_an_existing_folder_is_not_replaced() -> None:
    write(compress(tiny.causal_llama(), "factors"), "small")
    before = digests(Path("small"))
    with pytest.raises(StageError, match="small"):
        to_plain("small", Path("small"))
    assert digests(Path("small")) == before


def test_wrong_models_are_errors() -> None:
    write(tiny.causal_llama(), "dense")
    with pytest.raises(StageError, match="dense"):
        to_plain("dense", Path("plain"))
    with pytest.raises(StageError, match="nowhere"):
        to_plain("nowhere", Path("plain"))
    write(compress(tiny.causal_llama(), "factors"), "own")
    config = json.loads(Path("own/config.json").read_text())
    Path("own/config.json").write_text(json.dumps({**config, "architectures": ["LSTMForCausalLM"]}))
    with pytest.raises(StageError, match="LSTMForCausalLM"):
        to_plain("own", Path("plain"))
    assert not Path("plain").exists()


def test_the_command_writes_it() -> None:
    write(compress(tiny.causal_llama(), "factors"), "small")
    both = CliRunner().invoke(app, ["export", "small", "plain", "--dense", "--int8"])
    assert both.exit_code != 0
    done = CliRunner().invoke(app, ["export", "small", "plain", "--dense"])
    assert done.exit_code == 0
    assert "plain" in done.output
    assert Path("plain/model.safetensors").exists()
