"""Load the results of a study from the files of its stages, and check that these files belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eckart.model.census import Census
from eckart.model.targets import Target, Targets
from tasks.artifacts.decision import Decision, decision_file
from tasks.artifacts.metrics import METRICS, Metric
from tasks.artifacts.names import candidate_name, recipe_and_keep
from tasks.artifacts.paths import CONTROL_EXPORT, CURVES, EVALUATIONS, EXPORTS, SEARCH_CURVES, TARGETS, exported_name
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
    predictions_file,
)
from tasks.artifacts.task_spec import SPLITS, Split, Task
from tasks.config import schema
from tasks.nlp_tasks import kind_of
from tasks.report.choose_candidate import Choice, Measured, best_first, choose
from tasks.runtime.stage_runner import StageError
from tasks.scoring import trivial_baseline
from tasks.scoring.bootstrap import Interval, interval, resampled, standard_error

Content = TypeVar("Content", bound=BaseModel)


class Point(BaseModel):
    """Point of a training curve. Methods may add measures with other names."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)

    step: int
    loss: float
    """The training loss: the task loss plus all terms that the method adds."""
    learning_rate: float
    grad_norm: float
    task_loss: float | None = None
    """None if it equals `loss`."""

    @property
    def compared_loss(self) -> float:
        """The task loss, which can be compared between methods."""
        return self.loss if self.task_loss is None else self.task_loss

    @property
    def measures(self) -> dict[str, float]:
        return dict(self.__pydantic_extra__)


Curve = tuple[Point, ...]
"""The points of a training curve; empty if nothing was trained."""

ScoredModel = tuple[str, str]
"""Key of a scored model: the name of the file with its per-example results and its name in that file.

Example: ("kfac-0.5", "recovered").
"""
DENSE: ScoredModel = ("dense", "dense")
CONTROL: ScoredModel = ("dense", "control")
TRIVIAL: ScoredModel = ("dense", trivial_baseline.TRIVIAL)


@dataclass(frozen=True)
class CandidateResults:
    """Results of all stages for one candidate."""

    recipe: str
    keep: str
    decision: Decision
    evaluation: Evaluation
    benchmark: Benchmark
    search_curve: Curve
    """Training curve of shaping and rank search."""
    curve: Curve
    """Training curve of recovery fine-tuning."""

    @property
    def name(self) -> str:
        return candidate_name(self.recipe, self.keep)

    @property
    def shaped(self) -> float | None:
        """The metric after shaping and before the factorization; None if nothing was shaped."""
        return None if self.evaluation.shaped is None else self.evaluation.shaped.metric

    @property
    def factorized(self) -> float | None:
        """The metric before recovery; None if the model is only made smaller during recovery."""
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
class Settings:
    """Parameters of a study that reports describe."""

    seed: int
    data: schema.Data
    model: schema.Model
    teacher: schema.Training
    trainer: schema.Trainer
    benchmark: schema.Benchmark
    recipes: Mapping[str, Any]
    """Recipe → its parts as plain data, in the format of params.yaml."""


