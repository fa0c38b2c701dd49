"""The results of a study, read from the files of its stages and checked against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eckart.model.census import Census
from eckart.model.targets import Target, Targets
from eckart.ranks.budget import Rank
from tasks.artifacts.importance_files import TARGETS
from tasks.artifacts.metrics import METRICS, Metric
from tasks.artifacts.names import candidate_name, recipe_and_keep
from tasks.artifacts.paths import (
    CURVES,
    EVALUATIONS,
    EXPORTS,
    SEARCH_CURVES,
    Decision,
    decision_file,
    exported_name,
)
from tasks.artifacts.results_schema import (
    BENCHMARKS,
    CONTROL_CURVE,
    DENSE_METRICS,
    TEACHER_CURVE,
    Benchmark,
    Benchmarks,
    DenseReport,
    Evaluation,
    Exports,
    rows_file,
)
from tasks.artifacts.task_spec import SPLITS, Split, Task
from tasks.config import schema
from tasks.config.promotion_limits import Choice, Limits, Measured, Promotion, choose
from tasks.runtime.stage_runner import StageError
from tasks.scoring import trivial_baseline
from tasks.scoring.bootstrap import Interval, interval, resampled, standard_error

Content = TypeVar("Content", bound=BaseModel)


class Point(BaseModel):
    """A point of a training curve. What a method measured besides stands in it under names of its own."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)

    step: int
    loss: float
    """With all that the method adds to the task loss."""
    learning_rate: float
    grad_norm: float
    task_loss: float | None = None
    """Left out where it is all of `loss`."""

    @property
    def compared_loss(self) -> float:
        """The task loss, which is the same quantity for every method."""
        return self.loss if self.task_loss is None else self.task_loss

    @property
    def measures(self) -> dict[str, float]:
        return dict(self.__pydantic_extra__)


Curve = tuple[Point, ...]
"""Empty where nothing was trained."""

ScoredModel = tuple[str, str]
"""A model that was scored on the test rows: the file of its rows, and its name there, as ("kfac-0.5", "recovered")."""
DENSE: ScoredModel = ("dense", "dense")
CONTROL: ScoredModel = ("dense", "control")
TRIVIAL: ScoredModel = ("dense", trivial_baseline.TRIVIAL)


@dataclass(frozen=True)
class CandidateResults:
    """All that the stages found out about one candidate."""

    recipe: str
    keep: str
    decision: Decision
    evaluation: Evaluation
    benchmark: Benchmark
    search_curve: Curve
    """Of shaping and rank search."""
    curve: Curve
    """Of recovery."""

    @property
    def name(self) -> str:
        return candidate_name(self.recipe, self.keep)

    @property
    def shaped(self) -> float | None:
        """The metric of the weights that shaping left, before they are factorized; None where nothing was shaped."""
        return None if self.evaluation.shaped is None else self.evaluation.shaped.metric

    @property
    def factorized(self) -> float | None:
        """The metric before recovery; None where the model is not smaller yet."""
        return None if self.evaluation.factorized is None else self.evaluation.factorized.metric

    @property
    def recovered(self) -> float:
        """The metric after recovery."""
        return self.evaluation.recovered.metric

    @property
    def after(self) -> ScoredModel:
        return self.name, "recovered"

    @property
    def before(self) -> ScoredModel:
        return self.name, "factorized"

    def share(self, target: Target) -> float:
        """Parameters of `target` after ÷ before; above 1 where factors and residual exceed the dense weight."""
        return self.evaluation.targets[target.name].parameters / target.parameters

    def rank(self, target: Target) -> Rank:
        return self.evaluation.targets[target.name].rank

    def rows(self, target: Target) -> int:
        """Sparse rows beside the factors of `target`."""
        return self.evaluation.targets[target.name].rows


