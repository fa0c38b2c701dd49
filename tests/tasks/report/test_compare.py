"""The compare stage on made-up results: numbers against hand-computed ones, and the laws of its page."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markupsafe import escape
from matplotlib.figure import Figure
from ruamel.yaml import YAML

from eckart.model.targets import Target
from tasks import compare
from tasks.artifacts.errors import StageError
from tasks.artifacts.metrics import MetricName
from tasks.artifacts.paths import COMPARISON_PAGE, COMPARISON_PICTURE, COMPARISON_TABLE, COMPARISON_TEXT
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class
from tasks.report import conclusion, frontier, heatmap, numbers, shipping, target_names
from tasks.report.card import card
from tasks.report.choose_candidate import Chosen
from tasks.report.predictions import predictions_read, predictions_svg
from tasks.report.result_files import load_results
from tasks.report.results import CONTROL, DENSE, Results
from tasks.report.runtimes import TITLES, runtime_rows
from tasks.report.table import RESAMPLES, row, to_csv
from tasks.report.tradeoff import tradeoff_svg
from tasks.report.training_plots import measures_svgs
from tests.flows import forked
from tests.workspace import repository_params

HOSTILE = "<script>alert(1)</script> & $x_1$"
KINDS = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")


def write(path: str, content: Any) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content if isinstance(content, str) else json.dumps(content))


def edit(path: str, **changes: Any) -> None:
    """Change keys of a file of JSON."""
    write(path, {**json.loads(Path(path).read_text()), **changes})


def target(name: str) -> dict[str, Any]:
    """100 parameters; each rank costs 20."""
    return {"name": name, "out_features": 10, "in_features": 10, "input_of": name}


def score(metric: float, loss: float = 0.5, examples: int = 400) -> dict[str, Any]:
    return {"metric": metric, "loss": loss, "examples": examples, "metrics": {"accuracy": metric}}


def size(parameters: int) -> dict[str, int]:
    return {"model_parameters": parameters, "macs_per_token": 3 * parameters, "bytes": 4 * parameters}


def curve(points: int, first: int = 1, **measures: float) -> str:
    """Task loss 1 ÷ step where anything is measured; the loss of the method is 100 more then."""
    lines = []
    for step in range(first, first + points):
        point = {"step": step, "loss": 1 / step, "learning_rate": 0.1, "grad_norm": 1.0}
        lines.append({**point, "loss": 100 + 1 / step, "task_loss": 1 / step, **measures} if measures else point)
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_study(
    recipes: list[str],
    keeps: list[float],
    target_names: list[str],
    metric: MetricName = "accuracy",
    dense: float = 0.8,
    kind: TaskName | None = None,
) -> None:
    """A workspace whose candidates score as `metric_of` says; the kind is by default the first with the metric."""
    kind = kind or next(name for name in ("classification", *TASK_NAMES) if metric in task_class(name).metrics)
    params = repository_params()
    part = {
        "weighting": {"kind": "none"},
        "ranks": {"kind": "uniform", "by": "share"},
        "recovery": {"kind": "finetune", "steps": 60},
    }
    params["study"] = {"name": "made-up", "recipes": recipes, "keeps": keeps, "goals": [], "control": recipes[0]}
    params["recipes"] = dict.fromkeys(recipes, part)
    params["export"] = {"recipes": []}
    write("params.yaml", params)  # JSON is YAML
    labels = ["no", "yes"] if kind in ("classification", "token_classification") else []
    task = {
        "kind": kind,
        "labels": labels,
        "metric": metric,
        "max_length": 8,
        "target_length": None,
        "prefix": None,
        "stride": None,
    }
    write("data/splits/task.json", {**task, "sizes": {}, "seed": 0})
    parameters = {"targets": 1000, "linear": {"is a head": 20}, "experts": 0, "embeddings": 300, "rest": 40}
    found = {"targets": [target(name) for name in target_names], "excluded": {}, "census": parameters}
    write("data/importance/targets.json", found)
    write_dense(dense, dense)
    write("reports/teacher.jsonl", curve(20))
    write("reports/control.jsonl", curve(10))
    for position, recipe in enumerate(recipes):
        for keep in keeps:
            make_candidate(recipe, keep, target_names, metric_of(position, keep))


def write_dense(dense: float, control: float, **changes: Any) -> None:
    task = json.loads(Path("data/splits/task.json").read_text())
    trivial = 1000.0 if task["kind"] == "language_modeling" else 0.5
    scores = {"validation": score(dense), "zero_shot": {}, "continuations": []}
    report = {
        "score": score(dense),
        **scores,
        "size": size(1000),
        "license": {},
        "trivial": trivial,
        "control": {"score": score(control), **scores},
    }
    write("reports/dense.json", {**report, **changes})
    write_predictions("dense", dense=dense, control=control, trivial=changes.get("trivial", trivial))


def write_predictions(name: str, **models: float | None) -> None:
    """Write the results of 400 examples for models with exactly these metrics, but for correlations.

    Test rows, and of models that could be shipped validation rows, which say the same.
    """
    task = json.loads(Path("data/splits/task.json").read_text())
    Path("reports/predictions").mkdir(parents=True, exist_ok=True)
    frames = [
        rows_of(task, metric).assign(model=model, split=split)
        for split, unscored in (("test", ()), ("validation", ("factorized", "trivial")))
        for model, metric in models.items()
        if metric is not None and model not in unscored
    ]
    pd.concat(frames).to_parquet(f"reports/predictions/{name}.parquet", index=False)


def rows_of(task: dict[str, Any], metric: float) -> pd.DataFrame:
    number = np.arange(400)
    if task["kind"] == "language_modeling":
        return pd.DataFrame({"loss": math.log(metric) + 0.1 * (-1.0) ** number})
    if task["kind"] == "regression":
        return pd.DataFrame({"label": number, "value": number * (number % 10 != 0)})
    if task["kind"] in ("classification", "token_classification"):
        right = (number * 0.618 + 7.3 * metric) % 1 < metric  # spread out, and other rows for each metric
        return pd.DataFrame({"label": number % 2, "guess": np.where(right, number % 2, 1 - number % 2)})
    return pd.DataFrame({name: np.full(400, metric) for name in task_class(task["kind"]).metrics})


def metric_of(recipe: int, keep: float) -> float:
    """Later recipes and larger keeps are better."""
    return round(0.6 + 0.01 * recipe + 0.1 * keep, 6)


def make_candidate(
    recipe: str,
    keep: float,
    target_names: list[str],
    metric: float,
    rows: int = 0,
    searched: str = "",
    average_rank: float | None = None,
    recovered: str | None = None,
    factorized: float | None = None,
    shaped: float | None = None,
    measured: Mapping[str, float] | None = None,
) -> None:
    """The first target stays dense; the others have rank 1 or 2 in turn.

    With `rows` they have so many sparse rows beside, and the factorized model has no score; `searched` and `recovered`
    are curves; `factorized` is the metric before recovery, by default 0.1 lower; `shaped` that of the dense weights
    before they were factorized; `measured` what targets lose alone, where 0.1, 0.2, … were predicted.
    """
    name = f"{recipe}-{keep}"
    ranks = {each: None if not position else 1 + position % 2 for position, each in enumerate(target_names)}
    factors = {each: 100 if rank is None else 20 * rank for each, rank in ranks.items()}
    sizes = {}
    for each, rank in ranks.items():
        sparse = 0 if rank is None else rows
        sizes[each] = {"rank": rank, "rows": sparse, "parameters": factors[each] + 10 * sparse}
        sizes[each]["loss_alone"] = (measured or {}).get(each)
    decision = {
        "keep": keep,
        "ranks": ranks,
        "predicted_loss": {each: 0.1 * (place + 1) for place, each in enumerate(ranks)},
        "parameters_before": 100 * len(target_names),
        "parameters_after": sum(factors.values()),
        "steps": len(searched.splitlines()),
        "average_rank": average_rank,
        "as_shaped": shaped is not None,
    }
    write(f"models/ranks/{name}/ranks.json", decision)
    write(f"reports/search/{name}.jsonl", searched)
    before = None if rows else metric - 0.1 if factorized is None else factorized
    scores = {
        "shaped": None if shaped is None else score(shaped),
        "factorized": None if before is None else score(before),
        "recovered": score(metric),
        "validation": score(metric),
    }
    write_predictions(name, factorized=before, recovered=metric)
    write(
        f"reports/evaluate/{name}.json",
        {
            **scores,
            "size": size(700),
            "zero_shot": {},
            "continuations": [],
            "targets": sizes,
            "target_parameters": sum(each["parameters"] for each in sizes.values()),
        },
    )
    make_benchmark(name, dense={"torch": 1.0}, candidate={"torch": 1.5})
    write(f"reports/finetune/{name}.jsonl", curve(10) if recovered is None else recovered)


def make_benchmark(name: str, **speeds: dict[str, float]) -> None:
    """Model → what runs it → how many times as fast it is as the dense model in torch."""
    latency = {
        model: {
            runtime: {
                f"{rows}x16": {
                    "seconds": 0.1 * rows / speed,
                    "of_torch": {"median": speed, "low": speed - 0.25, "high": speed + 0.25},
                    "of_same": dict.fromkeys(("median", "low", "high"), speed / speeds["dense"][runtime]),
                }
                for rows in (8, 1)
            }
            for runtime, speed in runtimes.items()
        }
        for model, runtimes in speeds.items()
    }
    speedup = latency["candidate"]["torch"]["8x16"]["of_torch"]
    file = Path("reports/benchmark.json")
    others = json.loads(file.read_text()) if file.exists() else {}
    write(str(file), {**others, name: {"timed": name, "speedup": speedup, "latency": latency}})


def make_perplexities(dense: float, **candidates: tuple[float, float]) -> None:
    """A language model at keep 0.5: recipe = its perplexity before recovery and after."""
    make_study(list(candidates), [0.5], ["map"], "perplexity", dense)
    for recipe, (factorized, recovered) in candidates.items():
        make_candidate(recipe, 0.5, ["map"], recovered, factorized=factorized)


def bert_like(layers: int) -> list[str]:
    return [f"bert.layer.{layer}.{kind}" for layer in range(layers) for kind in KINDS]


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test here writes: none does so into the repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tasks.scoring.bootstrap.RESAMPLES", 200)  # ten times as fast
    return tmp_path


def page() -> str:
    """As it reads without its script, links and cards."""
    text = re.sub(r"<script.*?</script>|<details.*?</details>", "", whole_page(), flags=re.DOTALL)
    return re.sub(r' data-[a-z]+="[^"]*"|</?(?:a|span)(?: href="[^"]*")?>', "", text)


def whole_page() -> str:
    return plain(Path("reports/comparison.html").read_text())


def plain(text: str) -> str:
    """With every space an ordinary one, and every minus sign a hyphen."""
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")


def columns_of(text: str) -> set[int]:
    """Return the numbers of cells in the rows of the page's first table."""
    table = re.search(r"<table.*?</table>", text, re.DOTALL)
    assert table
    return {len(re.findall(r"<t[hd][ >]", row)) for row in re.findall(r"<tr.*?</tr>", table[0], re.DOTALL)}


