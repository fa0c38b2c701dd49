"""Texts that a language model is calibrated with beside the training text: other ones, and what the model writes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tasks.artifacts.paths import CALIBRATION
from tasks.artifacts.task_spec import load_split
from tasks.data.calibration_examples import mixed
from tasks.data.loading import encoded
from tests.tasks.nlp_tasks.test_language_modeling import END, lines, model, params, tokenizer
from tests.workspace import run_stage, write_params

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


def calibration(**data: Any) -> list[Block]:
    write_params(Path(), params(**data))
    for stage in ("extract", "calibration"):
        run_stage(stage)
    return [tuple(ids) for ids in encoded("calibration", tokenizer())["input_ids"]]


def written(seed: int = 0, **settings: Any) -> list[Block]:
    return calibration(sizes={"calibration": 0}, seed=seed, written=settings)


def test_calibration_examples_are_given_ones_and_written_ones(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"examples": 4, "batch_size": 3}
    given, both = calibration(), calibration(written=own)
    run_stage("importance")
    assert "statistics from 12/12 examples" in capsys.readouterr().out
    alone = written(**own)
    assert len(given) == 8
    assert {len(block) for block in alone} == {12}
    assert [block for block in both if block in given] == given
    assert [block for block in both if block in alone] == alone
    assert written(seed=1, **own) != alone


def test_the_file_of_the_examples_has_the_same_bytes_again(workspace: Path) -> None:
    calibration(written={"examples": 2})
    before = CALIBRATION.read_bytes()
    run_stage("calibration")
    assert CALIBRATION.read_bytes() == before


def test_a_text_may_start_with_tokens_of_the_training_text_or_the_model_s_own(workspace: Path) -> None:
    own = written(examples=6, prompts=5, temperature=0.5)
    assert {block[:5] for block in own} <= {tuple(ids[:5]) for ids in encoded("train", tokenizer())["input_ids"]}
    assert {block[0] for block in written(examples=6, first="bos")} == {model().config.bos_token_id}


def test_a_model_that_cannot_write_such_a_block_is_an_error(workspace: Path) -> None:
    with pytest.raises(SystemExit, match=r"calibration: .*\b64 positions"):
        calibration(max_length=65, written={"examples": 1})


def test_other_texts_are_drawn_in_their_numbers(workspace: Path) -> None:
    own = {"source": "data/raw/text.txt", "examples": 3, "separator": "</s>"}
    texts = {"upper": {"source": OTHER, "examples": 5}, "own": own}
    blocks, given = calibration(calibration_texts=texts), calibration()
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
    calibration(**source, calibration_texts={"own": own})
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
