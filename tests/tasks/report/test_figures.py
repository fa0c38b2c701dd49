"""The papers' figures: their points are the numbers of results and of hand-solved weights; their files are whole."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from eckart.model.layers import factorize_target
from eckart.model.targets import Target
from tasks import figures
from tasks.artifacts.names import candidate_of
from tasks.artifacts.stage_inputs import file_of
from tasks.report.figures import of_weights
from tasks.report.figures.drawing import Format, draw
from tasks.report.figures.of_results import plots_of
from tasks.report.figures.of_weights import Weights, middle, spectra
from tasks.report.figures.plot import CONTROL, ORIGINAL, Line, Pattern, Plot, labels_of, mean_over_seeds
from tasks.report.page import page
from tasks.report.result_files import load_results
from tasks.report.results import DENSE, CandidateResults, Results
from tasks.report.target_names import kind_in_layer
from tests.tasks.report.test_compare import HOSTILE, bert_like, curve, edit, make_candidate, make_study

STUDY = ["svd", "ars", "lpaf", "losparse", "itp", "weighted", "movement"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of a study that has every figure."""
    with contextlib.chdir(tmp_path_factory.mktemp("study")), pytest.MonkeyPatch.context() as patched:
        patched.setattr("tasks.scoring.bootstrap.RESAMPLES", 100)
        write_study()
        return load_results()


@pytest.fixture(scope="module")
def plots(results: Results) -> dict[str, Plot]:
    return {plot.name: plot for plot in plots_of(results)}


def write_study() -> None:
    make_study(STUDY, [0.5, 0.25], bert_like(2))
    for keep in (0.5, 0.25):
        make_candidate("ars", keep, bert_like(2), 0.7, searched=curve(6, R=1.5))
        make_candidate("lpaf", keep, bert_like(2), 0.65, average_rank=12 * keep, shaped=0.7 + keep / 10)
        for recipe in ("losparse", "itp", "weighted", "movement"):
            make_candidate(recipe, keep, bert_like(2), 0.6, rows=3)
    params = json.loads(Path("params.yaml").read_text())
    parts = {"svd": {}, "ars": {}, "lpaf": {"shaping": {"kind": "pruning", "remaining": [0.5, 0.3]}}}
    rows = {
        recipe: {"residual": {"kind": "sparse_rows", "low_rank": share, "score": score}}
        for recipe, share, score in (
            ("losparse", 0.1, "sensitivity"),
            ("itp", 0.0, "sensitivity"),
            ("weighted", 0.8, "sensitivity"),
            ("movement", 0.0, "movement"),
        )
    }
    recipes = {name: {**params["recipes"][name], **part} for name, part in {**parts, **rows}.items()}
    recipes["weighted"]["weighting"] = {"kind": "inputs"}
    edit("params.yaml", recipes=recipes)


def test_points_are_the_numbers_of_the_results(plots: dict[str, Plot], results: Results) -> None:
    after = plots["score-over-keep"]
    assert after.panels[""]["svd"].x == (0.25, 0.5)
    assert after.panels[""]["svd"].y == tuple(results.named(f"svd-{keep}").recovered for keep in ("0.25", "0.5"))
    ends, dense = results.difference(("svd-0.25", "recovered"), DENSE), results.metric_of(DENSE)
    assert (after.panels[""]["svd"].low or ())[0] == dense + ends.low
    assert after.levels == {"": {ORIGINAL: 0.8, CONTROL: 0.8}}
    assert "losparse" not in plots["score-before-over-keep"].panels[""]  # it has no smaller model before training

    memory, speed = plots["size-and-speed"].panels.values()
    assert memory["svd"].y == (70.0, 70.0)
    assert (speed["svd"].y, speed["svd"].low) == ((1.5, 1.5), (1.25, 1.25))
    assert plots["score-over-speed"].panels[""]["svd"].x == (1.5, 1.5)

    ranks = plots["ranks-by-layer-0.5"]
    decided = {name: size.rank or 10 for name, size in results.named("svd-0.5").evaluation.targets.items()}
    assert list(ranks.panels) == ["query", "attention.output", "intermediate", "output"]
    assert ranks.panels["query"]["svd"] == Line(
        x=(0, 1), y=tuple(decided[f"bert.layer.{layer}.attention.self.query"] for layer in (0, 1))
    )

    search = plots["search-0.5"]
    assert search.panels["task loss"]["ars"] == Line(x=tuple(range(1, 7)), y=tuple(1 / step for step in range(1, 7)))
    assert search.panels["R"]["ars"].y == (1.5,) * 6
    assert {"svd", CONTROL} <= {*plots["fine-tuning-0.25"].panels[""]}


def test_figures_of_pruning_and_of_sparse_rows_are_over_their_own_shares(plots: dict[str, Plot]) -> None:
    score, rank = plots["pruned-over-remaining"].panels.values()
    # remaining has 0.5 and 0.3; keep 0.25 takes the smallest that is not below it
    assert score["lpaf, pruned only"] == Line(x=(0.3, 0.5), y=(0.725, 0.75))
    assert rank["lpaf, pruned only"].y == (3.0, 6.0)
    assert rank["svd"].x == (0.25, 0.5)
    # percent of all weights, of recipes that differ in nothing else
    assert {label: line.x for label, line in plots["score-over-low-rank"].panels[""].items()} == {
        "keep 0.5": (0.0, 5.0),
        "keep 0.25": (0.0, 2.5),
    }