def titles(plot: str) -> list[str]:
    """The words of a plot, of one or several panels, that are no numbers and no axis' name."""
    root = ElementTree.fromstring(f"<div>{plot}</div>")
    words = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    return [word for word in words if word != "step" and not re.fullmatch(r"[-−e\d.]+|[\d.]+.[kMGT]", word)]


def text_lines() -> dict[str, str]:
    """Return the lines of the table for a terminal, by their first word."""
    return {line.split()[0]: line for line in plain(COMPARISON_TEXT.read_text()).splitlines() if line.split()}


def numbers_of_files() -> list[str]:
    """The lines of the CSV without the control's metric and the intervals."""
    return [line.rsplit(",", 5)[0] for line in to_csv(load_results()).splitlines()]


def test_csv_has_the_numbers_of_the_files(workspace: Path) -> None:
    make_study(["svd", "kfac"], [0.5, 0.25], bert_like(1))
    # One dense target of 100 and ranks 2, 1, 2 of 20 each: 200. Metrics: 0.6 + 0.01 recipe + 0.1 keep.
    assert numbers_of_files() == [
        "recipe,keep,metric,dense,factorized,recovered,"
        "target_parameters,model_parameters,macs_per_token,bytes,speedup,speedup_low,speedup_high,search_steps,average_rank,shaped",
        "dense + recovery,1,accuracy,0.8,,0.8,400,1000,3000,4000,1.0,1.0,1.0,0,,",
        "svd,0.5,accuracy,0.8,0.55,0.65,200,700,2100,2800,1.5,1.25,1.75,0,,",
        "svd,0.25,accuracy,0.8,0.525,0.625,200,700,2100,2800,1.5,1.25,1.75,0,,",
        "kfac,0.5,accuracy,0.8,0.56,0.66,200,700,2100,2800,1.5,1.25,1.75,0,,",
        "kfac,0.25,accuracy,0.8,0.535,0.635,200,700,2100,2800,1.5,1.25,1.75,0,,",
    ]
    # Three rows of 10 beside each of the three factorized targets: 90 more than the factors' 200.
    make_candidate("svd", 0.5, bert_like(1), 0.7, rows=3)
    make_candidate("kfac", 0.5, bert_like(1), 0.7, searched=curve(6, R=1.0))
    assert numbers_of_files()[2] == "svd,0.5,accuracy,0.8,,0.7,290,700,2100,2800,1.5,1.25,1.75,0,,"
    assert numbers_of_files()[4] == "kfac,0.5,accuracy,0.8,0.6,0.7,200,700,2100,2800,1.5,1.25,1.75,6,,"
    make_candidate("kfac", 0.5, bert_like(1), 0.7, average_rank=6.0, shaped=0.75)
    assert numbers_of_files()[4].endswith(",0,6.0,0.75")


