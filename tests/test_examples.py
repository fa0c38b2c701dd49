"""The examples run on tiny models, with the arguments that a reader would give."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

import eckart
from eckart.model.layers import factorized
from tests import tiny
from tests.workspace import REPOSITORY, reviews, write_base


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


def run(script: Path, *arguments: str) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` does, but in this process: imports alone take ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")


def test_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_base(tmp_path / "base")
    AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1}
    ).save_pretrained(tmp_path / "base")
    reviews().rename(columns={"text": "body", "label": "mood"}).to_csv(tmp_path / "texts.csv", index=False)
    options = ("--text", "body", "--label", "mood", "--keep", "0.5", "--steps", "2")
    run(REPOSITORY / "examples/classifier.py", "base", "texts.csv", "small", *options)
    assert "% kept)" in capsys.readouterr().out
    assert factorized(eckart.load(tmp_path / "small"))
    assert (tmp_path / "small/tokenizer.json").exists()


def test_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eckart.save(tiny.causal_llama(), tmp_path / "base", tiny.words())
    (tmp_path / "book.txt").write_text(" ".join(f"w{2 + number * number % 28}" for number in range(400)))
    run(REPOSITORY / "examples/language_model.py", "base", "book.txt", "small", "--keep", "0.8", "--tokens", "16")
    assert "perplexity of 2 blocks: " in capsys.readouterr().out
    small, base = (eckart.load(tmp_path / folder).num_parameters() for folder in ("small", "base"))
    assert small < base


def test_the_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its code, cell after cell, with a tiny model in place of the first."""
    write_base(tmp_path / "base")
    reviews().assign(label=lambda table: table["label"].map({"negative": 0, "positive": 1})).to_csv(
        tmp_path / "texts.csv", index=False
    )
    cells = json.loads((REPOSITORY / "examples/how_small.ipynb").read_text())["cells"]
    first, *others = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "MODEL = " in first
    (tmp_path / "notebook.py").write_text("\n".join(['MODEL, TEXTS = "base", "texts.csv"', *others]))
    run(tmp_path / "notebook.py")
    assert "% kept)" in capsys.readouterr().out
    assert factorized(eckart.load(tmp_path / "small"))
