"""The tables of a study with several seeds and tasks, from made-up results."""

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tasks.artifacts.metrics import METRICS, MetricName
from tasks.artifacts.results_schema import SECONDS
from tasks.multi_seed import published_numbers
from tasks.multi_seed import seeds_table as summary
from tasks.multi_seed.pairwise_differences import COLUMNS, leaders
from tasks.multi_seed.published_numbers import Published
from tasks.multi_seed.seeds_table import CANDIDATE, CONTROL_ROW
from tasks.multi_seed.study_file import StudyFile
from tasks.multi_seed.trials import Trial
from tests.tasks.multi_seed.test_published_numbers import ROW
from tests.tasks.report.test_compare import make_study
from tests.workspace import REVIEWS, tiny_params


def made_up(metric: MetricName = "accuracy", seeds: int = 2) -> pd.DataFrame:
    """Two candidates at each of two keeps; `b` is better at 0.5 and `a` at 0.25."""
    recovered = {("a", "0.25"): 0.7, ("b", "0.25"): 0.6, ("a", "0.5"): 0.8, ("b", "0.5"): 0.84}
    return pd.DataFrame(
        {
            "seed": seed,
            "recipe": recipe,
            "keep": keep,
            "metric": metric,
            "trivial": 0.5,
            "dense": 0.8 + 0.1 * seed,
            "control": 0.9,
            "factorized": None if recipe == "a" else 0.5,
            "recovered": value + 0.02 * seed,
            "target_parameters": 500,
            "model_parameters": 1_500_000,
            "macs_per_token": 3_000,
            "speedup": 1.5 + seed,
            "search_steps": 10,
            "seconds": 30.0,
            "machine": f"machine {seed}",
            "average_rank": 380.0 if recipe == "a" else None,
            "shaped": 0.7 if recipe == "a" else None,
            "test_rows": 1000,
            "of_dense": METRICS[metric].retained(value + 0.02 * seed, 0.8 + 0.1 * seed),
            "of_control": METRICS[metric].retained(value + 0.02 * seed, 0.9),
            **{f"seeds_from_{name}_{end}": 0.01 for name in ("dense", "control") for end in ("low", "high")},
            "target_share": 0.5,
            "model_share": 0.6,
            "macs_share": 0.75,
        }
        for seed in range(seeds)
        for (recipe, keep), value in recovered.items()
    )


def finished(root: Path, metric: MetricName = "accuracy") -> Path:
    """Fill `root` with a finished study of the recipes `a` and `b` at keep 0.5."""
    root.mkdir(parents=True)
    with contextlib.chdir(root):
        make_study(["a", "b"], [0.5], ["h.0.query", "h.1.query"], metric)
    return root


def answered(root: Path, name: str, **models: list[int]) -> None:
    """Record which of 400 examples each model of a candidate, or `dense` and its control, got right."""
    frames = [
        pd.DataFrame({"label": 1, "guess": right}).assign(model=model, split=split)
        for model, right in models.items()
        for split in ("test", "validation")
    ]
    pd.concat(frames).to_parquet(root / f"reports/predictions/{name}.parquet")
    file = root / ("reports/dense.json" if name == "dense" else f"reports/evaluate/{name}.json")
    report = json.loads(file.read_text())
    if name == "dense":
        models = {"score": models["dense"]}
    for model, right in models.items():
        report[model]["metric"] = sum(right) / len(right)
    file.write_text(json.dumps(report))


NO_PAIRS = pd.DataFrame(columns=list(COLUMNS))


def page_of(rows: pd.DataFrame, params: dict[str, Any], command: str = "") -> str:
    """The page of a study without tasks that found `rows`."""
    study = StudyFile(Path("studies/two.yaml"), params, (0, 1))
    return summary.page([study], {None: rows}, {None: NO_PAIRS}, "two", command)[1]


def candidates(table: pd.DataFrame) -> list[str]:
    """The recipe and keep of each line."""
    return table[CANDIDATE].agg(" ".join, axis=1).tolist()