def test_the_table_for_a_terminal_marks_the_best(workspace: Path) -> None:
    make_study(["svd", "kfac"], [0.5], bert_like(1))
    compare.compare()
    lines = text_lines()
    assert "0.660 *" in lines["kfac-0.5"]
    assert "0.650 ≈" in lines["svd-0.5"]
    assert " -0.140 " in lines["kfac-0.5"]  # 0.66 - 0.8
    assert "1.50 ×" in lines["kfac-0.5"]
    assert re.search(r"^ *trivial baseline .* 0\.500 ", COMPARISON_TEXT.read_text(), re.MULTILINE)
    assert '<th scope="row">trivial baseline</th>' in page()
    assert len(columns_of(page())) == 1
    for text in (COMPARISON_TEXT.read_text(), page()):
        assert not re.search("before factorization|shaped", text)


def test_tables_have_columns_for_what_comes_before_the_factorization_if_anything_does(workspace: Path) -> None:
    """The score after shaping separates the cost of pruning from that of the factorization."""
    make_study(["svd", "ars"], [0.5], bert_like(1))
    make_candidate("ars", 0.5, bert_like(1), 0.7, searched=curve(1200, R=1.0), average_rank=6.0, shaped=0.75)
    compare.compare()
    for name, after, before in (("ars-0.5", "0.700 *", "0.600"), ("svd-0.5", "0.650 ", "0.550")):
        assert re.match(rf" *{name} +{re.escape(after)}.* {before}$", text_lines()[name].rstrip())
    assert '<th scope="col">steps before factorization</th><th scope="col">shaped</th>' in page()
    assert '<th scope="row">ars-0.5</th><td>1,200</td><td>0.750<' in page()
    assert columns_of(page()) == {12}
    assert "rank 6.0 of 10.0" in page()  # all targets are 10 × 10


def test_a_candidate_that_is_no_smaller_before_recovery_has_a_dash_there(workspace: Path) -> None:
    make_study(["svd", "losparse"], [0.5, 0.25], bert_like(1))
    for keep in (0.5, 0.25):
        make_candidate("losparse", keep, bert_like(1), 0.5, rows=3)
    compare.compare()
    lines = text_lines()
    assert lines["losparse-0.5"].split()[1] == "0.500"
    assert lines["losparse-0.5"].split()[-1] == "–"
    assert "72.5 %" in lines["losparse-0.5"]  # 290 of 400, after recovery
    assert '<th scope="row">losparse-0.5</th><td>–</td><td>0.500</td>' in page()
    assert "A dash marks a model that sparse rows" in page()
    assert columns_of(page()) == {10}


def test_page_shows_every_candidate_and_needs_nothing_else(workspace: Path) -> None:
    make_study(["svd", "kfac"], [0.5, 0.25], bert_like(2))
    compare.compare()
    assert {"svd-0.5", "svd-0.25", "kfac-0.5", "kfac-0.25"} <= set(re.findall(">([^<]*)</th>", page()))
    assert page().count('class="best"') == 1  # the one that promote takes
    assert not re.findall(r"<link|<img|@import|url\((?!#)|(?:src|href)=\"(?!#)", whole_page())
    ids = re.findall(r'\bid="([^"]+)"', whole_page())
    assert len(ids) == len(set(ids))
    assert not re.search("Zero-shot|Generated text|onnxruntime|int8", page())
    assert "What it writes" not in (compare.CARDS / "svd-0.5.md").read_text()
    assert "onnxruntime" not in COMPARISON_TEXT.read_text()
    assert len(Path("reports/runtimes.csv").read_text().splitlines()) == 1


def test_names_from_outside_are_escaped(workspace: Path) -> None:
    make_study(["svd"], [0.5], [HOSTILE, "other"])
    compare.compare()
    assert HOSTILE.partition(" ")[0] not in whole_page()
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; $x_1$: stays dense" in page()
    for plot in re.findall(r"<svg.*?</svg>", page(), re.DOTALL):
        ElementTree.fromstring(plot)


def compare_in(root: str) -> None:
    os.chdir(root)
    compare.compare()


