"""The tables of a study with several seeds and tasks, from made-up results."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eckart.model.census import Census
from eckart.model.targets import Targets
from tasks.artifacts.metrics import METRICS, MetricName
from tasks.artifacts.results_schema import SECONDS
from tasks.multi_seed import published_numbers
from tasks.multi_seed import seeds_table as summary
from tasks.multi_seed.published_numbers import Published
from tasks.multi_seed.seeds_table import CANDIDATE, CONTROL
from tasks.multi_seed.study_file import StudyFile
from tasks.multi_seed.trials import Trial
from tasks.report.pairwise_differences import COLUMNS, differences, leaders
from tests.tasks.multi_seed.test_published_numbers import ROW
from tests.workspace import REVIEWS, a_task, tiny_params


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


def finished(root: Path, rows: pd.DataFrame) -> None:
    """Fill `root` with what `collect` reads of a study that found `rows`."""
    relative = [
        "seed",
        "seconds",
        "test_rows",
        "of_dense",
        "of_control",
        *(f"{a}_share" for a in ("target", "model", "macs")),
    ]
    relative += [name for name in rows if name.startswith("seeds_")]
    for folder in ("reports", "data/importance"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    rows.drop(columns=relative).to_csv(root / summary.COMPARISON, index=False)
    dense: dict[str, Any] = {"score": {"metric": 0.8, "metrics": {}, "loss": 1.0, "rows": 20}}
    dense |= {"licence": {}, "trivial": 0.5}
    dense["size"] = {"model_parameters": 3_000_000, "macs_per_token": 6_000, "bytes": 1}
    dense |= {"zero_shot": {}, "continuations": [], "validation": dense["score"]}
    dense["control"] = {name: dense[name] for name in ("score", "validation", "zero_shot", "continuations")}
    (root / summary.DENSE_METRICS).write_text(str(dense).replace("'", '"'))
    census = Census(targets=0, linear={}, experts=0, embeddings=0, rest=0)
    found = Targets(targets=(), excluded={}, census=census)
    (root / summary.TARGETS).write_text(found.model_dump_json())
    (root / "data/splits").mkdir()
    task = a_task("classification", ("no", "yes"), "accuracy")
    (root / "data/splits/task.json").write_text(task.model_dump_json())
    (root / "reports/rows").mkdir()
    answered(root, "dense", dense=[1, 1, 1, 0], control=[1, 1, 1, 1])
    for row in rows.itertuples():
        answered(root, f"{row.recipe}-{row.keep}", factorized=[0, 0, 0, 0], recovered=[1, 0, 1, 0])


def answered(root: Path, name: str, **models: list[int]) -> None:
    """Which of some test rows each model got right."""
    frames = [
        pd.DataFrame({"label": 1, "guess": right}).assign(model=model, split="test") for model, right in models.items()
    ]
    pd.concat(frames).to_parquet(root / f"reports/rows/{name}.parquet")


NO_PAIRS = pd.DataFrame(columns=list(COLUMNS))


def page_of(rows: pd.DataFrame, params: dict[str, Any], command: str = "") -> str:
    """The page of a study without tasks that found `rows`."""
    study = StudyFile(Path("studies/two.yaml"), params, (0, 1))
    return summary.page([study], {None: rows}, {None: NO_PAIRS}, "two", command)[1]


class TestSummary:
    def test_mean_and_sample_standard_deviation(self) -> None:
        heads, lines = summary.cells(made_up())
        row = dict(zip(heads, lines[0], strict=True))
        assert row["dense, %"] == "85.0 ± 7.1"  # of 80 and 90: √(2 · 5²)
        assert row["recovered, %"] == "85.0 ± 1.4"
        assert row["of dense, %"] == "100.3 ± 6.7"  # of 105 and 95.6
        assert row["of control, %"] == "94.4 ± 1.6"  # of 93.3 and 95.6
        assert row["from dense, % (95 %)"] == "0.0 ± 5.7 (+1.0 to +1.0)"  # of 4 and -4
        assert row["factorized, %"] == "50.0 ± 0.0"
        plain = {head: cell.replace("\N{NO-BREAK SPACE}", " ") for head, cell in row.items()}
        assert plain["targets"] == "50.0 %"
        assert plain["model parameters"] == "1.50 M (60.0 %)"
        assert plain["MACs per token"] == "3.00 k (75.0 %)"
        assert plain["speedup"] == "2.00 ×"
        assert plain["search steps"] == "10"
        assert plain["seconds"] == "30"
        assert plain["rank after pruning"] == "–"  # of a candidate that was not shaped
        assert [dict(zip(heads, line, strict=True))["shaped, %"] for line in lines[:2]] == ["–", "70.0 ± 0.0"]

    def test_larger_keeps_first_then_what_recovers_best(self) -> None:
        _, lines = summary.cells(made_up())
        assert [line[:2] for line in lines] == [["b", "0.5"], ["a", "0.5"], ["a", "0.25"], ["b", "0.25"]]

    def test_what_was_not_measured_is_no_number(self) -> None:
        heads, lines = summary.cells(made_up())
        assert dict(zip(heads, lines[1], strict=True))["factorized, %"] == "–"

    def test_zero_shot_tasks_have_a_table_with_the_dense_model(self) -> None:
        rows = made_up(seeds=1).assign(**{"zero_shot.piqa.acc": 0.6, "dense.zero_shot.piqa.acc": 0.75})
        heads, lines = summary.zero_shot(rows)
        assert heads == ["recipe", "keep", "piqa acc"]
        assert lines[0] == ["dense", "–", "75.0"]
        assert {line[2] for line in lines[1:]} == {"60.0"}
        assert len(lines) == 1 + len(rows)

    def test_a_text_of_lm_eval_has_its_perplexity_as_it_is(self) -> None:
        names = ("wikitext.word_perplexity", "wikitext.bits_per_byte")
        columns = {f"{dense}zero_shot.{name}": 12.5 for dense in ("", "dense.") for name in names}
        _, lines = summary.zero_shot(made_up(seeds=1).assign(**columns))
        assert {cell for line in lines for cell in line[2:]} == {"12.5"}

    def test_one_seed_has_no_spread(self) -> None:
        heads, lines = summary.cells(made_up(seeds=1))
        assert dict(zip(heads, lines[0], strict=True))["recovered, %"] == "84.0"
        assert "±" not in summary.to_text(*summary.cells(made_up(seeds=1)))

    def test_a_correlation_is_no_percentage(self) -> None:
        heads, lines = summary.cells(made_up("matthews"))
        assert dict(zip(heads, lines[0], strict=True))["recovered"] == "0.850 ± 0.014"

    def test_a_perplexity_is_better_the_lower_it_is(self) -> None:
        rows = made_up("perplexity")
        heads, lines = summary.cells(rows)
        assert [line[:2] for line in lines] == [["a", "0.5"], ["b", "0.5"], ["b", "0.25"], ["a", "0.25"]]
        assert dict(zip(heads, lines[1], strict=True))["of dense, %"] == "99.9 ± 6.7"  # of 80 ÷ 84 and 90 ÷ 86
        data = {"task": "language_modeling", "metric": "perplexity"}
        text = page_of(rows, tiny_params(data=data))
        assert (
            "- Metric: perplexity (lower is better) on 1,000 test rows; of dense and of control: each ÷ recovered.\n"
            in text
        )
        assert "of dense and of control: recovered ÷ each" in page_of(made_up(), tiny_params())

    def test_a_perplexity_has_the_digits_that_its_size_asks_for(self) -> None:
        rows = made_up("perplexity")
        rows["dense"], rows["recovered"], rows["factorized"] = 20 + rows.seed, 1000.0 + rows.seed, 1e5 * (1 + rows.seed)
        heads, lines = summary.cells(rows)
        row = dict(zip(heads, lines[0], strict=True))
        assert (row["dense"], row["recovered"]) == ("20.50 ± 0.71", "1,000 ± 1")  # √½
        assert row["factorized"] == "1.5e5 ± 7.1e4"

    def test_what_is_retained_is_read_in_the_metric_s_direction(self, tmp_path: Path) -> None:
        finished(tmp_path / "one", made_up("perplexity", seeds=1))
        rows = summary.collect({0: tmp_path / "one"})
        assert rows.of_dense.tolist() == pytest.approx([0.8 / value for value in (0.7, 0.6, 0.8, 0.84)])
        finished(tmp_path / "other", made_up("rouge1", seeds=1))
        rows = summary.collect({0: tmp_path / "other"})
        assert rows.of_dense.tolist() == pytest.approx([value / 0.8 for value in (0.7, 0.6, 0.8, 0.84)])

    def test_rows_are_resampled_together_for_all_seeds(self, tmp_path: Path) -> None:
        """Two seeds that err on other rows: their mean is steadier than that of one seed twice."""
        for seed, right in enumerate(([1, 0] * 100, [0, 1] * 100)):
            finished(tmp_path / str(seed), made_up(seeds=1))
            answered(tmp_path / str(seed), "dense", dense=[1] * 200, control=[1] * 200)
            for recipe, keep in {(row.recipe, row.keep) for row in made_up(seeds=1).itertuples()}:
                answered(tmp_path / str(seed), f"{recipe}-{keep}", recovered=right)
        one, both = (summary.collect({0: tmp_path / "0", 1: tmp_path / last}) for last in "01")
        assert one.seeds_from_dense_low.iloc[0] < -0.53
        assert one.seeds_from_dense_high.iloc[0] > -0.47
        assert set(both.seeds_from_dense_low) == set(both.seeds_from_control_high) == {-0.5}

    def test_the_page_says_how_it_was_made_and_is_the_same_anywhere(self, tmp_path: Path) -> None:
        command = "eckart study studies/two.yaml"
        text = page_of(made_up(), tiny_params(), command)
        assert text == page_of(made_up(), tiny_params(), command)
        for part in (
            command,
            "Seeds: 0, 1;",
            "1,000 test rows",
            REVIEWS,
            "models/base/tiny",
            "core",
            "[two.csv](two.csv)",
        ):
            assert part in text
        assert str(Path.cwd()) not in text
        summary.write(tmp_path / "new/two.md", made_up(), pd.DataFrame({"keep": [1]}), text)
        assert (tmp_path / "new/two.md").read_text() == text
        assert len((tmp_path / "new/two.csv").read_text().splitlines()) == 9
        assert (tmp_path / "new/two.pairs.csv").read_text() == "keep\n1\n"

    def test_the_page_says_each_way_of_recovery(self) -> None:
        params = tiny_params()
        once = params["recipes"]["svd"]["recovery"]
        both = {"kind": "in_turn", "first": once, "then": {**once, "steps": 7, "learning_rate": 1e-3}}
        params["recipes"]["kfac"]["recovery"] = both
        way = "2 steps of 8 rows at a rate of 5e-05"
        assert f"Recovery: {way} (svd); {way}, then 7 steps of 8 rows at a rate of 0.001 (kfac)." in page_of(
            made_up(), params
        )

    def test_a_candidate_took_what_its_stages_took(self, tmp_path: Path) -> None:
        """The control one training; where a stage's time is not known, nothing is said."""
        rows = made_up(seeds=1)
        rows.loc[0, CANDIDATE] = CONTROL
        finished(tmp_path, rows)
        assert summary.collect({0: tmp_path}).seconds.isna().all()
        known = {"search@b-0.25": 1, "factorize@b-0.25": 2, "finetune@b-0.25": 4, "evaluate@b-0.25": 8, "control": 16}
        (tmp_path / SECONDS).parent.mkdir()
        (tmp_path / SECONDS).write_text(json.dumps({**known, "finetune@a-0.5": 32}))
        found = summary.collect({0: tmp_path}).set_index(CANDIDATE).seconds
        assert found.dropna().to_dict() == {CONTROL: 16, ("b", "0.25"): 7}

    def test_trials_are_listed_with_what_was_chosen(self) -> None:
        tried = (Trial("a", {}, 0.5, False), Trial("a", {"recovery": {"steps": 9}, "sequential": 1}, 0.75, True))
        study = StudyFile(Path("studies/two.yaml"), tiny_params(), (0, 1), tried=tried)
        lines = [
            re.sub(" +", " ", line)
            for line in summary.page([study], {None: made_up()}, {None: NO_PAIRS}, "two", "")[1].splitlines()
        ]
        assert "| a | as it is | 50.0 | |" in lines
        assert "| a | recovery.steps 9, sequential 1 | 75.0 | * |" in lines

    def test_a_recipe_may_be_called_none(self, tmp_path: Path) -> None:
        """Words that pandas would read as missing values, and keeps as they are written."""
        tables = made_up(seeds=1)
        tables["recipe"] = ["none", "NA", "null", "nan"]
        tables["keep"] = ["0.50", "0.5", "1", "1.0"]
        finished(tmp_path, tables)
        rows = summary.collect({0: tmp_path, 5: tmp_path})
        assert list(rows.recipe) == ["none", "NA", "null", "nan"] * 2
        assert list(rows.keep) == ["0.50", "0.5", "1", "1.0"] * 2
        assert list(rows.seed) == [0] * 4 + [5] * 4
        assert set(rows.model_share) == {0.5}