class TestSummary:
    def test_mean_and_sample_standard_deviation(self) -> None:
        table = summary.cells(made_up())
        row = table.iloc[0]
        assert row["original, %"] == "85.0 ± 7.1"  # of 80 and 90: √(2 · 5²)
        assert row["recovered, %"] == "85.0 ± 1.4"
        assert row["of original, %"] == "100.3 ± 6.7"  # of 105 and 95.6
        assert row["of control, %"] == "94.4 ± 1.6"  # of 93.3 and 95.6
        assert row["vs. original, points (95 %)"] == "0.0 ± 5.7 (+1.0 to +1.0)"  # of 4 and -4
        assert row["factorized, %"] == "50.0 ± 0.0"
        plain = row.str.replace("\N{NO-BREAK SPACE}", " ")
        assert plain["targets"] == "50.0 %"
        assert plain["model parameters"] == "1.50 M (60.0 %)"
        assert plain["MACs per token"] == "3.00 k (75.0 %)"
        assert plain["speedup"] == "2.00 ×"
        assert plain["search steps"] == "10"
        assert plain["seconds"] == "30"
        assert plain["rank after pruning"] == "–"  # of a candidate that was not shaped
        assert table.loc[1, ["shaped, %", "factorized, %"]].tolist() == ["70.0 ± 0.0", "–"]
        assert candidates(table) == ["b 0.5", "a 0.5", "a 0.25", "b 0.25"]

    @pytest.mark.parametrize(
        ("metric", "seeds", "head", "cell"),
        [
            ("accuracy", 1, "recovered, %", "84.0"),  # one seed has no spread
            ("matthews", 2, "recovered, × 100", "85.0 ± 1.4"),
            ("perplexity", 2, "of original, %", "99.9 ± 6.7"),  # of 80 ÷ 84 and 90 ÷ 86
        ],
    )
    def test_a_cell_has_the_units_and_digits_of_its_metric(
        self, metric: MetricName, seeds: int, head: str, cell: str
    ) -> None:
        assert summary.cells(made_up(metric, seeds)).set_index(CANDIDATE).loc[("b", "0.5"), head] == cell

    def test_a_column_is_left_out_if_nothing_was_measured_for_it(self) -> None:
        table = summary.cells(made_up().assign(speedup=math.nan, seconds=math.nan))
        assert {*summary.cells(made_up())} - {*table} == {"speedup", "seconds"}

    def test_other_texts_have_a_table_with_the_multiple_of_the_dense_model_s_perplexity(self) -> None:
        rows = made_up("perplexity", seeds=2)
        for number, (name, own) in enumerate({"news": [30.0, 60.0], "editorials": [45.0, 45.0]}.items(), start=1):
            rows[f"dense.texts.{name}"] = 20.0 * number
            rows[f"texts.{name}"] = rows.seed.map(dict(zip(rows.seed.unique(), own, strict=True)))
        dense, *others = summary.texts(rows).to_dict("records")
        assert dense == {
            "recipe": "dense",
            "keep": "–",
            "news": "20.00 ± 0.00",
            "news ÷ original": "1.000 ± 0.000",
            "editorials": "40.00 ± 0.00",
            "editorials ÷ original": "1.000 ± 0.000",
        }
        assert {line["news"] for line in others} == {"45.00 ± 21.21"}
        assert {line["news ÷ original"] for line in others} == {"2.250 ± 1.061"}
        assert {line["editorials ÷ original"] for line in others} == {"1.125 ± 0.000"}

    def test_zero_shot_tasks_have_a_table_with_the_dense_model(self) -> None:
        """Shares in percent; a perplexity as it is, also that of a broken candidate, and what is in percent."""
        values = {"piqa.acc": (0.6, 0.75), "wikitext.word_perplexity": (3e28, 11.5), "wmt16.bleu": (0.5, 25.3)}
        rows = made_up(seeds=1)
        for name, (own, dense) in values.items():
            rows[f"zero_shot.{name}"], rows[f"dense.zero_shot.{name}"] = own, dense
        table = summary.zero_shot(rows)
        assert table.columns.tolist() == ["recipe", "keep", "piqa acc", "wikitext word_perplexity", "wmt16 bleu"]
        dense, *others = table.to_numpy().tolist()
        assert dense == ["dense", "–", "75.0", "11.50", "25.30"]
        assert [line[2:] for line in others] == [["60.0", "3.0e28", "0.500"]] * len(rows)

    def test_a_perplexity_is_better_the_lower_it_is(self) -> None:
        assert candidates(summary.cells(made_up("perplexity"))) == ["a 0.5", "b 0.5", "b 0.25", "a 0.25"]

    def test_rows_have_the_numbers_of_the_results(self, tmp_path: Path) -> None:
        """Recovered are 0.65 and 0.66, dense and control 0.8; of two targets one is dense and one has rank 2 of 10."""
        root = finished(tmp_path / "study")
        (root / SECONDS).parent.mkdir()
        seconds = {"search@b-0.5": 1, "factorize@b-0.5": 2, "finetune@b-0.5": 4, "evaluate@b-0.5": 8, "control": 16}
        (root / SECONDS).write_text(json.dumps({**seconds, "finetune@a-0.5": 32}))
        rows, _ = summary.collect({7: root})
        assert rows[CANDIDATE].apply(tuple, axis=1).tolist() == [CONTROL_ROW, ("a", "0.5"), ("b", "0.5")]
        assert set(rows.seed) == {7}
        assert rows.recovered.tolist() == [0.8, 0.65, 0.66]
        assert rows.of_dense.tolist() == pytest.approx([1, 0.65 / 0.8, 0.66 / 0.8])
        assert rows.target_share.tolist() == [1, 0.7, 0.7]
        assert rows.model_share.tolist() == [1, 0.7, 0.7]
        # Those of a candidate's stages, where all are known; the control has one training.
        assert rows.set_index(CANDIDATE).seconds.dropna().to_dict() == {CONTROL_ROW: 16, ("b", "0.5"): 7}

    def test_examples_are_resampled_together_for_all_seeds(self, tmp_path: Path) -> None:
        """Two seeds that err on other examples: their mean is steadier than that of one seed twice."""
        for seed, right in enumerate(([1, 0] * 200, [0, 1] * 200)):
            finished(tmp_path / str(seed))
            answered(tmp_path / str(seed), "dense", dense=[1] * 400, control=[1] * 400)
            answered(tmp_path / str(seed), "a-0.5", recovered=right)
        one, both = (summary.collect({0: tmp_path / "0", 1: tmp_path / last})[0] for last in "01")
        one, both = (rows[rows.recipe == "a"].iloc[0] for rows in (one, both))
        assert one.seeds_from_dense_low < -0.53
        assert one.seeds_from_dense_high > -0.47
        assert both.seeds_from_dense_low == both.seeds_from_control_high == -0.5

    def test_the_page_says_how_it_was_made_and_is_the_same_anywhere(self, tmp_path: Path) -> None:
        command = "eckart study studies/two.yaml"
        text = page_of(made_up(), tiny_params(), command)
        assert text == page_of(made_up(), tiny_params(), command)
        assert all(
            part in text for part in (command, "Seeds: 0, 1;", REVIEWS, "models/base/tiny", "[two.csv](two.csv)")
        )
        assert "Machine: machine 0; machine 1; " in text  # that computed the seeds, not the one that writes the page
        assert str(Path.cwd()) not in text
        summary.write(tmp_path / "new/two.md", made_up(), pd.DataFrame({"keep": [1]}), text)
        assert (tmp_path / "new/two.md").read_text() == text
        assert len((tmp_path / "new/two.csv").read_text().splitlines()) == 9
        assert (tmp_path / "new/two.pairs.csv").read_text() == "keep\n1\n"

    def test_a_control_that_takes_no_step_is_the_original_model(self) -> None:
        params = tiny_params()
        assert "fine-tuning of kfac." in page_of(made_up(), params)
        for recipe in params["recipes"].values():
            recipe["recovery"]["steps"] = 0
        text = page_of(made_up(), params)
        assert "- Control: the original model itself" in text
        assert "- Recovery: none.\n" in text

    def test_the_page_says_how_summaries_are_written(self) -> None:
        params = tiny_params(data={"target_length": 142, "generation": {"beams": 8, "length_penalty": None}})
        assert "num_beams=8, max_new_tokens=142" in page_of(made_up("rouge1"), params)

    def test_trials_are_listed_with_what_was_chosen(self) -> None:
        tried = (Trial("a", {}, 0.5, False), Trial("a", {"recovery": {"steps": 9}, "sequential": 1}, 0.75, True))
        study = StudyFile(Path("studies/two.yaml"), tiny_params(), (0, 1), tried=tried)
        lines = [
            re.sub(" +", " ", line)
            for line in summary.page([study], {None: made_up()}, {None: NO_PAIRS}, "two", "")[1].splitlines()
        ]
        assert "| a | as it is | 50.0 | |" in lines
        assert "| a | recovery.steps 9, sequential 1 | 75.0 | * |" in lines