def test_two_runs_give_the_same_bytes(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_study()
    monkeypatch.setattr("tasks.scoring.bootstrap.RESAMPLES", RESAMPLES)  # as in the other process
    files = [COMPARISON_TABLE, COMPARISON_PAGE, COMPARISON_PICTURE]
    compare.compare()
    first = [file.read_bytes() for file in files]
    # A process of its own: hashes of strings and ids of objects differ there.
    other = forked.start(compare_in, str(workspace))
    other.join()
    assert other.exitcode == 0
    assert [file.read_bytes() for file in files] == first


def test_a_missing_or_malformed_file_is_named_with_its_remedy(workspace: Path) -> None:
    make_study(["svd"], [0.5], ["map"])
    of_candidate = "--recipe svd --keep 0.5"
    for file, command in {
        "reports/search/svd-0.5.jsonl": f"search {of_candidate}",
        "data/splits/task.json": "extract",
        "data/importance/targets.json": "importance",
        "reports/dense.json": "dense",
        "reports/predictions/dense.parquet": "dense",
        "reports/predictions/svd-0.5.parquet": f"evaluate {of_candidate}",
        "reports/control.jsonl": "control",
        "reports/teacher.jsonl": "teacher",
        "models/ranks/svd-0.5/ranks.json": f"search {of_candidate}",
        "reports/finetune/svd-0.5.jsonl": f"finetune {of_candidate}",
        "reports/evaluate/svd-0.5.json": f"evaluate {of_candidate}",
        "reports/benchmark.json": "benchmark",
    }.items():
        path, remedy = Path(file), f"{re.escape(file)} .*`python -m tasks.{command}`"
        content = path.read_bytes()
        path.write_text("{}\n")
        with pytest.raises(StageError, match=remedy):
            load_results()
        path.unlink()
        with pytest.raises(StageError, match=remedy):
            compare.compare()
        path.write_bytes(content)
    assert not COMPARISON_PAGE.exists()


def test_files_of_different_runs_do_not_mix(workspace: Path) -> None:
    make_study(["svd"], [0.5], ["map"])
    make_candidate("svd", 0.5, ["other"], 0.6)
    with pytest.raises(StageError, match=r"models/ranks/svd-0\.5.* tasks\.search "):
        load_results()
    make_candidate("svd", 0.5, ["map"], 0.6)
    other = {"rank": 1, "rows": 0, "parameters": 20, "loss_alone": None}
    edit("reports/evaluate/svd-0.5.json", targets={"other": other})
    with pytest.raises(StageError, match=r"evaluate/svd-0\.5\.json .*targets\.json.* tasks\.evaluate "):
        load_results()
    make_candidate("svd", 0.5, ["map"], 0.6, rows=3)
    load_results()
    write_dense(0.8, 0.8, score=score(0.8, examples=399))
    with pytest.raises(StageError, match=r"evaluate/svd-0\.5\.json .*reports/dense\.json"):
        load_results()


@pytest.mark.parametrize(
    ("recipes", "keeps", "target_names", "metric", "dense"),
    [
        (1, [1], ["map"], "matthews", 0.0),  # nothing to divide by
        (11, [0.5], bert_like(4)[:13], "pearson", 0.9),
        (2, [0.5], bert_like(25), "f1", 0.9),
    ],
    ids=["one", "many candidates", "many targets"],
)
def test_any_study_fits(
    workspace: Path, recipes: int, keeps: list[float], target_names: list[str], metric: str, dense: float
) -> None:
    make_study([f"recipe{number}" for number in range(recipes)], keeps, target_names, metric, dense)
    compare.compare()
    assert page().count("<td title=") == len(keeps) * len(target_names)  # all recipes have the same ranks
    columns = heatmap.columns(load_results())
    assert columns.cell * len(target_names) <= 960
    assert sum(count for _, count in columns.layers) == len(target_names)


def test_heat_map_has_shares_of_the_recovered_model_by_hand(workspace: Path) -> None:
    make_study(["losparse"], [0.5], ["h.0.query", "h.0.value", "h.1.query"])
    make_candidate("losparse", 0.5, ["h.0.query", "h.0.value", "h.1.query"], 0.6, rows=9)
    path = "reports/evaluate/losparse-0.5.json"
    pruned = {"h.1.query": {"rank": 0, "rows": 1, "parameters": 10, "loss_alone": None}}
    edit(path, targets=json.loads(Path(path).read_text())["targets"] | pruned)
    cells = heatmap.heat_maps(load_results())["0.5"]["losparse"]
    assert [(cell.text, cell.share) for cell in cells] == [("D", 1.0), ("2", 1.3), ("0", 0.1)]  # 40 + 90, 0 + 10
    assert [plain(cell.title).partition(": ")[2] for cell in cells] == [
        "stays dense",
        "rank 2 and 9 sparse rows, 130.0 % of its parameters",
        "rank 0 and 1 sparse row, 10.0 % of its parameters",
    ]
    columns = heatmap.columns(load_results())
    assert columns.layers == (("0", 2), ("1", 1))
    assert columns.kinds == ("query", "value", "query")


def test_heat_map_marks_layers_that_lose_neurons(workspace: Path) -> None:
    names = ["h.0.query", "h.0.up", "h.0.down"]
    make_study(["kfac"], [0.5], names)
    width = {"up": ["h.0.up"], "kept": [0, 1, 2, 3, 4, 5], "loss": 0.2}
    edit("models/ranks/kfac-0.5/ranks.json", ranks=dict.fromkeys(names), widths={"h.0.down": width})
    sizes = {name: {"rank": None, "rows": 0, "parameters": 60, "loss_alone": None} for name in names[1:]}
    path = "reports/evaluate/kfac-0.5.json"
    edit(path, targets=json.loads(Path(path).read_text())["targets"] | sizes)
    compare.compare()
    cells = heatmap.heat_maps(load_results())["0.5"]["kfac"]
    assert [(cell.text, cell.share) for cell in cells] == [("D", 1.0), ("N", 0.6), ("N", 0.6)]
    assert ", N one that" in page()


def trained_study() -> None:
    """One recipe with two measures at both keeps, one that shapes and then searches at one keep, one by formula."""
    make_study(["svd", "ars", "both"], [0.5, 0.25], bert_like(1))
    for keep in (0.5, 0.25):
        make_candidate("ars", keep, bert_like(1), 0.7, searched=curve(5, R=1.0, R_align=1e-6))
    searched = curve(5, remaining=0.5) + curve(5, first=6, kept=0.4)
    make_candidate("both", 0.5, bert_like(1), 0.7, searched=searched, average_rank=6.54, recovered=curve(3, rows=0.3))


def test_predicted_and_measured_loss_stand_beside_each_other(workspace: Path) -> None:
    """In a panel for each recipe that has both; a target that loses nothing has no place on the scales."""
    targets = bert_like(1)
    make_study(["svd", "kfac"], [0.5], targets)
    assert predictions_svg(load_results()) is None
    rising, falling = (
        dict(zip(targets, losses, strict=True)) for losses in ([0.0, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1])
    )
    make_candidate("svd", 0.5, targets, 0.7, measured=rising)
    make_candidate("kfac", 0.5, targets, 0.7, measured=falling)
    found = load_results()
    assert {"svd", "kfac"} <= set(titles(predictions_svg(found) or ""))
    assert "svd 1.00, kfac -1.00" in " ".join(predictions_read(found))
    params = json.loads(Path("params.yaml").read_text())
    params["recipes"]["kfac"] = params["recipes"]["kfac"] | {"weighting": {"kind": "kfac"}}
    write("params.yaml", params)  # now in nats: 0.4 for 0.1, 0.3 for 0.2, 0.2 for 0.3, 0.1 for 0.4
    first, second = predictions_read(load_results())
    assert first.startswith(
        "kfac: the measured loss is 1.1 times the predicted one at the median, and larger at 2 of 4"
    )
    assert "svd 1.00." in second
    compare.compare()
    assert first in page()


def test_one_predicted_loss_has_axes_and_a_sentence_of_numbers(workspace: Path) -> None:
    make_study(["kfac"], [0.5], ["map"])
    make_candidate("kfac", 0.5, ["map"], 0.7, measured={"map": 0.1})
    params = json.loads(Path("params.yaml").read_text())
    params["recipes"]["kfac"] = params["recipes"]["kfac"] | {"weighting": {"kind": "kfac"}}
    write("params.yaml", params)
    found = load_results()
    predicted = next(iter(found.named("kfac-0.5").decision.predicted_loss.values()))  # type: ignore[union-attr]
    assert predictions_svg(found)
    (sentence,) = predictions_read(found)
    assert f"is {0.1 / predicted:.1f} times" in sentence
    assert "nan" not in sentence


def test_searches_that_trained_have_a_panel_for_each_measure(workspace: Path) -> None:
    trained_study()
    svd, both = (load_results().named(name) for name in ("svd-0.5", "both-0.5"))
    assert [point.compared_loss for point in both.curve] == [1, 1 / 2, 1 / 3]  # without what the method adds
    assert [point.measures for point in both.curve] == [{"rows": 0.3}] * 3
    assert (svd.curve[1].compared_loss, svd.curve[1].measures) == (1 / 2, {})
    made = measures_svgs(load_results(), "search_curve")
    assert list(made) == ["ars", "both"]
    assert titles(made["ars"]) == ["task loss", "R", "R_align"]
    assert titles(made["both"]) == ["task loss", "remaining", "kept"]
    assert re.findall(r"keep [\d.]+", made["ars"]) == ["keep 0.5", "keep 0.25"]
    assert re.findall(r"keep [\d.]+", made["both"]) == ["keep 0.5"]
    assert titles(measures_svgs(load_results(), "curve")["both"]) == ["rows"]
    compare.compare()
    assert re.findall("<dt>(R|R_align|kept|threshold|remaining|p|rows)</dt>", page()) == [
        "R",
        "R_align",
        "remaining",
        "kept",
        "rows",
    ]
    assert page().count("<figure") == 9  # by size, time and keep, 2 maps, 2 searches, training, 1 recovery
    for plot in re.findall(r"<svg.*?</svg>", page(), re.DOTALL):
        ElementTree.fromstring(plot)
    ids = re.findall(r'\bid="([^"]+)"', page())
    assert len(ids) == len(set(ids))


def test_measures_of_any_number_and_size_fit(workspace: Path) -> None:
    make_study(["ars"], [1, 0.5], ["map"])
    measures = {f"measure_{number}": 10.0**number for number in (-9, -4, 0, 2, 4, 9)}  # with the others, two full rows
    make_candidate("ars", 1, ["map"], 0.7, searched=curve(1, **measures))
    make_candidate("ars", 0.5, ["map"], 0.7, searched=curve(20, **{HOSTILE: -0.5}))
    shown = titles(measures_svgs(load_results(), "search_curve")["ars"])
    assert shown == ["task loss", *measures, HOSTILE]


def limited(**promotion: Any) -> Results:
    """The results where a promotion has these limits and no others."""
    own = json.loads(Path("params.yaml").read_text())["promotion"]
    edit("params.yaml", promotion=own | {"keep": None, "least_speedup": None, "standard_errors": 0.0} | promotion)
    return load_results()


def make_five() -> None:
    """Four candidates and a shape for each: at keep 0.3 of 200 parameters, at 0.5 of 300."""
    make_study(["svd", "kfac"], [0.3, 0.5], bert_like(1))
    for recipe, keep, metric in (("svd", 0.3, 0.6), ("kfac", 0.3, 0.795), ("svd", 0.5, 0.8), ("kfac", 0.5, 0.81)):
        make_candidate(recipe, keep, bert_like(1), metric, rows=0 if keep == 0.3 else 3)


def test_the_table_and_the_page_name_the_candidate_that_promote_takes(workspace: Path) -> None:
    make_five()
    assert limited(largest_drop=0.01).choice.chosen == "kfac-0.5"
    edit("reports/evaluate/svd-0.5.json", validation=score(0.9))
    assert limited(largest_drop=0.01).choice.chosen == "svd-0.5"
    assert "On test examples, kfac-0.5 scores better, 0.810" in " ".join(conclusion.conclusion(load_results()))
    found = limited(largest_drop=0.01, keep=0.6)  # 290 of 400 are too many
    assert found.choice.chosen == "kfac-0.3"
    compare.compare()
    assert json.loads(compare.CHOICE.read_text())["candidate"] == "kfac-0.3"
    lines = csv.DictReader(COMPARISON_TABLE.read_text().splitlines())
    line = next(line for line in lines if (line["recipe"], line["keep"]) == ("kfac", "0.3"))
    metrics = json.loads(compare.METRICS.read_text())
    assert metrics.pop("candidate") == "kfac-0.3"
    assert {name: str(value) for name, value in metrics.items()} == {name: line[name] for name in metrics}
    for text in (COMPARISON_TEXT.read_text(), re.sub("</?code>", "`", page())):
        for sentence in conclusion.conclusion(found):
            assert plain(str(escape(sentence)) if text.startswith("<") else sentence) in plain(text)


def test_the_smallest_non_inferior_candidate_is_offered_beside_the_choice(workspace: Path) -> None:
    """With a margin of 0.1 the smaller kfac is non-inferior, with one of 0.01 what is the dense model to the row."""
    make_five()
    other = conclusion.alternative(limited(largest_drop=0.1))
    assert other is not None
    assert other.name == "kfac-0.3"
    assert "`eckart promote kfac-0.3`" in " ".join(conclusion.conclusion(load_results()))
    other = conclusion.alternative(limited(largest_drop=0.01))
    assert other is not None
    assert other.name == "svd-0.5"
    found = limited(largest_drop=0.004, keep=0.6)  # which is too large for a promotion
    assert conclusion.alternative(found) is None
    assert conclusion.chosen(found) == Chosen(
        study=found.name, goals=(), candidate=None, non_inferior=False, alternative=None
    )


def test_without_a_candidate_within_the_limits_the_nearest_is_named(workspace: Path) -> None:
    make_perplexities(10.0, svd=(90.0, 30.0), kfac=(40.0, 15.0))
    found = limited(largest_drop=1.0)
    assert (found.choice.chosen, found.choice.nearest) == (None, "kfac-0.5")
    assert "drop from the original by 2 candidates" in " ".join(conclusion.conclusion(found))


def test_setbacks_of_recovery_are_named(workspace: Path) -> None:
    make_study(["svd", "kfac"], [0.5], ["map"])
    make_candidate("kfac", 0.5, ["map"], 0.7, factorized=0.9)
    assert "significantly worsened the accuracy of kfac-0.5." in " ".join(conclusion.conclusion(load_results()))


def test_an_original_model_near_the_baseline_gives_a_warning(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_study(["svd"], [0.5], ["map"])
    assert conclusion.dense_warning(load_results()) is None
    write_dense(0.671, 0.671, trivial=0.651)
    compare.compare()
    warned = conclusion.dense_warning(load_results())
    assert warned is not None
    for text in (COMPARISON_TEXT.read_text(), page(), capsys.readouterr().out):
        assert warned in plain(text)
    assert {"teacher.epochs", "data.sizes.train", "teacher.learning_rate"} <= set(re.findall(r"[\w.]+\w", warned))


def test_a_candidate_that_gives_one_answer_is_named(workspace: Path) -> None:
    make_study(["svd", "kfac"], [0.5], ["map"])
    file = Path("reports/predictions/kfac-0.5.parquet")
    rows = pd.read_parquet(file)
    rows.loc[rows.model == "recovered", "guess"] = 1
    rows.to_parquet(file)
    found = limited(largest_drop=1.0)
    assert found.only_answers == {("kfac-0.5", "recovered"): "yes"}
    assert found.choice.chosen == "kfac-0.5"
    compare.compare()
    sentence = "The answer to every test example is yes: kfac-0.5."
    assert sentence in COMPARISON_TEXT.read_text()
    assert sentence in page()
    assert "kfac-0.5 answers yes to every test example." in conclusion.conclusion(found)
    assert "It answers yes" in Path("reports/cards/kfac-0.5.md").read_text()
    assert "It answers yes" not in Path("reports/cards/svd-0.5.md").read_text()


def test_intervals_agree_with_gains_and_rivals(workspace: Path) -> None:
    make_study(["svd", "kfac", "same"], [0.5], ["map"])
    make_candidate("svd", 0.5, ["map"], 0.4)
    make_candidate("kfac", 0.5, ["map"], 0.8)
    make_candidate("same", 0.5, ["map"], 0.8)
    found = load_results()
    svd, kfac, same = found.candidates
    assert found.difference(svd.after, DENSE).high < 0
    assert found.gain(svd.after, kfac.after) == -1
    assert (found.difference(kfac.after, same.after).low, found.difference(kfac.after, same.after).high) == (0, 0)
    marks = {candidate.recipe: row(found, candidate).mark for candidate in found.candidates}
    assert marks == {"svd": "", "kfac": "*", "same": "≈"}
    for line in csv.DictReader(to_csv(found).splitlines()):
        difference = float(line["recovered"]) - float(line["dense"])
        assert float(line["from_dense_low"]) <= difference <= float(line["from_dense_high"])


def test_the_lowest_perplexity_is_the_best(workspace: Path) -> None:
    make_perplexities(20.0, svd=(90.0, 30.0), kfac=(40.0, 25.0), drone=(24.0, 32.0))
    found = load_results()
    kfac, svd, drone = sorted(found.at("0.5"), key=found.best_on_test)
    assert [kfac.recipe, svd.recipe, drone.recipe] == ["kfac", "svd", "drone"]
    assert (found.gain(kfac.after, svd.after), found.gain(svd.after, DENSE)) == (1, -1)
    assert found.difference(svd.after, CONTROL).low > 0
    compare.compare()
    text = plain(COMPARISON_TEXT.read_text())
    assert "perplexity (lower is better)" in text
    lines = text_lines()
    assert "25.00 *" in lines["kfac-0.5"]
    assert " +5.00 " in lines["kfac-0.5"]  # 25 - 20
    assert [name for name, line in lines.items() if "*" in line] == ["kfac-0.5", "*"]  # and what the star means
    assert re.findall('<td class="best">([^<]*)<', page()) == ["25.00"]


@pytest.mark.parametrize(
    ("worst", "axis"),
    [
        (199.0, "(lower is better)"),
        (13_000.0, "(lower is better, scale finest at the original)"),
        (1e304, "(lower is better, scale finest at the original)"),
    ],
)
def test_no_perplexity_squashes_the_others(workspace: Path, worst: float, axis: str) -> None:
    make_perplexities(20.0, svd=(worst, 30.0), kfac=(25.0, 22.0))
    compare.compare()
    assert axis in page()


def test_a_share_has_an_even_axis_however_small(workspace: Path) -> None:
    make_study(["svd"], [0.5], ["map"])
    make_candidate("svd", 0.5, ["map"], 0.5, factorized=0.001)
    assert "accuracy on test examples" in titles(tradeoff_svg(load_results()))


def test_an_axis_that_spans_decades_gives_most_of_its_height_to_what_is_near_dense(workspace: Path) -> None:
    make_perplexities(20.0, svd=(130_000.0, 40.0), kfac=(25.0, 22.0))
    ticks = ticks_of(tradeoff_svg(load_results()))
    assert {20.0, 30.0, 100.0, 1000.0, 10_000.0, 100_000.0} <= set(ticks)
    bottom, top = ticks[20.0], ticks[100_000.0]
    assert (ticks[50.0] - bottom) / (top - bottom) > 0.45
    heights = [ticks[value] for value in sorted(ticks)]
    assert all(after - before > 15 for before, after in itertools.pairwise(heights))  # points; a label has 10


def ticks_of(plot: str) -> dict[float, float]:
    """Return the height in points of each tick of the vertical axis, by its value."""
    found = {}
    for text in ElementTree.fromstring(plot).iter("{http://www.w3.org/2000/svg}text"):
        if "text-anchor: end" in text.get("style", ""):
            found[float((text.text or "").replace(",", ""))] = -float(text.get("y", "nan"))
    return found


def test_targets_have_short_names_and_layers() -> None:
    assert target_names.short({*KINDS}) == {
        "attention.self.query": "query",
        "attention.output.dense": "attention.output",
        "intermediate.dense": "intermediate",
        "output.dense": "output",
    }
    assert target_names.split_name("h.10.mlp.experts.3.w1") == ("h", "10", "mlp.experts.3.w1")
    assert target_names.split_name("0.query") == ("", "0", "query")
    assert target_names.split_name("pooler.dense") == ("", "", "pooler.dense")
    both = [Target(**target(f"{stack}.layers.0.q")) for stack in ("encoder", "decoder")]
    assert [label for label, _ in target_names.layers(both)] == ["encoder.layers 0", "decoder.layers 0"]


@pytest.mark.parametrize("sizes", [(85, 95), (36, 48), (355, 480), (52, 91), (10, 1000), (60, 60)])
def test_the_axis_of_sizes_has_numbers(workspace: Path, sizes: tuple[int, int]) -> None:
    make_study(["svd"], [0.9], ["map"])
    for path, size in zip(("reports/evaluate/svd-0.9.json", "reports/dense.json"), sizes, strict=True):
        own = json.loads(Path(path).read_text())["size"]
        edit(path, size={**own, "bytes": size * 1_000_000})
    for picture in re.findall("<svg.*?</svg>", frontier.frontier_svgs(load_results(), "size"), re.DOTALL):
        ticks = [
            text.text
            for text in ElementTree.fromstring(picture).iter("text")
            if text.get("class") == "tick" and text.get("text-anchor") == "middle"
        ]
        assert len(ticks) > 1
        assert len(ticks) == len(set(ticks))


def test_numbers_of_an_axis_have_the_decimals_that_they_need(workspace: Path) -> None:
    make_perplexities(1.2e6, svd=(1.3e6, 1.3e6), kfac=(1.25e6, 1.21e6))
    picture = str(frontier.frontier_svgs(load_results(), "size"))
    assert "1,250,000" in picture
    assert "1,250,000." not in picture


def test_marks_without_a_free_place_stay_in_the_picture(workspace: Path) -> None:
    names = [f"r{number}" for number in range(30)]
    make_study(names, [0.5], ["map"])
    for name in names:
        make_candidate(name, 0.5, ["map"], 0.65)
    for picture in re.findall("<svg.*?</svg>", frontier.frontier_svgs(load_results(), "size"), re.DOTALL):
        width = float(re.search(r'viewBox="0 0 (\d+)', picture)[1])  # type: ignore[index]
        assert all(0 < float(x) < width for x in re.findall(r'cx="([-\d.]+)"', picture))


@pytest.mark.parametrize(("count", "letters"), [(2, 27), (2, 50), (25, 5)])
def test_a_legend_is_in_its_picture(workspace: Path, count: int, letters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[Figure]()
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: kept.append(figure))
    make_study([f"r{number}".ljust(letters, "x") for number in range(count)], [0.5], ["map"])
    for narrow in (False, True):
        with contextlib.suppress(AttributeError, IndexError, ValueError):  # nothing was written
            tradeoff_svg(load_results(), narrow)
    assert len(kept) == 2
    for figure in kept:
        figure.draw_without_rendering()
        (legend,), (width, height) = figure.legends, figure.bbox.size
        box = legend.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
        assert figure.axes[0].bbox.height > 150
        assert figure.axes[0].bbox.width > 150


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.count(7), "7"),
        (numbers.count(999.6), "1.00 k"),
        (numbers.count(22_713_986), "22.7 M"),
        (numbers.count(999_960), "1.00 M"),
        (numbers.size(90_867_952), "90.9 MB"),
        (numbers.size(12), "12 B"),
        (numbers.times(1.234), "1.23 ×"),
        (numbers.times(1e304), "1.0e304 ×"),
        (numbers.score(-0.5), "-0.500"),
        (numbers.score(9.9996), "10.00"),
        (numbers.score(999.96), "1,000"),
        (numbers.score(99_999.6), "1.0e5"),
        (numbers.score(1.01e304), "1.0e304"),
        # A spread ends with the digit of its mean.
        (numbers.score(0.8416, 0.0182), "0.842 ± 0.018"),
        (numbers.score(1203.6, 20.4), "1,204 ± 20"),
        (numbers.score(131_072.0, 20_000.0), "1.3e5 ± 2.0e4"),
        (numbers.score(1e304, float("inf")), "1.0e304 ± inf"),
    ],
)
def test_numbers_have_the_digits_that_their_size_asks_for(shown: str, expected: str) -> None:
    assert plain(shown) == expected