@dataclass(frozen=True)
class Results:
    """Results of a study. Candidates are sorted by recipe, then by keep, both in the order of params.yaml."""

    name: str
    recipes: tuple[str, ...]
    keeps: tuple[str, ...]
    goals: tuple[schema.Goal, ...]
    figures: tuple[schema.FigurePart, ...]
    """The papers' figures that the study asks for."""
    settings: Settings
    task: Task
    targets: tuple[Target, ...]
    census: Census
    """Numbers of parameters of the original model, by kind of layer."""
    calibration_warnings: tuple[str, ...]
    """Warnings about misleading calibration data, such as too few tokens."""
    dense: DenseReport
    curve: Curve
    control: str
    """The recipe that the control takes its recovery fine-tuning from."""
    control_curve: Curve
    candidates: tuple[CandidateResults, ...]
    exports: Mapping[str, Exports]
    """`dense` or name of an exported candidate → its exported files; empty if nothing was exported."""
    limits: schema.Limits
    """The limits that a candidate must meet to be promoted."""
    resampled: Mapping[ScoredModel, np.ndarray]
    """Model → its metric on resamples of the test examples, `(resamples,)`. All models have the same resamples."""
    validated: Mapping[ScoredModel, np.ndarray]
    """Model → its metric on resamples of the validation examples; only for models that were scored on these."""
    only_answers: Mapping[ScoredModel, str]
    """Model → its answer, for models that give the same class, tag or number for every test example."""

    @property
    def machines(self) -> str:
        """The machines that timed the models; empty if unknown."""
        return "; ".join(dict.fromkeys(filter(None, (each.benchmark.machine for each in self.candidates))))

    @property
    def metric(self) -> Metric:
        return METRICS[self.task.metric]

    @property
    def target_parameters(self) -> int:
        """Number of parameters in the target layers of the original model."""
        return sum(target.parameters for target in self.targets)

    @property
    def searches_trained(self) -> bool:
        """Whether any candidate was trained before its factorization."""
        return any(candidate.decision.steps for candidate in self.candidates)

    @property
    def fine_tuned(self) -> bool:
        """Whether the original model or any candidate was trained."""
        return any((self.curve, self.control_curve, *(candidate.curve for candidate in self.candidates)))

    @property
    def has_shaped(self) -> bool:
        """Whether the weights of any candidate were shaped."""
        return any(candidate.decision.average_rank is not None for candidate in self.candidates)

    @property
    def measures(self) -> list[str]:
        """Names of the measures that methods added to training curves, in order of appearance."""
        curves = [curve for candidate in self.candidates for curve in (candidate.search_curve, candidate.curve)]
        return list(dict.fromkeys(name for curve in curves for point in curve for name in point.measures))

    @property
    def has_sparse_rows(self) -> bool:
        """Whether any candidate has a sparse residual, which consists of some rows, besides its factors."""
        return any(size.rows for candidate in self.candidates for size in candidate.evaluation.targets.values())

    @property
    def full_rank(self) -> float:
        """The mean, over the targets, of the full rank: the smaller dimension of the weight."""
        return sum(min(target.out_features, target.in_features) for target in self.targets) / len(self.targets)

    def difference(self, model: ScoredModel, reference: ScoredModel) -> Interval:
        """Return the interval of the difference in the test metric: model minus reference."""
        return interval(self.resampled[model] - self.resampled[reference])

    def gain(self, model: ScoredModel, reference: ScoredModel) -> int:
        """Return 1 if `model` is significantly better than the reference, -1 if significantly worse, else 0."""
        sign = self.difference(model, reference).sign
        return -sign if self.metric.lower_is_better else sign

    def validation_difference(self, candidate: CandidateResults) -> Interval:
        """Return the interval of the difference in the validation metric: candidate minus original model."""
        return interval(self.validated[candidate.after] - self.validated[DENSE])

    @cached_property
    def measured(self) -> Mapping[str, Measured]:
        """Candidate → the quantities used for limits and for sorting; metrics are those on validation examples."""
        return {
            candidate.name: Measured(
                metric=candidate.evaluation.validation.metric,
                dense=self.dense.validation.metric,
                standard_error=standard_error(self.validated[candidate.after] - self.validated[DENSE]),
                parameters=candidate.evaluation.target_parameters,
                keep=candidate.evaluation.target_parameters / self.target_parameters,
                speedup=candidate.benchmark.speedup.median,
            )
            for candidate in self.candidates
        }

    @cached_property
    def choice(self) -> Choice:
        """The candidate that `eckart promote` chooses."""
        return choose(self.measured, self.task.metric, self.limits)

    def best(self, candidates: Iterable[CandidateResults]) -> CandidateResults | None:
        """Return the candidate with the best validation metric, the smallest in a tie; None if there are none."""
        return min(candidates, key=lambda model: best_first(self.measured[model.name], self.task.metric), default=None)

    def smallest(self, candidates: Iterable[CandidateResults]) -> CandidateResults | None:
        """Return the smallest candidate, with the best validation metric in a tie; None if there are none."""
        return min(
            candidates,
            key=lambda model: best_first(self.measured[model.name], self.task.metric)[::-1],  # fewest parameters first
            default=None,
        )

    def named(self, name: str) -> CandidateResults:
        return next(candidate for candidate in self.candidates if candidate.name == name)

    def of(self, recipe: str) -> list[CandidateResults]:
        """Return the candidates of a recipe."""
        return [candidate for candidate in self.candidates if candidate.recipe == recipe]

    def at(self, keep: str) -> list[CandidateResults]:
        """Return the candidates at `keep`, best test metric first; ties are ordered as for a promotion."""
        return sorted((candidate for candidate in self.candidates if candidate.keep == keep), key=self.best_on_test)

    def best_on_test(self, candidate: CandidateResults) -> tuple[float, ...]:
        """Return a sort key: the best test metric first; ties are ordered as for a promotion."""
        by_validation = best_first(self.measured[candidate.name], self.task.metric)
        return -self.metric.goodness(candidate.recovered), *by_validation

    def metric_of(self, model: ScoredModel) -> float:
        """Return the test metric of a model that was scored in torch, or of an exported file."""
        if model == TRIVIAL:
            return self.dense.trivial
        if model in (DENSE, CONTROL):
            return (self.dense if model == DENSE else self.dense.control).score.metric
        files = {(exported_name(name), runtime): file for name, both in self.exports.items() for runtime, file in both}
        if model in files:
            return files[model].score.metric
        name, step = model
        metric: float = getattr(self.named(name), step)
        return metric

    def retained(self, metric: float, reference: ScoredModel) -> float | None:
        """Return `metric` ÷ the reference's metric, inverted if lower is better; None if that would be misleading."""
        return self.metric.retained(metric, self.metric_of(reference))


