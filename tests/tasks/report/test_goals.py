"""Goals: where to look next is where a goal is met, and who is chosen is whom the goal asks for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML
from torch import nn

from eckart.factorization.weightings import Plain
from eckart.model.targets import Target
from eckart.ranks.budget import NoRank
from eckart.ranks.search import _search_beside
from eckart.ranks.search_problem import SearchProblem
from eckart.ranks.tolerance import Tolerance
from eckart.ranks.uniform import Uniform
from eckart.residual.sparse_rows import SparseRows
from flows.display.study_json import study_json
from flows.goal_search import pursue
from flows.study import StudyFailed
from tasks.artifacts.errors import EckartError
from tasks.compare import compare
from tasks.config import yaml_edit
from tasks.config.params_file import ParamsError, parse, read
from tasks.config.schema import Goal
from tasks.report.choose_candidate import CHOICE
from tasks.report.goals import closer, goal_results, goal_rows
from tasks.report.numbers import between, score, size, times
from tasks.report.result_files import load_results
from tasks.report.results import DENSE
from tests import tiny
from tests.tasks.report.test_compare import edit, make_benchmark, make_candidate, make_exports, make_study, page
from tests.workspace import REPOSITORY

TARGETS = ["layer.0.query", "layer.0.key"]


def looked_at(amount: Any, limit: float, linear: bool, start: list[float]) -> dict[float, float]:
    """Keep → amount of all that is looked at, one after the other, until nothing is left to look at."""
    amounts = {keep: amount(keep) for keep in [*start, 1.0]}
    while (keep := closer(amounts, limit, linear)) is not None:
        assert keep not in amounts
        amounts[keep] = amount(keep)
    return amounts


@given(
    share=st.floats(0.3, 0.99), keep=st.floats(0.05, 0.95), start=st.sampled_from([[0.5], [0.5, 0.33], [0.1], [1.0]])
)
def test_time_and_bytes_are_met_in_few_looks(share: float, keep: float, start: list[float]) -> None:
    """With an amount of 1 - p + p · keep the largest keep that passes is found to a hundredth or a tenth of itself."""
    limit = 1 - share + share * keep
    amounts = looked_at(lambda at: 1 - share + share * at, limit, True, start)
    best = max(at for at, amount in amounts.items() if amount <= limit + 1e-9)
    assert keep - max(0.01, 0.1 * keep) - 0.01 <= best <= keep + 1e-9
    assert len(amounts) <= len({*start, 1.0}) + 3


@given(
    power=st.floats(0.5, 4), boundary=st.floats(0.03, 0.97), start=st.sampled_from([[0.5], [0.5, 0.33], [0.1], [1.0]])
)
def test_a_drop_is_met_by_bisection(power: float, boundary: float, start: list[float]) -> None:
    """The smallest keep that passes is found to a tenth of itself, whatever the loss between."""
    amounts = looked_at(lambda at: (1 - at) ** power, (1 - boundary) ** power, False, start)
    best = min(at for at, amount in amounts.items() if amount <= (1 - boundary) ** power + 1e-9)
    assert boundary - 1e-9 <= best <= boundary / 0.88 + 0.015
    assert len(amounts) <= len({*start, 1.0}) + 7


def test_the_end_of_a_step_of_sizes_is_found_in_few_looks() -> None:
    """All keeps up to 0.2 have rank 1; the line from one of them to 0.3 meets the limit just above it."""
    amounts = looked_at(lambda at: 24.7 if at <= 0.2 else 15 + 150 * at, 25.0, True, [0.066, 0.3])
    assert 0.18 <= max(keep for keep, amount in amounts.items() if amount == 24.7) <= 0.2
    assert len(amounts) <= 9


def test_what_is_out_of_reach_ends_the_search() -> None:
    assert closer({0.5: 60.0, 1.0: 100.0}, 10.0, linear=True) is None  # 20 with no target left
    assert closer({0.5: 0.3, 0.97: 0.2, 1.0: 0.0}, 0.1, linear=False) is None
    assert closer({0.3: 0.9, 0.5: 0.8, 1.0: 1.0}, 0.7, linear=True) is None  # noise turns time around


def test_noise_between_the_two_smallest_does_not_end_the_search() -> None:
    assert closer({0.36: 0.513, 0.38: 0.51, 1.0: 1.0}, 0.5, linear=True) == 0.34  # on the line to the original model


def test_after_a_keep_without_ranks_the_search_goes_on_above_it() -> None:
    drops = {0.33: 0.0, 0.5: 0.0, 1.0: 0.0}
    assert closer(drops, 0.01, linear=False, too_small=0.16) == 0.24
    assert closer(drops, 0.01, linear=False, too_small=0.31) is None
    assert closer({0.5: 60.0, 1.0: 100.0}, 40.0, linear=True, too_small=0.25) is None


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes at two keeps, whose bytes, parameters and validation metrics grow with the keep."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tasks.scoring.bootstrap.RESAMPLES", 200)  # ten times as fast
    make_study(["one", "two"], [0.5, 0.25], TARGETS)
    for path in Path("reports/evaluate").glob("*.json"):
        keep = float(path.stem.partition("-")[2])
        size = json.loads(path.read_text())["size"] | {"bytes": int(4000 * keep)}
        edit(str(path), size=size, target_parameters=int(200 * keep))
    return tmp_path


def ask(**goal: Any) -> None:
    edit("params.yaml", study=json.loads(Path("params.yaml").read_text())["study"] | {"goals": [goal]})


def amounts_of(name: str) -> tuple[float, int, float]:
    """Metric on validation rows, bytes, speedup."""
    candidate = load_results().named(name)
    evaluation = candidate.evaluation
    return evaluation.validation.metric, evaluation.size.bytes, candidate.benchmark.speedup.median


def test_of_a_drop_the_smallest_is_chosen_and_of_bytes_the_best(workspace: Path) -> None:
    dense = load_results().dense.validation.metric
    ask(largest_drop=max(dense - amounts_of(name)[0] for name in ("one-0.5", "one-0.25")))
    assert [one.candidate.name for one in goal_results(load_results()) if one.recipe == "one"] == ["one-0.25"]
    assert load_results().smallest([]) is None
    ask(bytes=max(amounts_of(name)[1] for name in ("two-0.5", "two-0.25")))
    assert [one.candidate.name for one in goal_results(load_results()) if one.recipe == "two"] == ["two-0.5"]


def test_beside_the_chosen_one_stands_the_smallest_of_which_test_rows_show_it(workspace: Path) -> None:
    """On validation rows 0.25 is within the drop; on test rows the worse end of its interval is not."""
    drops = {name: 0.8 - amounts_of(name)[0] for name in ("one-0.5", "one-0.25")}
    lows = {name: load_results().difference((name, "recovered"), DENSE).low for name in drops}
    assert -lows["one-0.25"] > max(drops.values()) + 0.001
    for limit, shown in ((drops["one-0.25"] + 0.001, False), (0.001 - lows["one-0.25"], True)):
        ask(largest_drop=limit)
        cells = goal_rows(load_results())[0].cells
        assert cells["candidate"].value == "one-0.25"
        assert cells["shown by test examples"].value.startswith("one-0.25 (") is shown
        interval = load_results().validation_difference(next(iter(load_results().candidates)))
        assert interval.low < 0


def test_the_nearest_is_said_where_none_meets_it(workspace: Path) -> None:
    ask(speedup=1000.0)
    found = goal_results(load_results())
    assert [one.met for one in found] == [False, False]
    fastest = max(("one-0.5", "one-0.25"), key=lambda name: amounts_of(name)[2])
    assert amounts_of(found[0].candidate.name)[2] == amounts_of(fastest)[2]
    assert found[0].candidate.name in goal_rows(load_results())[0].cells["candidate"].value
    compare()
    assert page().count('scope="row">speedup 1,000 ×<') == 2
    ask(largest_drop=0.5)  # of the next run
    told = study_json()["goals"]
    assert [goal["goal"] for goal in told] == [{"speedup": 1000.0, "runtime": "torch"}] * 2
    for goal, one in zip(told, found, strict=True):
        assert (goal["recipe"], goal["met"], goal["candidate"]) == (one.recipe, False, one.candidate.name)
    CHOICE.write_text('{"candidate": null}')  # by an earlier version
    with pytest.raises(EckartError, match=r"choice\.json.*`eckart run`"):
        study_json()


def test_a_goal_of_a_runtime_is_judged_by_its_files_against_the_dense_model_s(workspace: Path) -> None:
    """Only one recipe is exported: 0.25 is twice as fast as dense int8 and half as large, 0.5 is neither."""
    edit("params.yaml", export={"recipes": ["two"]})
    for name, bytes_, speed in (("dense", 1000, 4.0), ("two-0.5", 800, 6.0), ("two-0.25", 500, 8.0)):
        make_exports(name, 0.8, 0.4, int8_bytes=bytes_)
        if name != "dense":
            dense = {"torch": 1.0, "onnx": 2.0, "int8": 4.0}
            make_benchmark(name, dense=dense, candidate=dense | {"int8": speed})
    for goal in ({"speedup": 2.0}, {"bytes": 500}):
        ask(**goal, runtime="int8")
        assert [(one.candidate.name, one.met) for one in goal_results(load_results())] == [("two-0.25", True)]
        (row,) = goal_rows(load_results())
        _, _, metric, *costs = row.cells.values()
        assert [cell.value for cell in costs] == [size(500), times(2.0)]
        ends = load_results().difference(("two-0.25.onnx", "int8"), DENSE)
        assert (metric.value, metric.below) == (score(0.4), between(ends.low, ends.high, 0.4))
    ask(speedup=2.0, runtime="onnx")
    assert not any(one.met for one in goal_results(load_results()))


def test_pursuing_goals_adds_keeps_until_nothing_is_left_to_look_at(workspace: Path) -> None:
    """Each keep that is looked at joins the study, and is run for every recipe."""
    ask(largest_drop=0.05)
    runs: list[list[float]] = []

    def run() -> None:
        keeps = json.loads(json.dumps(YAML(typ="safe").load(Path("params.yaml").read_text())["study"]["keeps"]))
        runs.append(keeps)
        for position, recipe in enumerate(["one", "two"]):
            for keep in keeps:
                make_candidate(recipe, keep, TARGETS, 0.8 - 0.4 * (1 - keep) - 0.01 * position)

    lines: list[str] = []
    pursue(run, lines.append)
    assert runs[0] == [0.5, 0.25]
    assert all(set(before) < set(after) for before, after in pairwise(runs))
    about = [line.split(":")[0] for line in lines if line.startswith("keep ")]
    assert sorted(about) == sorted(f"keep {keep}" for keep in runs[-1])
    assert not [one for one in goal_results(load_results()) if one.closer]
    assert all(one.met for one in goal_results(load_results()))


def keeps_of_params() -> list[float]:
    keeps: list[float] = YAML(typ="safe").load(Path("params.yaml").read_text())["study"]["keeps"]
    return keeps


def test_a_whole_keep_stays_the_number_that_names_its_candidates(workspace: Path) -> None:
    """A keep 1 that became 1.0 would rename its candidates and compute them again."""
    ask(largest_drop=0.05)
    yaml_edit.update({"study": {"keeps": [1, 0.5]}})

    def run() -> None:
        for recipe, keep in itertools.product(["one", "two"], keeps_of_params()):
            make_candidate(recipe, keep, TARGETS, 0.8 - 0.4 * (1 - keep))

    pursue(run, print)
    assert str(keeps_of_params()[0]) == "1"


SEARCHES: dict[str, Callable[[SearchProblem], Any]] = {
    "uniform": Uniform().search,
    "tolerance": Tolerance().search,
    "beside rows": lambda problem: _search_beside(SparseRows(low_rank=0.5), problem, Uniform()),
}


def refused(search: str, keep: float) -> str:
    """What a rank search says of a target for which rank 1 is half of its parameters."""
    target = Target(name="square", out_features=4, in_features=4, input_of="square")
    model = nn.ModuleDict({"square": nn.Linear(4, 4)})
    with pytest.raises(NoRank) as error:
        SEARCHES[search](tiny.search_problem(model, [target], Plain(), [], keep))
    return str(error.value)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("limit", [0.1, 0.2])
def test_a_keep_without_a_rank_bounds_the_search(workspace: Path, limit: float, search: str) -> None:
    """It is out of params.yaml again, where the next search would fail at it."""
    ask(bytes=int(4000 * limit))
    tried: set[float] = set()

    def run() -> None:
        keeps = keeps_of_params()
        tried.update(keeps)
        if min(keeps) < 0.15:
            raise StudyFailed(f"1 failed:\n  search@one-{min(keeps)}: {refused(search, min(keeps))}\nFix it")
        for recipe, keep in itertools.product(["one", "two"], keeps):
            make_candidate(recipe, keep, TARGETS, 0.8)
            path = Path(f"reports/evaluate/{recipe}-{keep}.json")
            evaluation = json.loads(path.read_text())
            evaluation["size"]["bytes"] = int(4000 * keep)
            path.write_text(json.dumps(evaluation))

    pursue(run, print)
    assert (min(tried) < 0.15) == (limit < 0.15)
    assert min(keeps_of_params()) == (0.25 if limit < 0.15 else 0.2)


def test_a_keep_of_the_user_s_own_without_a_rank_is_an_error(workspace: Path) -> None:
    ask(bytes=400)
    before = keeps_of_params()

    def run() -> None:
        raise StudyFailed(f"  search@one-0.25: {refused('uniform', 0.25)}")

    with pytest.raises(StudyFailed):
        pursue(run, print)
    assert keeps_of_params() == before


@pytest.mark.parametrize("end", [KeyboardInterrupt(), StudyFailed("no space")])
def test_only_what_the_search_added_and_did_not_finish_is_taken_out_at_its_end(
    workspace: Path, end: BaseException
) -> None:
    """The user's own edits during the run stay, and the values that finished."""
    ask(largest_drop=0.05)
    rounds: list[list[float]] = []

    def run() -> None:
        rounds.append(keeps_of_params())
        Path("resolved.yaml").write_text(Path("params.yaml").read_text())
        if len(rounds) == 3:
            yaml_edit.update({"study": {"keeps": [*keeps_of_params(), 0.11]}})
            raise end
        for recipe, keep in itertools.product(["one", "two"], keeps_of_params()):
            make_candidate(recipe, keep, TARGETS, 0.8 - 0.4 * (1 - keep))
        if len(rounds) == 1:
            yaml_edit.update({"study": {"keeps": [*keeps_of_params(), 0.1]}})

    with pytest.raises(type(end)):
        pursue(run, print)
    first, second, third = rounds
    assert 0.1 in second
    assert {*second} > {*first, 0.1}
    assert {*third} > {*second}
    assert {*keeps_of_params()} == {*second, 0.11}