def test_zero_shot_tasks_stand_in_the_csv_and_on_the_page() -> None:
    make_study(["svd"], [0.5], ["h.0.query", "h.1.query"], metric="perplexity", dense=20.0)
    control = json.loads(Path("reports/dense.json").read_text())["control"]
    dense, own = ({"piqa": {"acc": value}} for value in (0.75, 0.5))
    edit("reports/dense.json", zero_shot=dense, control={**control, "zero_shot": dense})
    edit("reports/evaluate/svd-0.5.json", zero_shot=own)
    compare.compare()
    assert "piqa.acc" in page()
    _, line = csv.DictReader(Path("reports/comparison.csv").read_text().splitlines())
    assert (line["zero_shot.piqa.acc"], line["dense.zero_shot.piqa.acc"]) == ("0.5", "0.75")
    edit("reports/evaluate/svd-0.5.json", zero_shot={})  # of a collapsed model, some metrics are no numbers
    compare.compare()
    assert "piqa.acc" in page()


def test_a_study_that_trained_nothing_has_no_section_on_training() -> None:
    make_study(["svd"], [0.5], ["h.0.query", "h.1.query"])
    compare.compare()
    assert 'id="training"' in page()
    for curves in ("teacher", "control", "finetune/svd-0.5"):
        write(f"reports/{curves}.jsonl", "")
    compare.compare()
    assert not re.search('"#?training"', page())


