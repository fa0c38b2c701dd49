"""Figures over seeds and tasks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tasks import figures
from tasks.multi_seed.seeds_figures import over_tasks, write_means
from tasks.report.figures.plot import Line, Pattern, Plot


def plot(name: str, height: float) -> Plot:
    return Plot(name=name, title="t", x="x", y="y", panels={"": {"svd": Line(x=(1.0, 2.0), y=(height, height))}})


def test_plots_of_all_seeds_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "draw", lambda *_: b"")
    for seed, names in enumerate((["p", "of the first"], ["p"])):
        folder = tmp_path / str(seed) / figures.FIGURES / "results"
        folder.mkdir(parents=True)
        for name in names:
            figures.write(plot(name, float(seed)), folder)
        earlier = tmp_path / str(seed) / figures.FIGURES / "weights"
        earlier.mkdir()
        figures.write(plot("of an earlier study", 0.0), earlier)
    write_means([tmp_path / "0", tmp_path / "1"], ["results"], tmp_path / "means")
    assert sorted(file.name for file in (tmp_path / "means").iterdir()) == ["p.json", "p.png", "p.svg"]
    written = Plot.model_validate_json((tmp_path / "means/p.json").read_text())
    assert written.panels[""]["svd"].y == (0.5, 0.5)
    assert written.title == "t, mean of 2 seeds"


def test_a_picture_of_weights_is_that_of_the_first_seed(tmp_path: Path) -> None:
    mask = np.eye(2, dtype=bool)
    for seed in (0, 1):
        folder = tmp_path / str(seed) / figures.FIGURES / "weights"
        folder.mkdir(parents=True)
        figures.write(Pattern(name="pattern-0.25", title="t", panels={"svd": mask if seed else ~mask}), folder)
    write_means([tmp_path / "0", tmp_path / "1"], ["weights"], tmp_path / "means")
    for kind in ("png", "svg"):
        own = tmp_path / "0" / figures.FIGURES / f"weights/pattern-0.25.{kind}"
        assert (tmp_path / f"means/pattern-0.25.{kind}").read_bytes() == own.read_bytes()


def test_scores_of_numbered_tasks_are_over_their_numbers() -> None:
    def rows(block: int) -> pd.DataFrame:
        seeds = [
            {
                "recipe": "svd",
                "keep": "0.5",
                "metric": "accuracy",
                "dense": 0.9,
                "factorized": None,
                "seed": seed,
                "recovered": block / 20 + seed / 10,
            }
            for seed in (0, 1)
        ]
        return pd.DataFrame([*seeds, {**seeds[0], "recipe": "dense + recovery", "recovered": 0.1}])

    (found,) = over_tasks(
        {f"mrpc-block-{block}": rows(block) for block in (10, 2, 1)} | {"rte": rows(5), "rte-15": rows(5)}
    )
    assert found.name == "score-over-mrpc-block"
    (after,) = found.panels.values()  # none has a score before fine-tuning
    assert list(after) == ["svd"]
    assert after["svd"].x == (1, 2, 10)
    assert after["svd"].y == pytest.approx((0.1, 0.15, 0.55))