@dataclass(frozen=True)
class Results:
    """A study with its dense model and candidates, recipes outer, keeps inner, in the study's order."""

    name: str
    recipes: tuple[str, ...]
    keeps: tuple[str, ...]
    goals: tuple[schema.Goal, ...]
    task: Task
    targets: tuple[Target, ...]
    census: Census
    """Of the dense model."""
    dense: DenseReport
    curve: Curve
    control: str
    """The recipe whose recovery the control has."""
    control_curve: Curve
    candidates: tuple[CandidateResults, ...]
    exports: Mapping[str, Exports]
    """Of the dense model and exported candidates, by name; empty where none was exported."""
    limits: Limits
    """Of a promotion."""
    resampled: Mapping[ScoredModel, np.ndarray]
    """The metric of each model on the same resamples of the test rows, `(resamples,)` each."""
    validated: Mapping[ScoredModel, np.ndarray]
    """The same on the validation rows, of what could be shipped."""
    only_answers: Mapping[ScoredModel, str]
    """What a model answers to every test row, of those that answer one class, tag or number only."""

    @property
    def metric(self) -> Metric:
        """How the task's metric reads."""
        return METRICS[self.task.metric]

    @property
    def target_parameters(self) -> int:
        """Of the dense model."""
        return sum(target.parameters for target in self.targets)

    @property
    def searches_trained(self) -> bool:
        """Whether any candidate was trained before its factorization."""
        return any(one.decision.steps for one in self.candidates)

    @property
    def has_shaped(self) -> bool:
        """Whether the weights of any candidate were shaped."""
        return any(one.evaluation.shaped for one in self.candidates)

    @property
    def measures(self) -> list[str]:
        """What the trainings of candidates measured besides the loss, in the order in which it appears."""
        curves = [curve for one in self.candidates for curve in (one.search_curve, one.curve)]
        return list(dict.fromkeys(name for curve in curves for point in curve for name in point.measures))

    @property
    def has_sparse_rows(self) -> bool:
        """Whether any candidate has rows of a residual beside its factors."""
        return any(size.rows for one in self.candidates for size in one.evaluation.targets.values())

    @property
    def full_rank(self) -> float:
        """Mean over the targets of the rank that a dense weight can have."""
        return sum(min(target.out_features, target.in_features) for target in self.targets) / len(self.targets)

    def difference(self, one: ScoredModel, other: ScoredModel) -> Interval:
        """Of the metric of `one` less that of `other`, in the metric's units."""
        return interval(self.resampled[one] - self.resampled[other])

    def gain(self, one: ScoredModel, other: ScoredModel) -> int:
        """Whether `one` is better than `other` (1) or worse (-1) beyond what these rows leave to chance (0)."""
        sign = self.difference(one, other).sign
        return -sign if self.metric.lower_is_better else sign

    def validation_difference(self, one: CandidateResults) -> Interval:
        """Of its metric less that of the dense model, on the validation rows."""
        return interval(self.validated[one.after] - self.validated[DENSE])

    def measured(self, one: CandidateResults) -> Measured:
        """What the limits of a promotion are held against, on the validation rows."""
        return Measured(
            metric=one.evaluation.validation.metric,
            teacher=self.dense.validation.metric,
            standard_error=standard_error(self.validated[one.after] - self.validated[DENSE]),
            parameters=one.evaluation.target_parameters,
            keep=one.evaluation.target_parameters / self.target_parameters,
            speedup=one.benchmark.speedup.median,
        )

    @cached_property
    def choice(self) -> Choice:
        """Which candidate `eckart promote` takes."""
        return choose({one.name: self.measured(one) for one in self.candidates}, self.task.metric, self.limits)

    def named(self, name: str) -> CandidateResults:
        return next(one for one in self.candidates if one.name == name)

    def at(self, keep: str) -> list[CandidateResults]:
        """The candidates at `keep`, best recovered first; of equal metrics, the one of lower loss."""
        some = [one for one in self.candidates if one.keep == keep]
        return sorted(some, key=lambda one: (-self.metric.goodness(one.recovered), one.evaluation.recovered.loss))

    def is_best(self, one: CandidateResults) -> bool:
        """Whether no candidate at its keep has a better metric."""
        return one.recovered == self.at(one.keep)[0].recovered

    def rivals(self, one: CandidateResults) -> list[CandidateResults]:
        """Those of other metric at its keep that these rows cannot tell from it."""
        others = [other for other in self.at(one.keep) if other.recovered != one.recovered]
        return [other for other in others if not self.gain(one.after, other.after)]

    def metric_of(self, one: ScoredModel) -> float:
        """Of the dense model, the control or the trivial baseline."""
        if one == TRIVIAL:
            return self.dense.trivial
        return (self.dense if one == DENSE else self.dense.control).score.metric

    def spans_decades(self, metrics: Iterable[float]) -> bool:
        """Whether an even scale of so different `metrics` would show nothing of most."""
        some = list(metrics)
        return not self.metric.bounded and max(some) > 10 * min(some) > 0

    def retained(self, metric: float, reference: ScoredModel) -> float | None:
        """How much `metric` is of that of the dense model or the control; None where the quotient would mislead."""
        return self.metric.retained(metric, self.metric_of(reference))


def load_results() -> Results:
    """Read the study and every file that its stages wrote.

    Raises:
        StageError: a file is missing or malformed, or was made from other inputs than the rest.
    """
    study = schema.section("study", schema.Study)
    keeps, exported = schema.keeps(), schema.exported()
    task = _read(SPLITS / "task.json", Task, "extract")
    benchmarks = _read(BENCHMARKS, Benchmarks, "benchmark").root
    candidates = tuple(_read_candidate(recipe, keep, benchmarks) for recipe in study.recipes for keep in keeps)
    found = _read(TARGETS, Targets, "importance")
    results = Results(
        name=study.name,
        recipes=study.recipes,
        keeps=keeps,
        goals=study.goals,
        task=task,
        targets=found.targets,
        census=found.census,
        dense=_read(DENSE_METRICS, DenseReport, "dense"),
        curve=_read_curve(TEACHER_CURVE, "teacher"),
        control=schema.section("study.control", str),
        control_curve=_read_curve(CONTROL_CURVE, "control"),
        candidates=candidates,
        exports={name: _read_exports(name) for name in (["dense", *exported] if exported else [])},
        limits=schema.section("promotion", Promotion),
        resampled={},
        validated={},
        only_answers={},
    )
    _check(results)
    test, validation = _read_rows(results, "test"), _read_rows(results, "validation")
    only = {model: trivial_baseline.only_answer(task, rows) for model, rows in test.items()}
    return replace(
        results,
        resampled=resampled(task, test),
        validated=resampled(task, validation),
        only_answers={model: answer for model, answer in only.items() if answer is not None},
    )