def test_other_texts_are_columns_with_their_multiple_of_the_original_model_s() -> None:
    make_study(["svd"], [0.5], ["h.0.query", "h.1.query"], metric="perplexity", dense=20.0)
    compare.compare()
    assert "news" not in page()
    control = json.loads(Path("reports/dense.json").read_text())["control"]
    dense, before, own = ({"news": score(value)} for value in (16.0, 48.0, 24.0))
    edit("reports/dense.json", texts=dense, control={**control, "texts": dense})
    edit("reports/evaluate/svd-0.5.json", texts=own, factorized_texts=before)
    compare.compare()
    assert "perplexity on news" in page()
    assert "48.00 (3.00 ×) before fine-tuning" in plain(page())
    assert plain("24.00 (1.50 ×)") in plain(Path("reports/comparison.txt").read_text())
    control_line, line = csv.DictReader(Path("reports/comparison.csv").read_text().splitlines())
    assert [float(line[name]) for name in ("texts.news", "factorized.texts.news", "dense.texts.news")] == [24, 48, 16]
    assert control_line["factorized.texts.news"] == ""


def test_notes_on_calibration_and_thresholds_stand_on_the_page() -> None:
    make_study(["svd"], [0.5], ["map"])
    edit("data/importance/targets.json", warnings=["3 of 4 linear layers read fewer tokens"])
    edit("models/ranks/svd-0.5/ranks.json", reached={"0.75": 312, "0.5": 1000})
    compare.compare()
    assert "Calibration: 3 of 4 linear layers read fewer tokens." in page()
    assert "The thresholds of svd-0.5 met keep 0.75 after 312 steps, keep 0.5 after 1,000 steps." in page()


