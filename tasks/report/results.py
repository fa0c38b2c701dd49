"""Read the results of a study from the files of its stages, and check them against each other."""

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
from tasks.artifacts.metrics import METRICS, Metric
from tasks.artifacts.names import candidate_name, recipe_and_keep
from tasks.artifacts.paths import (
    CURVES,
    EVALUATIONS,
    EXPORTS,
    SEARCH_CURVES,
    TARGETS,
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
from tasks.nlp_tasks import kind_of
from tasks.report.choose_candidate import Choice, Limits, Measured, Promotion, best_first, choose, smallest_first
from tasks.runtime.stage_runner import StageError
from tasks.scoring import trivial_baseline
from tasks.scoring.bootstrap import Interval, interval, resampled, standard_error

Content = TypeVar("Content", bound=BaseModel)


class Point(BaseModel):
    """A point of a training curve; measures of a method stand in it under names of their own."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)

    step: int
    loss: float
    """Task loss and all terms that the method adds to it."""
    learning_rate: float
    grad_norm: float
    task_loss: float | None = None
    """Left out where it equals `loss`."""

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
"""A scored model: the file of its per-example results and its name there, such as ("kfac-0.5", "recovered")."""
DENSE: ScoredModel = ("dense", "dense")
CONTROL: ScoredModel = ("dense", "control")
TRIVIAL: ScoredModel = ("dense", trivial_baseline.TRIVIAL)


@dataclass(frozen=True)
class CandidateResults:
    """The results of all stages for one candidate."""

    recipe: str
    keep: str
    decision: Decision
    evaluation: Evaluation
    benchmark: Benchmark
    search_curve: Curve
    """The curve of shaping and rank search."""
    curve: Curve
    """The curve of recovery fine-tuning."""

    @property
    def name(self) -> str:
        return candidate_name(self.recipe, self.keep)

    @property
    def shaped(self) -> float | None:
        """The metric after shaping and before the factorization; None where nothing was shaped."""
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
    """Parameters of the original model by kind."""
    dense: DenseReport
    curve: Curve
    control: str
    """The recipe whose recovery fine-tuning the control gets."""
    control_curve: Curve
    candidates: tuple[CandidateResults, ...]
    exports: Mapping[str, Exports]
    """By name, `dense` and the exported candidates; empty where none was exported."""
    limits: Limits
    """The limits of a promotion."""
    resampled: Mapping[ScoredModel, np.ndarray]
    """The metric of each model on the same resamples of the test examples, `(resamples,)` each."""
    validated: Mapping[ScoredModel, np.ndarray]
    """The same on the validation examples, for models that could be shipped."""
    only_answers: Mapping[ScoredModel, str]
    """The answer of each model that gives the same class, tag or number for every test example."""

    @property
    def metric(self) -> Metric:
        """The task's metric."""
        return METRICS[self.task.metric]

    @property
    def target_parameters(self) -> int:
        """Parameters of the target layers of the original model."""
        return sum(target.parameters for target in self.targets)

    @property
    def searches_trained(self) -> bool:
        """Whether any candidate was trained before its factorization."""
        return any(candidate.decision.steps for candidate in self.candidates)

    @property
    def has_shaped(self) -> bool:
        """Whether the weights of any candidate were shaped."""
        return any(candidate.decision.average_rank is not None for candidate in self.candidates)

    @property
    def measures(self) -> list[str]:
        """Names of the measures in training curves besides the loss, in the order in which they appear."""
        curves = [curve for candidate in self.candidates for curve in (candidate.search_curve, candidate.curve)]
        return list(dict.fromkeys(name for curve in curves for point in curve for name in point.measures))

    @property
    def has_sparse_rows(self) -> bool:
        """Whether any candidate has rows of a residual beside its factors."""
        return any(size.rows for candidate in self.candidates for size in candidate.evaluation.targets.values())

    @property
    def full_rank(self) -> float:
        """The largest possible rank, as a mean over the targets."""
        return sum(min(target.out_features, target.in_features) for target in self.targets) / len(self.targets)

    def difference(self, model: ScoredModel, reference: ScoredModel) -> Interval:
        """Return the interval of the model's metric minus the reference's, in the metric's units."""
        return interval(self.resampled[model] - self.resampled[reference])

    def gain(self, model: ScoredModel, reference: ScoredModel) -> int:
        """Return 1 if `model` is significantly better than the reference, -1 if worse, and 0 if neither."""
        sign = self.difference(model, reference).sign
        return -sign if self.metric.lower_is_better else sign

    def validation_difference(self, candidate: CandidateResults) -> Interval:
        """Return the interval of its metric minus the original model's, on the validation examples."""
        return interval(self.validated[candidate.after] - self.validated[DENSE])

    @cached_property
    def measured(self) -> Mapping[str, Measured]:
        """Candidate → the numbers that are limited and by which candidates are ordered, on the validation examples."""
        return {
            candidate.name: Measured(
                metric=candidate.evaluation.validation.metric,
                teacher=self.dense.validation.metric,
                standard_error=standard_error(self.validated[candidate.after] - self.validated[DENSE]),
                parameters=candidate.evaluation.target_parameters,
                keep=candidate.evaluation.target_parameters / self.target_parameters,
                speedup=candidate.benchmark.speedup.median,
            )
            for candidate in self.candidates
        }

    @cached_property
    def choice(self) -> Choice:
        """The candidate that `eckart promote` takes."""
        return choose(self.measured, self.task.metric, self.limits)

    def best(self, candidates: Iterable[CandidateResults]) -> CandidateResults | None:
        """Return the best one on validation examples, of equal ones the smallest; None of none."""
        return min(candidates, key=lambda model: best_first(self.measured[model.name], self.task.metric), default=None)

    def smallest(self, candidates: Iterable[CandidateResults]) -> CandidateResults | None:
        """Return the smallest one, of equally small ones the best on validation examples; None of none."""
        return min(
            candidates, key=lambda model: smallest_first(self.measured[model.name], self.task.metric), default=None
        )

    def named(self, name: str) -> CandidateResults:
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def of(self, recipe: str) -> list[CandidateResults]:
        """Return the candidates of a recipe."""
        return [candidate for candidate in self.candidates if candidate.recipe == recipe]

    def at(self, keep: str) -> list[CandidateResults]:
        """Return the candidates at `keep`, best on test examples first, of equal ones as a promotion orders them."""

        def order(candidate: CandidateResults) -> tuple[float, ...]:
            by_validation = best_first(self.measured[candidate.name], self.task.metric)
            return -self.metric.goodness(candidate.recovered), *by_validation

        return sorted((candidate for candidate in self.candidates if candidate.keep == keep), key=order)

    def is_best(self, candidate: CandidateResults) -> bool:
        """Whether no candidate at its keep has a better metric on test examples."""
        return candidate.recovered == self.at(candidate.keep)[0].recovered

    def rivals(self, candidate: CandidateResults) -> list[CandidateResults]:
        """Return the candidates at its keep with another metric that is not significantly different."""
        others = [other for other in self.at(candidate.keep) if other.recovered != candidate.recovered]
        return [other for other in others if not self.gain(candidate.after, other.after)]

    def metric_of(self, model: ScoredModel) -> float:
        """Return the test metric of the original model, the control or the trivial baseline."""
        if model == TRIVIAL:
            return self.dense.trivial
        return (self.dense if model == DENSE else self.dense.control).score.metric

    def spans_decades(self, metrics: Iterable[float]) -> bool:
        """Whether `metrics` are too different for an even scale."""
        values = list(metrics)
        return not self.metric.bounded and max(values) > 10 * min(values) > 0

    def retained(self, metric: float, reference: ScoredModel) -> float | None:
        """Return the share of the reference's metric that `metric` is; None where the quotient would mislead."""
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
    layers = _read(TARGETS, Targets, "importance")
    results = Results(
        name=study.name,
        recipes=study.recipes,
        keeps=keeps,
        goals=study.goals,
        task=task,
        targets=layers.targets,
        census=layers.census,
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
    only = {model: kind_of(task).only_answer(rows) for model, rows in test.items()}
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
    """Return the per-example results of each model, all of equally many examples."""
    count = (results.dense.score if split == "test" else results.dense.validation).rows
    commands = {
        candidate.name: f"evaluate {_options(candidate.recipe, candidate.keep)}" for candidate in results.candidates
    }
    commands |= {exported_name(name): _export_command(name) for name in results.exports}
    by_model: dict[ScoredModel, pd.DataFrame] = {}
    for name, command in {"dense": "dense", **commands}.items():
        for model, rows in read_rows(Path(), name, command, split).groupby("model", sort=False):
            by_model[name, str(model)] = rows
            if len(rows) != count:
                raise StageError(f"{rows_file(name)} has other {split} examples: run `python -m tasks.{command}` again")
    return by_model


def read_rows(workspace: Path, name: str, command: str, split: Split = "test") -> pd.DataFrame:
    """Return the per-example results of a candidate's models, or of `dense`, its control and the trivial baseline."""
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
    """Check that all files are of one run: the same targets and the same number of test examples."""
    names = {target.name for target in results.targets}
    for candidate in results.candidates:
        name, evaluation, options = candidate.name, candidate.evaluation, _options(candidate.recipe, candidate.keep)
        if names != set(candidate.decision.ranks):
            raise StageError(
                f"{decision_file(name)} ranks other targets than {TARGETS} has: "
                f"run `python -m tasks.search {options}` again"
            )
        if names != set(evaluation.targets):
            raise StageError(
                f"{EVALUATIONS / name}.json measures other targets than {TARGETS} has: "
                f"run `python -m tasks.evaluate {options}` again"
            )
        scores = filter(None, (evaluation.shaped, evaluation.factorized, evaluation.recovered))
        if {score.rows for score in scores} != {results.dense.score.rows}:
            raise StageError(
                f"{EVALUATIONS / name}.json and {DENSE_METRICS} count different test examples: "
                f"run `python -m tasks.evaluate {options}` again"
            )
