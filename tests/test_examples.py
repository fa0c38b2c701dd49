"""The examples run as a reader would run them, on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForSequenceClassification

import eckart
from eckart.model.layers import factorized
from tests import tiny
from tests.workspace import REPOSITORY, reviews, write_base


def run(example: str, *arguments: str, folder: Path) -> str:
    code = {"PYTHONPATH": str(REPOSITORY), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, str(REPOSITORY / f"examples/{example}.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_classifier(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1}
    ).save_pretrained(tmp_path / "base")
    reviews().rename(columns={"text": "body", "label": "mood"}).to_csv(tmp_path / "texts.csv", index=False)
    columns = ("--text", "body", "--label", "mood")
    said = run("classifier", "base", "texts.csv", "small", *columns, "--keep", "0.5", "--steps", "2", folder=tmp_path)
    assert " targets keep " in said
    assert factorized(eckart.load(tmp_path / "small"))
    assert (tmp_path / "small/tokenizer.json").exists()


def test_a_language_model(tmp_path: Path) -> None:
    eckart.save(tiny.causal_llama(), tmp_path / "base", tiny.words())
    (tmp_path / "book.txt").write_text(" ".join(f"w{2 + number * number % 28}" for number in range(400)))
    arguments = ("--keep", "0.8", "--tokens", "16")
    said = run("language_model", "base", "book.txt", "small", *arguments, folder=tmp_path)
    assert "perplexity of 2 blocks: " in said
    assert factorized(eckart.load(tmp_path / "small"))


def test_the_notebook(tmp_path: Path) -> None:
    """Its code, cell after cell, where the first names a tiny model."""
    write_base(tmp_path / "base")
    reviews().assign(label=lambda table: table["label"].map({"negative": 0, "positive": 1})).to_csv(
        tmp_path / "texts.csv", index=False
    )
    cells = json.loads((REPOSITORY / "examples/how_small.ipynb").read_text())["cells"]
    first, *others = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "MODEL = " in first
    (tmp_path / "notebook.py").write_text("\n".join(['MODEL, TEXTS = "base", "texts.csv"', *others]))
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_WAIT_POLICY": "PASSIVE", "MPLBACKEND": "agg"}
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert " targets keep " in done.stdout
    assert factorized(eckart.load(tmp_path / "small"))
