"""Results of a study: those of each candidate, and comparisons of candidates with the original model and each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from eckart.model.census import Census
from eckart.model.targets import Target
from tasks.artifacts.decision import Decision
from tasks.artifacts.metrics import METRICS, Metric
from tasks.artifacts.names import candidate_name
from tasks.artifacts.paths import exported_name
from tasks.artifacts.results_schema import Benchmark, DenseReport, Evaluation, Exports
from tasks.artifacts.task_spec import Task
from tasks.config import schema
from tasks.report.choose_candidate import Choice, Measured, best_first, choose
from tasks.scoring import trivial_baseline
from tasks.scoring.bootstrap import Interval, interval, standard_error


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

Points = list[tuple[int, float]]
"""Step and value."""


def by_measure(curves: Mapping[str, Curve], with_loss: bool = True) -> dict[str, dict[str, Points]]:
    """Return measure → name of a curve → points, for the curves that have the measure; the task loss is one, too."""
    found: dict[str, dict[str, Points]] = {}
    for name, curve in curves.items():
        for point in curve:
            loss = {"task loss": point.compared_loss} if with_loss else {}
            for measure, value in (loss | point.measures).items():
                found.setdefault(measure, {}).setdefault(name, []).append((point.step, value))
    return found


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

    def bar(self, model: ScoredModel) -> tuple[float, float]:
        """Return the interval of the difference from the original model, shifted by the original's metric for plots."""
        ends, dense = self.difference(model, DENSE), self.metric_of(DENSE)
        return dense + ends.low, dense + ends.high

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
        """Return the candidates at `keep`."""
        return [candidate for candidate in self.candidates if candidate.keep == keep]

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