class TestPairs:
    def test_each_two_recipes_of_a_keep_over_all_seeds(self, tmp_path: Path) -> None:
        """`a` is right on 3 and 1 examples of 4, `b` on 2 and 2, on the same examples for 100 times."""
        right = {"a": ([1, 1, 1, 0], [0, 0, 0, 1]), "b": ([1, 1, 0, 0], [0, 0, 1, 1])}
        folders = {seed: finished(tmp_path / str(seed)) for seed in range(2)}
        for seed, folder in folders.items():
            answered(folder, "dense", dense=[1, 1, 1, 0] * 100, control=[1, 1, 1, 1] * 100)
            for recipe, seeds in right.items():
                answered(folder, f"{recipe}-0.5", recovered=seeds[seed] * 100)
        _, found = summary.collect(folders)
        (pair,) = found[found["first"] == "a"].itertuples()  # none was scored before recovery
        named = found.set_index(["first", "second", "model"]).difference
        assert named["dense model", "a", "recovered"] == 0.25  # 0 and 0.5
        assert (pair.model, pair.first, pair.second, pair.difference) == ("recovered", "a", "b", 0)
        # The seeds differ by 1 and by -1 on one example in four: together never.
        assert (pair.low, pair.high) == (0, 0)
        assert pair.spread == pytest.approx(0.125**0.5)  # of 0.25 and -0.25
        _, found = summary.collect({0: folders[0]})
        (pair,) = found[found["first"] == "a"].itertuples()
        assert pair.difference == 0.25
        assert math.isnan(pair.spread)
        assert pair.low == pytest.approx(0.25 - 1.96 * (0.25 * 0.75 / 400) ** 0.5, abs=0.005)
        assert pair.high == pytest.approx(0.25 + 1.96 * (0.25 * 0.75 / 400) ** 0.5, abs=0.005)

    def test_leaders_are_named_with_recipes_not_significantly_different(self) -> None:
        """In the metric's direction; `b` leads at 0.5, `a` at 0.25."""
        decided, undecided = (0.01, 0.2), (-0.1, 0.2)
        for metric, first in (("accuracy", {"0.5": "b", "0.25": "a"}), ("perplexity", {"0.5": "a", "0.25": "b"})):
            ends = {"0.5": decided, "0.25": undecided}
            lines = [(keep, "recovered", "a", "b", 0.1, *ends[keep], 0.0) for keep in ends]
            lines += [(keep, "recovered", "dense model", "b", 0.1, *undecided, 0.0) for keep in ends]
            said = dict.fromkeys(leaders(pd.DataFrame(lines, columns=list(COLUMNS)), made_up(metric)))
            assert [one.split(" (")[0] for one in said] == [f"at keep {keep} {first[keep]}" for keep in ("0.25", "0.5")]
            assert [{"a", "b"} <= set(re.findall(r"\b[ab]\b", one)) for one in said] == [True, False]


