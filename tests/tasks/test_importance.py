"""Calibration statistics that several stages gather are those of one stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eckart.calibration.statistics_files import load_statistics
from tasks.artifacts.paths import IMPORTANCE, TARGETS
from tasks.config.params_file import read
from tests.workspace import TO_IMPORTANCE, merged, run_stage, tiny_workspace, write_params


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(IMPORTANCE.iterdir())}


def divide(*shards: str) -> None:
    write_params(Path(), merged(read(), {"importance": {"shards": dict.fromkeys(shards)}}))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shards_in_any_order_give_the_statistics_of_one_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_workspace(tmp_path, importance={"layers_at_once": 1}))
    for stage in TO_IMPORTANCE:
        run_stage(stage)
    whole, targets = {kind: dict(values) for kind, values in load_statistics(IMPORTANCE).items()}, TARGETS.read_text()
    divide("a", "b")
    given = []
    for order in ("ab", "ba"):
        for shard in order:
            run_stage("importance_shard", shard=shard)
        run_stage("importance")
        given.append(contents())
    assert given[0] == given[1]
    assert TARGETS.read_text() == targets
    joined = load_statistics(IMPORTANCE)
    assert {kind: set(values) for kind, values in joined.items()} == {kind: set(v) for kind, v in whole.items()}
    for kind, values in joined.items():
        for key, value in values.items():
            torch.testing.assert_close(value, whole[kind][key], msg=f"{kind} of {key}")
    divide(*(f"s{number}" for number in range(15)))
    with pytest.raises(SystemExit, match="17 names for 16 calibration examples: remove some"):
        run_stage("importance_shard", shard="a")
