"""Texts that a language model is calibrated with beside the training text: other ones, and what the model writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset

from tasks.artifacts.paths import WRITTEN
from tasks.artifacts.task_spec import load_split
from tasks.data.loading import encoded, mixed
from tests.tasks.nlp_tasks.test_language_modeling import END, lines, model, params, tokenizer
from tests.workspace import REPOSITORY, run_stage, write_params

Block = tuple[int, ...]
OTHER = "data/raw/other.txt"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two texts, and a tiny LLaMA that has learned its task."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    model().save_pretrained("models/teacher")
    tokenizer().save_pretrained("models/teacher")
    Path("data/raw").mkdir(parents=True)
    Path("data/raw/text.txt").write_text("\n".join(lines(30)))
    Path(OTHER).write_text("\n".join(line.upper() for line in lines(30)))
    return tmp_path


def calibration(*stages: str, **data: Any) -> list[Block]:
    write_params(Path(), params(**data))
    for stage in stages:
        run_stage(stage)
    return [tuple(ids) for ids in encoded("calibration", tokenizer())["input_ids"]]


def written() -> list[Block]:
    return [tuple(ids) for ids in pd.read_parquet(WRITTEN)["input_ids"]]


def test_where_nothing_is_written_torch_is_not_imported(workspace: Path) -> None:
    write_params(Path(), params())
    code = "import runpy, sys; runpy.run_module('tasks.write', run_name='__main__'); assert 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    given = calibration("extract")
    assert written() == []
    WRITTEN.unlink()
    assert calibration() == given


def test_calibration_examples_are_given_ones_and_written_ones(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = calibration("extract")
    all_blocks = calibration("write", "importance", written={"examples": 4, "batch_size": 3})
    assert len(given) == 8
    assert "statistics from 12/12 examples" in capsys.readouterr().out
    own = written()
    assert {len(block) for block in own} == {12}
    assert [block for block in all_blocks if block in given] == given
    assert [block for block in all_blocks if block in own] == own
    before = WRITTEN.read_bytes()
    only_own = calibration("extract", "write", sizes={"calibration": 0}, written={"examples": 4, "batch_size": 3})
    assert WRITTEN.read_bytes() == before
    assert only_own == own
    calibration("extract", "write", seed=1, written={"examples": 4, "batch_size": 3})
    assert written() != own


def test_a_text_may_start_with_tokens_of_the_training_text_or_the_model_s_own(workspace: Path) -> None:
    calibration("extract", "write", written={"examples": 6, "prompts": 5, "temperature": 0.5})
    beginnings = {tuple(ids[:5]) for ids in encoded("train", tokenizer())["input_ids"]}
    assert {block[:5] for block in written()} <= beginnings
    calibration("write", written={"examples": 6, "first": "bos"})
    assert {block[0] for block in written()} == {model().config.bos_token_id}


def test_a_model_that_cannot_write_such_a_block_is_an_error(workspace: Path) -> None:
    with pytest.raises(SystemExit, match=r"write: .*\b64 positions"):
        calibration("extract", "write", max_length=65, written={"examples": 1})


def test_other_texts_are_drawn_in_their_numbers(workspace: Path) -> None:
    own = {"source": "data/raw/text.txt", "examples": 3, "separator": "</s>"}
    texts = {"upper": {"source": OTHER, "examples": 5}, "own": own}
    blocks = calibration("extract", calibration_texts=texts)
    given = calibration("extract")
    upper = [block for block in blocks if tokenizer().decode(block).isupper()]
    assert (len(blocks), len(upper), len(given)) == (16, 5, 8)
    assert 0 < sum(END in block for block in blocks) <= 3
    assert [block for block in blocks if block in given] == given


@pytest.mark.parametrize(
    "source",
    [{"source": "data/raw/text.txt"}, {"source": "data/raw", "splits": {"train": "text", "test": "other"}}],
    ids=["a file", "splits in a folder"],
)
def test_a_text_is_read_without_what_a_study_of_it_is_scored_on(workspace: Path, source: dict[str, Any]) -> None:
    own = {"source": source["source"], "split": source.get("splits", {}).get("train", "train")}
    calibration("extract", **source, calibration_texts={"own": own})
    rows = {*json.loads(Path("data/splits/calibration_texts.json").read_text())[0]["rows"]}
    assert rows
    assert rows <= set(load_split("train")["text"])
    assert not rows & {*load_split("validation")["text"], *load_split("test")["text"]}


def test_a_text_that_is_not_there_is_named(workspace: Path) -> None:
    write_params(Path(), params(calibration_texts={"a": {"source": OTHER}, "b": {"source": "data/raw/nothing.txt"}}))
    with pytest.raises(SystemExit, match=r"data\.calibration_texts\.b: data/raw/nothing\.txt"):
        run_stage("extract")
    assert not Path("data/splits").exists()


def test_examples_of_several_texts_are_spread_evenly() -> None:
    parts = {"a": 12, "b": 6, "c": 3}
    order = mixed([Dataset.from_dict({"name": [name] * size, "place": range(size)}) for name, size in parts.items()])
    for name, size in parts.items():
        assert [row["place"] for row in order if row["name"] == name] == list(range(size))
    for end in range(22):
        counts = Counter(order["name"][:end])
        assert all(abs(counts[name] - end * size / 21) <= 1 for name, size in parts.items())