def _read_candidate(recipe: str, keep: str, benchmarks: Mapping[str, Benchmark]) -> CandidateResults:
    name, options = candidate_name(recipe, keep), _options(recipe, keep)
    if name not in benchmarks:
        raise StageError(f"{BENCHMARKS} has no {name}: run `python -m tasks.benchmark` again")
    return CandidateResults(
        recipe=recipe,
        keep=keep,
        decision=_read(decision_file(name), Decision, f"search {options}"),
        evaluation=_read(EVALUATIONS / f"{name}.json", Evaluation, f"evaluate {options}"),
        benchmark=benchmarks[name],
        search_curve=_read_curve(SEARCH_CURVES / f"{name}.jsonl", f"search {options}"),
        curve=_read_curve(CURVES / f"{name}.jsonl", f"finetune {options}"),
    )


def _read_exports(name: str) -> Exports:
    return _read(EXPORTS / f"{name}.json", Exports, _export_command(name))


def _export_command(name: str) -> str:
    return "export_dense" if name == "dense" else f"export {_options(*recipe_and_keep(name))}"


def _read_rows(results: Results, split: Split) -> dict[ScoredModel, pd.DataFrame]:
    """What each row contributed to each model, all of as many rows."""
    count = (results.dense.score if split == "test" else results.dense.validation).rows
    commands = {one.name: f"evaluate {_options(one.recipe, one.keep)}" for one in results.candidates}
    commands |= {exported_name(name): _export_command(name) for name in results.exports}
    found: dict[ScoredModel, pd.DataFrame] = {}
    for name, command in {"dense": "dense", **commands}.items():
        for model, rows in read_rows(Path(), name, command, split).groupby("model", sort=False):
            found[name, str(model)] = rows
            if len(rows) != count:
                raise StageError(f"{rows_file(name)} has other {split} rows: run `python -m tasks.{command}` again")
    return found


def read_rows(workspace: Path, name: str, command: str, split: Split = "test") -> pd.DataFrame:
    """What each row contributed to the models of a candidate, or to `dense`, its control and the trivial baseline."""
    path = rows_file(name)
    try:
        return pd.read_parquet(workspace / path, filters=[("split", "==", split)]).drop(columns="split")
    except FileNotFoundError as error:
        raise StageError(f"{path} does not exist: run `python -m tasks.{command}`") from error
    except (OSError, ValueError) as error:
        raise StageError(f"{path} is malformed ({error}): run `python -m tasks.{command}` again") from error


def _options(recipe: str, keep: str) -> str:
    return f"--recipe {recipe} --keep {keep}"


def _read(path: Path, kind: type[Content], command: str) -> Content:
    return _parse(path, _text(path, command), kind, command)


def _read_curve(path: Path, command: str) -> Curve:
    return tuple(_parse(path, line, Point, command) for line in _text(path, command).splitlines())


def _text(path: Path, command: str) -> str:
    try:
        return path.read_text()
    except FileNotFoundError as error:
        raise StageError(f"{path} does not exist: run `python -m tasks.{command}`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StageError(f"{path} cannot be read ({error}): run `python -m tasks.{command}` again") from error


def _parse(path: Path, text: str, kind: type[Content], command: str) -> Content:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise StageError(
            f"{path} is malformed ({where}: {first['msg']}): run `python -m tasks.{command}` again"
        ) from error


def _check(results: Results) -> None:
    """Files of different runs do not mix: same targets and same test rows for all."""
    names = {target.name for target in results.targets}
    for one in results.candidates:
        options = _options(one.recipe, one.keep)
        if names != set(one.decision.ranks):
            raise StageError(
                f"{decision_file(one.name)} ranks other targets than {TARGETS} has: "
                f"run `python -m tasks.search {options}` again"
            )
        if names != set(one.evaluation.targets):
            raise StageError(
                f"{EVALUATIONS / one.name}.json measures other targets than {TARGETS} has: "
                f"run `python -m tasks.evaluate {options}` again"
            )
        scores = filter(None, (one.evaluation.shaped, one.evaluation.factorized, one.evaluation.recovered))
        if {score.rows for score in scores} != {results.dense.score.rows}:
            raise StageError(
                f"{EVALUATIONS / one.name}.json and {DENSE_METRICS} count different test rows: "
                f"run `python -m tasks.evaluate {options}` again"
            )
