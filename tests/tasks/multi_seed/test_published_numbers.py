"""Numbers of papers, as they are printed beside a study's."""

from typing import Any

from tasks.multi_seed import published_numbers
from tasks.multi_seed.published_numbers import Published

ROW: dict[str, Any] = {
    "source": "Doe 2024, table 1",
    "method": "ARS",
    "keep": 0.5,
    "units": "percent",
    "note": "of 3 seeds",
}


def test_without_tasks_there_is_a_score_and_other_benchmarks() -> None:
    rows = [
        Published(**{**ROW, "score": 80}),
        Published(**{**ROW, "keep": None, "note": None, "scores": {"BoolQ": 61.5}}),
    ]
    table = published_numbers.table(rows, {None: "accuracy"})
    assert table.columns.tolist() == ["method", "keep", "accuracy, %", "BoolQ", "source", "note"]
    assert table.loc[0].tolist() == ["ARS", "0.5", "80", "–", "Doe 2024, table 1", "1"]
    assert table.loc[1].tolist() == ["ARS", "–", "–", "61.5", "Doe 2024, table 1", ""]


def test_means_are_over_the_tasks_that_a_paper_has() -> None:
    rows = [
        Published(**{**ROW, "scores": {"a": 80.25, "b": 50.0, "c": 99.0}}),
        Published(**{**ROW, "units": "metric", "scores": {"b": 0.5}}),
    ]
    table = published_numbers.table(rows, {"a": "accuracy", "b": "matthews"})
    assert table[["a", "b", "mean"]].to_numpy().tolist() == [["80.25", "50", "65.12"], ["–", "50", "50.00 of 1"]]


def test_rows_of_tasks_that_are_not_shown_are_left_out() -> None:
    rows = [Published(**{**ROW, "scores": {"a": 80.0}}), Published(**{**ROW, "scores": {"b": 80.0}})]
    assert published_numbers.beside(rows, {"b": "f1"}) == rows[1:]
    assert published_numbers.beside(rows, {None: "f1"}) == rows
