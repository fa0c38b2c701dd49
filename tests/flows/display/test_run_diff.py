"""Changes between two runs, solved by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.display import run_diff
from flows.engine.stages import Outcome

HEAD = "recipe,keep,dense,factorized,recovered,speedup\n"


def outcomes(raw: str = "a" * 32, code: str = "c" * 32, splits: str = "s" * 32, **recovery: object) -> list[Outcome]:
    extract = Outcome(
        "extract",
        "Executed",
        None,
        "",
        deps={"data/raw": raw},
        params={"code.extract": code, "data": {"source": "x", "seed": 0}},
        outs={"data/splits": splits},
    )
    params: dict[str, Any] = {"recipes.svd.recovery": {"steps": 2, **recovery}, "code.finetune.svd": "d" * 32}
    deps, outs = {"data/splits/train.parquet": splits}, {"models/finetuned/svd-0.5": splits}
    finetune = Outcome("finetune@svd-0.5", "Executed", None, "", deps, params, outs)
    compare = Outcome("compare", "Executed", None, "", {"models/finetuned": splits}, {}, {})
    return [extract, finetune, compare]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The comparison of one candidate and its control; no git."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports").mkdir()
    compared("0.75")
    return tmp_path


def compared(recovered: str, rest: str = "") -> None:
    table = f"{HEAD}dense + recovery,1,0.875,,0.8125,\nsvd,0.5,0.875,0.5,{recovered},1.5\n{rest}"
    Path("reports/comparison.csv").write_text(table)


def changes(now: list[Outcome]) -> dict[str, list[tuple[str, Any, Any]]]:
    """Since the run that was kept."""
    before = run_diff.load()
    assert before
    return run_diff.changes(before, run_diff.current("second", now))


def test_inputs_that_changed_are_named_and_what_follows_from_them_is_not(workspace: Path) -> None:
    run_diff.keep(run_diff.current("first", outcomes()))
    assert changes(outcomes(raw="b" * 32, splits="t" * 32)) == {"data": [("data/raw", "a" * 10, "b" * 10)]}
    assert changes(outcomes(code="e" * 32)) == {"code": [("extract", "c" * 10, "e" * 10)]}
    assert changes(outcomes(steps=3, rate=0.5)) == {
        "params": [("recipes.svd.recovery.steps", 2, 3), ("recipes.svd.recovery.rate", None, 0.5)]
    }


def test_metrics_that_changed_came_or_went(workspace: Path) -> None:
    compared("0.75", "kfac,0.5,0.875,0.5,0.8125,\n")
    run_diff.keep(run_diff.current("first", outcomes()))
    compared("0.625", "kfac,0.33,0.875,0.5,0.8125,\n")
    assert set(changes(outcomes())["metrics"]) == {
        ("svd-0.5 recovered", 0.75, 0.625),
        *((f"kfac-0.5 {column}", value, None) for column, value in KFAC.items()),
        *((f"kfac-0.33 {column}", None, value) for column, value in KFAC.items()),
    }


KFAC = {"dense": 0.875, "factorized": 0.5, "recovered": 0.8125}
OTHER = b'{"name": "first", "params": 3, "data": [], "code": {}, "metrics": {}}'


@pytest.mark.parametrize("content", [b"{", b"\xff", OTHER])
def test_a_record_that_cannot_be_read_is_none(workspace: Path, content: bytes) -> None:
    assert run_diff.load() is None
    run_diff.LAST.parent.mkdir()
    run_diff.LAST.write_bytes(content)
    assert run_diff.load() is None