class TestPairs:
    def test_each_two_recipes_of_a_keep_over_all_seeds(self, tmp_path: Path) -> None:
        """`a` is right on 3 and 1 rows of 4, `b` on 2 and 2, on the same rows for 200 times."""
        right = {"a": ([1, 1, 1, 0], [0, 0, 0, 1]), "b": ([1, 1, 0, 0], [0, 0, 1, 1])}
        folders = {seed: tmp_path / str(seed) for seed in range(2)}
        for seed, folder in folders.items():
            finished(folder, made_up(seeds=1))
            answered(folder, "dense", dense=[1, 1, 1, 0] * 200, control=[1, 1, 1, 1] * 200)
            for recipe, seeds in right.items():
                answered(folder, f"{recipe}-0.5", recovered=seeds[seed] * 200)
        rows = made_up().query("keep == '0.5'")
        found = differences(rows, folders)
        one, *others = found[found["first"] == "a"].itertuples()
        assert not others  # none was scored before recovery
        dense = found[found.second.isin(["a", "b"])].set_index(["first", "second", "model"]).difference
        assert dense["dense model", "a", "recovered"] == 0.25  # 0 and 0.5
        assert dense["dense + recovery", "b", "recovered"] == 0.5
        assert (one.model, one.first, one.second, one.difference) == ("recovered", "a", "b", 0)
        # The seeds differ by 1 and by -1 on the third row in four: together never.
        assert (one.low, one.high) == (0, 0)
        assert one.spread == pytest.approx(0.125**0.5)  # of 0.25 and -0.25
        (one,) = differences(rows, {0: folders[0]}).query("first == 'a'").itertuples()
        assert one.difference == 0.25
        assert math.isnan(one.spread)
        assert one.low == pytest.approx(0.25 - 1.96 * (0.25 * 0.75 / 800) ** 0.5, abs=0.004)
        assert one.high == pytest.approx(0.25 + 1.96 * (0.25 * 0.75 / 800) ** 0.5, abs=0.004)

    def test_keeps_and_models_have_lines_of_their_own(self, tmp_path: Path) -> None:
        finished(tmp_path, made_up(seeds=1))
        found = differences(made_up(), {0: tmp_path})
        assert list(found[found["first"] == "a"].groupby(["keep", "model"]).size()) == [1, 1, 1, 1]

    def test_who_leads_and_who_cannot_be_told_from_it(self) -> None:
        """In the metric's direction; `b` leads at 0.5, `a` at 0.25."""
        decided, undecided = (0.01, 0.2), (-0.1, 0.2)
        for metric, first in (("accuracy", {"0.5": "b", "0.25": "a"}), ("perplexity", {"0.5": "a", "0.25": "b"})):
            ends = {"0.5": decided, "0.25": undecided}
            lines = [(keep, "recovered", "a", "b", 0.1, *ends[keep], 0.0) for keep in ends]
            lines += [(keep, "recovered", "dense model", "b", 0.1, *undecided, 0.0) for keep in ends]
            said = dict.fromkeys(leaders(pd.DataFrame(lines, columns=list(COLUMNS)), made_up(metric)))
            assert [one.split(",")[0] for one in said] == [f"at keep {keep} {first[keep]}" for keep in ("0.25", "0.5")]
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
        heads, lines = summary.combined(self.rows(), OF_TASKS)
        assert heads == ["recipe", "keep", "one, accuracy", "two, Matthews correlation", "mean"]
        assert lines[0] == ["dense", "–", "85.0 ± 7.1", "75.0 ± 7.1", "80.0 ± 7.1"]
        assert lines[1] == ["b", "0.5", "85.0 ± 1.4", "75.0 ± 1.4", "80.0 ± 1.4"]
        assert [line[:2] for line in lines[2:]] == [["a", "0.5"], ["a", "0.25"], ["b", "0.25"]]

    def test_the_mean_is_over_the_seeds_that_all_tasks_have(self) -> None:
        rows = self.rows()
        _, lines = summary.combined(rows[(rows.task == "one") | (rows.seed == 1)], OF_TASKS)
        assert lines[1] == ["b", "0.5", "85.0 ± 1.4", "76.0", "81.0"]

    def test_a_task_that_failed_is_a_dash_and_so_is_the_mean(self) -> None:
        _, lines = summary.combined(self.rows(), {**OF_TASKS, "three": "f1"})
        assert lines[1] == ["b", "0.5", "85.0 ± 1.4", "75.0 ± 1.4", "–", "–"]

    def test_a_perplexity_is_printed_as_it_is_and_has_no_mean(self) -> None:
        rows = summary.joined({"one": made_up(), "text": made_up("perplexity")})
        heads, lines = summary.combined(rows, {"one": "accuracy", "text": "perplexity"})
        assert heads[2:] == ["one, accuracy", "text, perplexity"]
        assert lines[0][2:] == ["85.0 ± 7.1", "0.850 ± 0.071"]

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