def test_nothing_runs_without_a_goal(workspace: Path) -> None:
    with pytest.raises(ParamsError):
        pursue(lambda: pytest.fail("it ran"), print)


@pytest.mark.parametrize(
    "goal",
    [
        {},
        {"speedup": 2.0, "bytes": 5},
        {"bytes": "much"},
        {"largest_drop": 0.1, "runtime": "int8"},
        {"bytes": 5, "runtime": "tflite"},
    ],
)
def test_what_is_no_goal_is_refused(goal: dict[str, Any]) -> None:
    with pytest.raises(ParamsError):
        parse(goal, Goal, Path("params.yaml"))


@pytest.mark.parametrize(("text", "size"), [("3.9 MB", 3_900_000), ("2kib", 2048), (".5M", 500_000), (" 700 ", 700)])
def test_bytes_have_units(text: str, size: int) -> None:
    assert parse({"bytes": text}, Goal, Path("params.yaml")).bytes == size


@pytest.mark.parametrize(
    "text", ["5,5 MB", "1,000,000", "5MB/s", "5. MB", "5 MB or so", "5 million", "MB", "-5 MB", ""]
)
def test_a_size_is_read_whole_or_not_at_all(text: str) -> None:
    """Its beginning alone would be another size: 5 bytes of `5,5 MB`."""
    with pytest.raises(ParamsError, match=r"\bbytes: .*MB"):
        parse({"bytes": text}, Goal, Path("params.yaml"))


