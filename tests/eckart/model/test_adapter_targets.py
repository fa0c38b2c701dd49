"""Names of factorized layers in a config of peft become names of their factors."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from eckart.factorization.pivoted_storage import pivot
from eckart.model import adapter_targets
from eckart.model.layers import merge
from tests import tiny

SELF = "bert.encoder.layer.{}.attention.self.{}"


def matches(config: Any, name: str) -> bool:
    """As peft compares: the last parts of a name count."""
    return any(f".{name}".endswith(f".{end}") for end in config.target_modules)


def model() -> PreTrainedModel:
    """Return a BERT whose query in the first layer is dense."""
    found = tiny.factorize(tiny.bert(), tiny.collate(tiny.samples(4)), lambda _: 2)
    merge(found, SELF.format(0, "query"))
    return found


def test_both_factors_are_adapted_in_place_of_a_factorized_layer() -> None:
    config = SimpleNamespace(target_modules=["query", "classifier"])
    adapter_targets.expand(config, model(), matches)
    factors = {SELF.format(1, f"query.{side}") for side in ("right", "left")}
    assert config.target_modules == {SELF.format(0, "query"), "classifier"} | factors


def test_a_trained_adapter_must_name_the_factors() -> None:
    """That of the original would have no weights for them, and change nothing."""
    trained = SimpleNamespace(target_modules=["query"], inference_mode=True)
    with pytest.raises(ValueError, match=r"1\.attention\.self\.query is factorized"):
        adapter_targets.expand(trained, model(), matches)
    trained.target_modules = [SELF.format(1, f"query.{side}") for side in ("right", "left")]
    adapter_targets.expand(trained, model(), matches)


def test_outputs_are_scaled_at_the_last_factor_and_inputs_at_the_first() -> None:
    """(IA)³ multiplies the inputs of the layers in `feedforward_modules`, and the outputs of the others."""
    config = SimpleNamespace(target_modules=["value", "output.dense"], feedforward_modules=["output.dense"])
    adapter_targets.expand(config, model(), matches)
    ends = [f"bert.encoder.layer.{n}.{part}output.dense.right" for n in (0, 1) for part in ("", "attention.")]
    assert config.feedforward_modules == {*ends}
    assert config.target_modules == {*ends, SELF.format(0, "value.left"), SELF.format(1, "value.left")}


def test_embeddings_and_pivots_have_factors_of_other_kinds() -> None:
    small = model()
    tiny.factorize_layer(small, "bert.embeddings.word_embeddings", 2)
    config = SimpleNamespace(target_modules=["word_embeddings"])
    adapter_targets.expand(config, small, matches)
    assert config.target_modules == {"bert.embeddings.word_embeddings.right"}
    pivot(small)
    config = SimpleNamespace(target_modules=["1.attention.self.value"])
    adapter_targets.expand(config, small, matches)
    assert config.target_modules == {SELF.format(1, f"value.{part}") for part in ("right", "others")}


def test_names_of_dense_layers_stay_as_they_were_written() -> None:
    config = SimpleNamespace(target_modules=["classifier"])
    adapter_targets.expand(config, model(), matches)
    assert config.target_modules == ["classifier"]


def test_peft_is_changed_as_soon_as_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a program looked for it before. A stand-in for the package has the functions that count."""
    code = "def _maybe_include_all_linear_layers(peft_config, model):\n    return peft_config\n"
    code += "def check_target_module_exists(config, key):\n    return key in config.target_modules\n"
    code += "class BaseTuner:\n    inject_adapter = None\n"
    for folder in (tmp_path / "peft", tmp_path / "peft" / "tuners"):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (tmp_path / "peft" / "tuners" / "tuners_utils.py").write_text(code)
    stand_in = {"peft", "peft.tuners", "peft.tuners.tuners_utils"}
    for name in stand_in.union(name for name in sys.modules if name.partition(".")[0] == "peft"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that the end of the test removes or restores it
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    importlib.reload(adapter_targets)
    assert find_spec("peft.tuners.tuners_utils")
    utilities = importlib.import_module("peft.tuners.tuners_utils")
    config = SimpleNamespace(target_modules={"a"})
    low = tiny.factorize_layer(layers := tiny.LinearLayers((6, 5)), "a", 2)
    assert isinstance(low, nn.Module)
    completed = utilities._maybe_include_all_linear_layers(config, layers)
    assert completed.target_modules == {"a.right", "a.left"}
    assert config.target_modules == {"a"}  # it may be used for another model