OF_TASKS: published_numbers.TaskMetrics = {"one": "accuracy", "two": "matthews"}


class TestSeveralTasks:
    """One table of all tasks, and a page."""

    @staticmethod
    def rows() -> pd.DataFrame:
        """`two` is 10 points worse than `one`, everywhere."""
        two = made_up("matthews")
        two[["dense", "recovered"]] -= 0.1
        return summary.joined({"one": made_up(), "two": two})

    def test_points_and_their_mean_with_the_dense_model_first(self) -> None:
        table = summary.combined(self.rows(), OF_TASKS)
        assert table.columns.tolist() == ["recipe", "keep", "one, accuracy", "two, Matthews correlation", "mean"]
        assert table.loc[0].tolist() == ["dense", "–", "85.0 ± 7.1", "75.0 ± 7.1", "80.0 ± 7.1"]
        assert table.loc[1].tolist() == ["b", "0.5", "85.0 ± 1.4", "75.0 ± 1.4", "80.0 ± 1.4"]
        assert candidates(table)[2:] == ["a 0.5", "a 0.25", "b 0.25"]

    def test_the_mean_is_over_the_seeds_that_all_tasks_have(self) -> None:
        rows = self.rows()
        table = summary.combined(rows[(rows.task == "one") | (rows.seed == 1)], OF_TASKS)
        assert table.loc[1].tolist() == ["b", "0.5", "85.0 ± 1.4", "76.0", "81.0"]
        table = summary.combined(rows, {**OF_TASKS, "three": "f1"})  # a task that failed
        assert table.loc[1].tolist() == ["b", "0.5", "85.0 ± 1.4", "75.0 ± 1.4", "–", "–"]

    def test_a_perplexity_is_printed_as_it_is_and_has_no_mean(self) -> None:
        rows = summary.joined({"one": made_up(), "text": made_up("perplexity")})
        table = summary.combined(rows, {"one": "accuracy", "text": "perplexity"})
        assert table.columns.tolist() == ["recipe", "keep", "one, accuracy", "text, perplexity"]
        assert table.loc[0].tolist() == ["dense", "–", "85.0 ± 7.1", "0.850 ± 0.071"]

    def test_the_page_has_all_tables_and_what_is_published(self, tmp_path: Path) -> None:
        cited = (Published(**{**ROW, "scores": {"one": 80.0}}),)
        studies = [
            StudyFile(Path("studies/two.yaml"), tiny_params(data={"metric": metric}), (0, 1), str(task), cited)
            for task, metric in OF_TASKS.items()
        ]
        found = {"one": made_up(), "two": made_up("matthews")}
        rows, text = summary.page(studies, found, dict.fromkeys(found, NO_PAIRS), "two", "made by")
        heads = [line for line in text.splitlines() if line.startswith("#")]
        assert heads == ["# two", "## Published", "## one", "## two"]
        assert "| ARS | 0.5 | 80 | – | 80.00 of 1 | Doe 2024, table 1 | 1 |" in re.sub(" +", " ", text)
        assert "\n1. of 3 seeds\n" in text
        assert list(rows.columns[:3]) == ["task", "seed", "recipe"]
        assert list(rows.task) == ["one"] * 8 + ["two"] * 8
