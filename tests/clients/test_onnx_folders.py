"""optimum-onnx and transformers.js read an exported folder as it stands, and answer as the model does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eckart.model.hf_format import save
from eckart.onnx import runner
from tasks.exporting.onnx import to_onnx_folder
from tests import tiny
from tests.workspace import bert, tiny_tokenizer

HERE, CLIENTS = Path(__file__).parent, Path(sys.prefix)
ROUNDING = {"model.onnx": 1e-5, "model_quantized.onnx": 1e-3}


class Case(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    texts: list[str]

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer(self.texts, padding=True, return_tensors="pt"))


class Folder(NamedTuple):
    """A folder with the exported folder of each case."""

    path: Path
    cases: dict[str, Case]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("onnx")
    llama = tiny.of("LlamaForCausalLM", **{**tiny.GROUPED, "num_hidden_layers": 1, "eos_token_id": None})
    cases = {
        "classifier": Case(bert(num_hidden_layers=1), tiny_tokenizer(), ["the plot is dull", "the cast"]),
        "writer": Case(llama().eval(), tiny.words(padding_side="left"), ["w5 w9 w3 w20", "w7"]),
    }
    for case in cases.values():
        tiny.factorize(case.model, case.inputs, lambda _: 4)
    writer = cases["writer"]
    tokens = writer.model.generate(**writer.inputs, max_new_tokens=12, do_sample=False)
    writer.model.generation_config.eos_token_id = tokens[:, -8].tolist()  # in no config but this one
    for name, case in cases.items():
        save(case.model, root / "saved" / name)
        case.tokenizer.save_pretrained(root / "saved" / name)
        to_onnx_folder(str(root / "saved" / name), root / "exported" / name)
    return Folder(root / "exported", cases)


def answers(folder: Folder, *command: str | Path, **options: Any) -> Any:
    texts = json.dumps({name: case.texts for name, case in folder.cases.items()})
    run = subprocess.run([*command, folder.path, texts], check=True, stdout=subprocess.PIPE, text=True, **options)
    return json.loads(run.stdout)


def by_optimum(folder: Folder) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(CLIENTS / "optimum")}  # its transformers goes before the newer one
    return answers(folder, sys.executable, HERE / "read_onnx.py", env=environment)


def by_transformers_js(folder: Folder) -> Any:
    with (HERE / "read_onnx.mjs").open() as script:  # as a file, it would not find the packages of another folder
        return answers(folder, "node", "--input-type=module", "-", stdin=script, cwd=CLIENTS)


def tool(read: Callable[[Folder], Any], packages: str) -> Any:
    missing = pytest.mark.skipif(not (CLIENTS / packages).exists(), reason=f"{CLIENTS / packages} is missing")
    return pytest.param(read, marks=missing)


@pytest.mark.parametrize("read", [tool(by_optimum, "optimum"), tool(by_transformers_js, "node_modules")])
def test_a_tool_answers_as_the_model(read: Callable[[Folder], Any], folder: Folder) -> None:
    """Float32 files answer as torch, int8 files as in onnxruntime here; a language model writes with its cache."""
    found = read(folder)
    for name, case in folder.cases.items():
        for file, rounding in ROUNDING.items():
            expected = runner(folder.path / name / "onnx" / file)(case.inputs)["logits"]
            if file == "model.onnx":
                expected = tiny.logits(case.model, case.inputs)
            actual = torch.tensor(found[file][name])
            real = case.inputs["attention_mask"] == 1 if expected.dim() == 3 else ...
            torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=rounding)
    writer = folder.cases["writer"]
    tokens = writer.model.generate(**writer.inputs, max_new_tokens=12, do_sample=False)
    assert tokens.shape[1] < writer.inputs["input_ids"].shape[1] + 12
    assert found["model.onnx"]["tokens"] == tokens.tolist()