def load_results() -> Results:
    """Load the results of the study in the current folder.

    Raises:
        StageError: a file is missing or malformed, or belongs to another run than the rest.
    """
    study = schema.section("study", schema.Study)
    keeps, exported = schema.keeps(), schema.exported()
    task = _read(SPLITS / "task.json", Task, "extract")
    benchmarks = _read(BENCHMARKS, Benchmarks, "benchmark").root
    layers = _read(TARGETS, Targets, "importance")
    results = Results(
        name=study.name,
        recipes=study.recipes,
        keeps=keeps,
        goals=study.goals,
        figures=tuple(study.figures),
        settings=_load_settings(),
        task=task,
        targets=layers.targets,
        census=layers.census,
        calibration_warnings=layers.warnings,
        dense=_read(DENSE_METRICS, DenseReport, "dense"),
        curve=_read_curve(TEACHER_CURVE, "teacher"),
        control=schema.section("study.control", str),
        control_curve=_read_curve(CONTROL_CURVE, "control"),
        candidates=tuple(_read_candidate(recipe, keep, benchmarks) for recipe in study.recipes for keep in keeps),
        exports={
            name: _read(EXPORTS / f"{name}.json", Exports, _export_command(name))
            for name in (["dense", CONTROL_EXPORT, *exported] if exported else [])
        },
        limits=schema.section("promotion", schema.Promotion),
        resampled={},
        validated={},
        only_answers={},
    )
    _check(results)
    test, validation = _read_predictions(results, "test"), _read_predictions(results, "validation")
    only = {model: kind_of(task).only_answer(predictions) for model, predictions in test.items()}
    return replace(
        results,
        resampled=resampled(task, test),
        validated=resampled(task, validation),
        only_answers={model: answer for model, answer in only.items() if answer is not None},
    )


