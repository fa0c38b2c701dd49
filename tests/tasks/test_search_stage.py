"""The stage search: the examples that it gives to a rank search."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.config.schema import Trainer
from tasks.search import _Data
from tests.workspace import bert, collate, rows


@pytest.mark.parametrize(("skip", "sizes"), [(0, [8, 4]), (50, [8, 2]), (60, []), (70, [])])
def test_a_search_may_skip_all_examples_and_then_has_none(tmp_path: Path, skip: int, sizes: list[int]) -> None:
    data = _Data(bert(), collate(), lambda _: rows(), 8, None, True, 0, Trainer(), tmp_path / "curve.jsonl")
    assert [len(batch["input_ids"]) for batch in data.calibration(12, skip)] == sizes