def test_what_language_models_write_is_shown_as_text_alone() -> None:
    """It may be anything, Markdown and HTML too."""
    make_study(["svd", "kfac"], [0.5], ["map"], metric="perplexity", dense=20.0)
    nasty = "a <b>\n\n```\n# head\r[x](y)\n~~~\n</code></pre>\n---\n| c | {{ d }} " + "long " * 50
    texts = {"dense": f"{nasty}, dense", "svd-0.5": f"{nasty}, svd", "kfac-0.5": f"{nasty}, kfac"}
    for name, text in texts.items():
        path = "reports/dense.json" if name == "dense" else f"reports/evaluate/{name}.json"
        edit(path, continuations=[{"beginning": nasty, "text": text}])
    compare.compare()
    shown = Path("reports/comparison.html").read_bytes().decode()  # line ends as they are
    assert all(str(escape(text)) in shown for text in texts.values())
    assert "<b>" not in page()
    parsed = MarkdownIt("commonmark").parse(ModelCard.load(compare.CARDS / "svd-0.5.md").text)
    code = [token.content.split() for token in parsed if token.type == "code_block"]
    assert code == [text.split() for text in (nasty, texts["dense"], texts["svd-0.5"])]
    assert [token.content for token in parsed if token.type.startswith("html")] == []
    assert [token.tag for token in parsed if token.type == "heading_open"].count("h1") == 1


def make_exports(name: str, onnx: float, int8: float, int8_bytes: int = 1000) -> None:
    write(
        f"reports/onnx/{name}.json",
        {"onnx": {"score": score(onnx), "bytes": 4000}, "int8": {"score": score(int8), "bytes": int8_bytes}},
    )
    write_predictions(f"{name}.onnx", onnx=onnx, int8=int8)
    if name == "dense":  # the same stage exports the control
        make_exports("control", onnx + 0.1, int8 + 0.1)


def test_exported_files_stand_beside_the_dense_model_as_each_runtime_runs_them() -> None:
    make_study(["svd", "kfac"], [0.5], ["map"])
    edit("params.yaml", export={"recipes": ["kfac"]})
    with pytest.raises(StageError, match=r"tasks\.export_dense"):
        load_results()
    make_exports("dense", 0.8, 0.75)
    with pytest.raises(StageError, match=r"tasks\.export --recipe kfac --keep 0\.5"):
        load_results()
    make_exports("kfac-0.5", 0.7, 0.65)
    dense, small = {"torch": 1, "onnx": 2, "int8": 4}, {"torch": 8, "onnx": 16, "int8": 32}
    make_benchmark("kfac-0.5", dense=dense, candidate=small)
    compare.compare()
    lines = list(csv.DictReader(Path("reports/runtimes.csv").read_text().splitlines()))
    assert [(line["model"], line["runtime"], line["metric"], line["bytes"]) for line in lines] == [
        ("dense", "torch", "0.8", "4000"),
        ("dense", "onnx", "0.8", "4000"),
        ("dense", "int8", "0.75", "1000"),
        ("control", "torch", "0.8", "4000"),
        ("control", "onnx", "0.9", "4000"),
        ("control", "int8", "0.85", "1000"),
        ("kfac-0.5", "torch", "0.66", "2800"),
        ("kfac-0.5", "onnx", "0.7", "4000"),
        ("kfac-0.5", "int8", "0.65", "1000"),
    ]
    # The control has the original model's shapes, and its times.
    assert [float(line["8x16.of_torch"]) for line in lines] == [1, 2, 4, 1, 2, 4, 8, 16, 32]
    assert [float(line["1x16.seconds"]) for line in lines] == [0.1 / 2**place for place in (0, 1, 2, 0, 1, 2, 3, 4, 5)]
    assert float(lines[0]["from_dense_low"]) == float(lines[0]["from_dense_high"]) == 0
    assert float(lines[2]["from_dense_low"]) < -0.05 < float(lines[2]["from_dense_high"])
    text = plain(Path("reports/comparison.txt").read_text())
    assert re.search(r"kfac-0\.5 +onnxruntime, int8 +0\.650 .* 32\.00 × \(31\.75 to 32\.25\)", text)
    assert "32.00 ×" in page()
    assert "same runtime 8.00 × (8.00 to 8.00)" in page()
    assert "onnxruntime, int8" in page()