def test_every_figure_is_a_picture_an_svg_and_its_numbers(plots: dict[str, Plot], tmp_path: Path) -> None:
    plot = plots["size-and-speed"].model_copy(update={"title": HOSTILE})
    figures.write(plot, tmp_path)
    picture = imread(tmp_path / "size-and-speed.png")
    assert picture.shape[0] > 400
    assert picture[..., :3].std() > 0.01  # not blank
    root = ElementTree.parse(tmp_path / "size-and-speed.svg").getroot()
    assert {HOSTILE, *labels_of(plot)} <= {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert Plot.model_validate_json((tmp_path / "size-and-speed.json").read_text()) == plot


def test_marks_stand_at_their_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only points that share an x are drawn beside it, by a few points of the page."""
    kept = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda canvas, *_, **__: kept.append(canvas))
    line = Line(x=(0.25, 0.5), y=(0.6, 0.9), low=(0.5, 0.8), high=(0.7, 1.0))
    draw(Plot(name="p", title="", x="x", y="y", panels={"": {"a": line, "b": line}}), "png")
    (axes,) = kept[0].axes
    assert axes.get_ylim()[0] < 0.5 < 1.0 < axes.get_ylim()[1]
    for drawn in axes.lines:
        assert drawn.get_xydata().tolist() == [[0.25, 0.6], [0.5, 0.9]]
        away = drawn.get_transform().transform((0.25, 0.6)) - axes.transData.transform((0.25, 0.6))
        assert abs(away[0]) <= 4 * kept[0].dpi / 72
        assert away[1] == pytest.approx(0)


def test_no_mark_is_cut_off_and_small_numbers_share_a_power_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda canvas, *_, **__: kept.append(canvas))
    line = Line(x=(0.25, 0.5), y=(0.6, 0.9), low=(0.5, 0.8), high=(0.7, 1.0))
    draw(Plot(name="p", title="", x="x", y="y", panels=dict.fromkeys("ab", dict.fromkeys("123456789", line))), "png")
    draw(Plot(name="p", title="", x="x", y="y", panels={"": {"a": Line(x=(0, 3e-7), y=(0, 1))}}, marks=False), "png")
    for canvas in kept:
        canvas.draw_without_rendering()
    first = kept[0].axes[0]
    for drawn in first.lines:
        places = drawn.get_transform().transform(drawn.get_xydata())
        assert all(first.bbox.contains(*place) for place in places)
    (single,) = kept[1].axes
    assert single.xaxis.get_offset_text().get_text().startswith("1e")
    assert not any("e" in label.get_text() for label in single.get_xticklabels())


def scored(*ys: float) -> Plot:
    lines = {"svd": Line(x=(0.2, 0.5, 0.8)[: len(ys)], y=ys)}
    return Plot(name="p", title="t", x="x", y="y", panels={"": lines}, logarithmic=max(ys) > 10 * min(ys))


@pytest.mark.parametrize(("ys", "ticks"), [((20.0, 210.0, 30.0), 4), ((2.1, 9.0, 22.0), 3), ((20.0, 1e7), 5)])
def test_a_logarithmic_axis_has_several_numbers(
    ys: tuple[float, ...], ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda canvas, *_, **__: kept.append(canvas))
    draw(scored(*ys), "png")
    (axes,) = kept[0].axes
    low, high = axes.get_ylim()
    assert ticks <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 10


def test_a_model_that_collapsed_is_drawn() -> None:
    assert draw(scored(20.0, 1e304), "svg")
    assert draw(scored(20.0, sys.float_info.max), "png")


def test_seeds_of_which_one_spans_decades_have_a_logarithmic_axis() -> None:
    even, wide = scored(30.0, 150.0, 25.0), scored(30.0, 50_000.0, 25.0)
    assert mean_over_seeds([even, wide]).logarithmic
    assert not mean_over_seeds([even, even]).logarithmic


def test_the_points_of_a_line_over_measured_speed_are_in_the_order_of_keep(results: Results) -> None:
    """So that the seeds' lines have the same candidates at the same places."""

    def faster(candidate: CandidateResults, speed: float) -> CandidateResults:
        times = candidate.benchmark.speedup.model_copy(update={"median": speed})
        return replace(candidate, benchmark=candidate.benchmark.model_copy(update={"speedup": times}))

    for speeds in ({"svd-0.25": 1.2, "svd-0.5": 1.1}, {"svd-0.25": 1.1, "svd-0.5": 1.2}):
        noisy = [faster(each, speeds.get(each.name, 1.0)) for each in results.candidates]
        plots = {plot.name: plot for plot in plots_of(replace(results, candidates=noisy))}
        assert plots["score-over-speed"].panels[""]["svd"].x == tuple(speeds.values())


def test_seeds_are_averaged_point_by_point_as_far_as_all_have_them() -> None:
    def plot(scale: float, steps: int) -> Plot:
        line = Line(x=tuple(map(float, range(steps))), y=tuple(scale * step for step in range(steps)))
        lines = {"a": line} | ({"only here": line} if steps == 3 else {})
        return Plot(name="p", title="t", x="x", y="y", panels={"": lines}, levels={"": {ORIGINAL: scale}})

    mean = mean_over_seeds([plot(1.0, 3), plot(3.0, 2)])
    assert list(mean.panels[""]) == ["a"]
    spread = math.sqrt(2.0)  # of 1 and 3
    assert mean.panels[""]["a"].y == (0.0, 2.0)
    assert mean.panels[""]["a"].low == pytest.approx((0.0, 2 - spread))
    assert mean.levels == {"": {ORIGINAL: 2.0}}
    assert mean_over_seeds([plot(1.0, 3)]) == plot(1.0, 3)


def test_spectra_of_hand_solved_weights() -> None:
    weights = Weights(
        "0.5",
        {
            ORIGINAL: {"h.0.query": torch.diag(torch.tensor([4.0, 3.0, 0.0]))},
            "lpaf": {"h.0.query": torch.diag(torch.tensor([0.0, 3.0, 0.0]))},
        },
    )
    values, shares, errors = (
        plot.panels["query"] for plot in spectra("s", weights, ("lpaf",)) if isinstance(plot, Plot)
    )
    assert values[ORIGINAL].y == (4, 3, 0)
    assert shares[ORIGINAL].x == pytest.approx((0, 100 / 3, 200 / 3, 100))
    assert shares[ORIGINAL].y == pytest.approx((0, 400 / 7, 100, 100))
    assert errors[ORIGINAL].y == (5, 3, 0, 0)
    assert errors["lpaf"].y == (3, 0, 0, 0)
    shown = of_weights.pattern("s", weights)
    assert shown.panels["lpaf"].tolist() == [[False] * 3, [False, True, False], [False] * 3]


@pytest.mark.parametrize("kind", get_args(Format))
def test_a_pattern_is_black_where_weights_are_left(kind: Format) -> None:
    file = draw(Pattern("p", "t", {"lpaf": np.eye(2, dtype=bool)}), kind)
    if kind == "svg":
        ElementTree.fromstring(file)
        return
    picture = imread(io.BytesIO(file))[..., 0]
    height, width = picture.shape
    middle_part = picture[height // 3 : 2 * height // 3, width // 3 : 2 * width // 3]
    assert (middle_part < 0.05).mean() > 0.2
    assert (middle_part > 0.95).mean() > 0.2


def test_the_middle_layer_has_one_target_of_each_kind() -> None:
    names = [f"m.layers.{layer}.{kind}" for layer in range(3) for kind in ("q", "mlp.experts.0.up", "mlp.experts.1.up")]
    targets = [Target(name=name, out_features=2, in_features=2, input_of=name) for name in [*names, "head"]]
    assert middle(targets) == ["m.layers.1.q", "m.layers.1.mlp.experts.0.up"]
    assert middle(targets[-1:]) == ["head"]
    assert kind_in_layer("m.layers.1.mlp.experts.12.up") == ("m.layers", "1", "mlp.experts.*.up")


def test_scores_of_neurons_are_the_first_sensitivities() -> None:
    """With factors of zero the residual is the weight, so that its scores are the mean of |W ⊙ ∂L/∂W| over a row."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=6)
    ).eval()
    batches = [{"input_ids": torch.randint(9, (rows, 3)), "labels": torch.randint(2, (rows,))} for rows in (2, 3)]

    def loss(run: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return run(**batch).loss * len(batch["labels"])  # type: ignore[no-any-return]

    name = "bert.encoder.layer.0.intermediate.dense"
    weight = model.get_submodule(name).weight
    sum(loss(model, batch) for batch in batches).backward()  # type: ignore[union-attr]
    expected = (weight * weight.grad / 5).abs().mean(1)
    factorize_target(model, name, torch.zeros(6, 1), torch.zeros(1, 4), residual=weight.detach().clone())
    scores = of_weights.neuron_scores(model, [name, "another"], batches, loss)  # type: ignore[arg-type]
    torch.testing.assert_close(scores, {name: expected.detach()})
    shown = of_weights.score_histogram("s", "0.5", {"itp": scores}, ("itp",)).panels["dense"]["itp"]
    assert sum(shown.y[:-1]) == 6
    assert shown.x[-1] == pytest.approx(float(expected.detach().max()))


def test_the_page_leads_to_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tasks.scoring.bootstrap.RESAMPLES", 100)
    make_study(["svd"], [0.5], bert_like(1))
    study = json.loads(Path("params.yaml").read_text())["study"]
    edit("params.yaml", study={**study, "figures": {"results": None}})
    text = page(load_results(), {})
    assert 'href="figures/results/"' in text
    assert "figures/weights" not in text


def test_the_stage_is_of_no_candidate() -> None:
    assert candidate_of("figures@results") == ""
    assert str(file_of("figures@results")) == "reports/inputs/figures/results.json"