def test_a_change_of_params_leaves_comments_and_layout(tmp_path: Path) -> None:
    """Nothing but the line that states the value differs, and undoing the change gives the same bytes."""
    before = (REPOSITORY / "params.yaml").read_text()
    path = tmp_path / "params.yaml"
    path.write_text(before)
    yaml_edit.update({"study": {"keeps": [0.5, 0.33, 0.27]}, "data": {"metric": "accuracy"}}, path)
    lines = [pair for pair in zip(before.splitlines(), path.read_text().splitlines(), strict=True) if len({*pair}) > 1]
    assert [line.split("#")[1] for line in lines[0]] == [lines[0][0].split("#")[1]] * 2
    assert len(lines) == 1
    yaml_edit.update({"study": {"keeps": [0.5, 0.33]}}, path)
    assert path.read_text() == before


def test_what_is_emptied_is_empty_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        "study:\n  goals:  # what for\n    - {speedup: 2.0}\n  texts:\n    a: {b: 1}\n\nseed: 0  # of all\n"
    )
    yaml_edit.update({"study": {"goals": [], "texts": {}}}, path)
    assert read(path) == {"study": {"goals": [], "texts": {}}, "seed": 0}
    assert "# of all" in path.read_text()


def test_a_number_of_any_size_can_be_written() -> None:
    """A training that diverged may leave a perplexity of 1e300 beside one of 20."""
    assert between(-1e30, 1e300, 20.0) == "-1.0e30 to +1.0e300"
    assert score(5.0, 1e30) == "5.000 ± 1.0e30"