def test_the_file_to_ship_is_the_smallest_that_is_good_enough_by_its_own_metric() -> None:
    """Of the candidate that promote takes; the tiles say what the table says of it."""
    make_study(["svd", "kfac"], [0.5], ["map"])
    edit("params.yaml", export={"recipes": ["kfac"]})
    make_exports("dense", 0.8, 0.75)
    speeds = {"torch": 1, "onnx": 2, "int8": 4}
    make_benchmark("kfac-0.5", dense=speeds, candidate={name: 3 * speed for name, speed in speeds.items()})
    folder = ("torch", "models/finetuned/kfac-0.5", "eckart publish kfac-0.5 USER/NAME")
    onnx = ("onnx", "models/onnx/kfac-0.5/model.onnx", "eckart export kfac-0.5 kfac-0.5.onnx")
    int8 = ("int8", "models/onnx/kfac-0.5/int8.onnx", "eckart export kfac-0.5 kfac-0.5.onnx --int8")
    for of_onnx, of_int8, parameters, wanted in (
        (0.5, 0.5, 950, folder),
        (0.8, 0.5, 950, onnx),  # of 4,000 bytes
        (0.8, 0.5, 475, folder),  # in bfloat16, say
        (0.8, 0.8, 950, int8),
    ):
        edit("reports/evaluate/kfac-0.5.json", size=size(parameters))
        make_exports("kfac-0.5", of_onnx, of_int8)
        found = limited(largest_drop=0.2)
        ship = shipping.to_ship(found)
        assert ship.candidate.name == found.choice.nearest == "kfac-0.5"
        assert (ship.run.runtime, ship.path, ship.command) == wanted
        metric, size_, speed = shipping.tiles(found, ship)
        line = next(
            row
            for row in runtime_rows(found)
            if row.name == "kfac-0.5" and row.cells["runtime"].value == TITLES[ship.run.runtime]
        )
        assert (metric.value, size_.value) == (line.cells["accuracy"].value, line.cells["size"].value)
        assert line.cells["accuracy"].below in metric.lines[0]
        assert speed.value in line.cells["speed, 8 × 16"].below + line.cells["speed, 8 × 16"].value
        compare.compare()
        assert f"<code>{ship.path}</code>" in page()
    assert "slower" not in " ".join(conclusion.conclusion(found))
    latency = json.loads(Path("reports/benchmark.json").read_text())
    latency["kfac-0.5"]["latency"]["candidate"]["int8"]["8x16"]["of_same"] = {"median": 0.92, "low": 0.75, "high": 0.94}
    write("reports/benchmark.json", latency)
    assert "(0.75 to 0.94: slower)" in " ".join(conclusion.conclusion(limited(largest_drop=0.2)))


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12))
def test_a_file_is_on_the_frontier_if_none_is_better_and_as_small(places: list[tuple[int, int]]) -> None:
    best = frontier.best_of(places, lambda place: place[0], lambda place: place[1])
    assert best == sorted(best)
    for cost, good in places:
        beaten = any(other[0] <= cost and other[1] >= good and other != (cost, good) for other in places)
        assert ((cost, good) in best) is not beaten


def test_a_card_has_the_hubs_metadata_the_numbers_and_the_recipe() -> None:
    make_study(["svd", "kfac"], [0.5], ["left dense", "map", "another"])
    compare.compare()
    assert sorted(file.name for file in compare.CARDS.iterdir()) == ["kfac-0.5.md", "svd-0.5.md"]
    written = ModelCard.load(compare.CARDS / "kfac-0.5.md")
    (found,) = written.data.eval_results
    assert (found.metric_type, found.metric_value) == ("accuracy", 0.66)
    assert written.data.pipeline_tag == "text-classification"
    assert written.data.base_model is None  # a folder is not a model of the hub
    params = YAML(typ="safe").load(Path("params.yaml").read_text())
    stated = YAML(typ="safe").load(written.text.partition("```yaml\n")[2].partition("```")[0])
    assert stated == {"kfac": params["recipes"]["kfac"]}
    assert "2 of 3 target layers" in written.text
    assert re.search(r"^\| kfac-0\.5 \| 0\.660 \|", written.text, re.MULTILINE)
    assert re.search(r"^\| trivial baseline \| 0\.500 \|", written.text, re.MULTILINE)
    assert "AutoModelForSequenceClassification.from_pretrained" in written.text


def test_page_and_card_say_how_summaries_are_written() -> None:
    make_study(["svd"], [0.5], ["map"], "rouge1")
    params = json.loads(Path("params.yaml").read_text())
    data = {**params["data"], "target_length": 142, "generation": {"beams": 8, "length_penalty": None}}
    edit("params.yaml", data=data)
    compare.compare()
    for text in (page(), Path("reports/cards/svd-0.5.md").read_text()):
        assert "model.generate(**inputs, do_sample=False, num_beams=8, max_new_tokens=142)" in text


def test_a_card_says_what_to_put_before_a_text() -> None:
    make_study(["svd"], [0.5], ["map"], "rouge1")
    edit("params.yaml", data={**json.loads(Path("params.yaml").read_text())["data"], "prefix": "sum: "})
    compare.compare()
    text = Path("reports/cards/svd-0.5.md").read_text()
    assert 'Put "sum: " before each text' in text
    assert "'sum: ' is put before each text" in text


def test_a_card_states_the_license_of_the_base_model() -> None:
    """In the hub's words; where the base model states none, neither does the card. It says what became of the head."""
    make_study(["svd"], [0.5], ["map"])
    for license in ({}, {"license": "other", "license_name": "own: terms", "license_link": "LICENSE"}):
        origin = {"origin": "a local folder"} if license else {}
        write_dense(0.8, 0.8, license=license | origin, head="A new head took its place.")
        found = load_results()
        text = card(found, found.candidates[0])
        assert "A new head took its place." in text
        assert ("a local folder" in text) is bool(origin)
        metadata = ModelCard(text).data.to_dict()
        assert {key: value for key, value in metadata.items() if key.startswith("license")} == license