def _load_settings() -> Settings:
    return Settings(
        seed=schema.section("seed", schema.Seed),
        data=schema.section("data", schema.Data),
        model=schema.section("model", schema.Model),
        teacher=schema.section("teacher", schema.Training),
        trainer=schema.section("trainer", schema.Trainer),
        benchmark=schema.section("benchmark", schema.Benchmark),
        recipes=schema.section("recipes", dict[str, Any]),
    )


def _read_candidate(recipe: str, keep: str, benchmarks: Mapping[str, Benchmark]) -> CandidateResults:
    name, options = candidate_name(recipe, keep), _options(recipe, keep)
    if name not in benchmarks:
        raise _stale(f"{BENCHMARKS} has no {name}", "benchmark")
    return CandidateResults(
        recipe=recipe,
        keep=keep,
        decision=_read(decision_file(name), Decision, f"search {options}"),
        evaluation=_read(EVALUATIONS / f"{name}.json", Evaluation, f"evaluate {options}"),
        benchmark=benchmarks[name],
        search_curve=_read_curve(SEARCH_CURVES / f"{name}.jsonl", f"search {options}"),
        curve=_read_curve(CURVES / f"{name}.jsonl", f"finetune {options}"),
    )


def _export_command(name: str) -> str:
    original = name in ("dense", CONTROL_EXPORT)
    return "export_dense" if original else f"export {_options(*recipe_and_keep(name))}"


def _read_predictions(results: Results, split: Split) -> dict[ScoredModel, pd.DataFrame]:
    """Load the per-example results of all models, and check that each has the expected number of examples."""
    count = (results.dense.score if split == "test" else results.dense.validation).examples
    commands = {"dense": "dense"}
    commands |= {each.name: f"evaluate {_options(each.recipe, each.keep)}" for each in results.candidates}
    commands |= {exported_name(name): _export_command(name) for name in results.exports}
    by_model: dict[ScoredModel, pd.DataFrame] = {}
    for name, command in commands.items():
        for model, predictions in read_predictions(Path(), name, command, split).groupby("model", sort=False):
            by_model[name, str(model)] = predictions
            if len(predictions) != count:
                raise _stale(f"{predictions_file(name)} has other {split} examples", command)
    return by_model


def read_predictions(workspace: Path, name: str, command: str, split: Split = "test") -> pd.DataFrame:
    """Load the per-example results of a split from the file `predictions_file(name)`.

    Error messages name `command`, the stage that makes this file.
    """
    path = predictions_file(name)
    try:
        return pd.read_parquet(workspace / path, filters=[("split", "==", split)]).drop(columns="split")
    except FileNotFoundError as error:
        raise StageError(f"{path} does not exist: run `python -m tasks.{command}`") from error
    except (OSError, ValueError) as error:
        raise _stale(f"{path} is malformed ({error})", command) from error


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
        raise _stale(f"{path} cannot be read ({error})", command) from error


def _parse(path: Path, text: str, kind: type[Content], command: str) -> Content:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise _stale(f"{path} is malformed ({where}: {first['msg']})", command) from error


def _check(results: Results) -> None:
    """Check that all files belong to one run: they have the same targets and the same number of test examples."""
    names = {target.name for target in results.targets}
    for candidate in results.candidates:
        evaluation, file = candidate.evaluation, EVALUATIONS / f"{candidate.name}.json"
        scores = filter(None, (evaluation.shaped, evaluation.factorized, evaluation.recovered))
        options = _options(candidate.recipe, candidate.keep)
        if names != {*candidate.decision.ranks}:
            raise _stale(f"{decision_file(candidate.name)} ranks other targets than {TARGETS} has", f"search {options}")
        if names != {*evaluation.targets}:
            raise _stale(f"{file} measures other targets than {TARGETS} has", f"evaluate {options}")
        if {score.examples for score in scores} != {results.dense.score.examples}:
            raise _stale(f"{file} and {DENSE_METRICS} count different test examples", f"evaluate {options}")


def _stale(problem: str, command: str) -> StageError:
    """Return an error that asks to run a stage again."""
    return StageError(f"{problem}: run `python -m tasks.{command}` again")
