"""Read the results of a study from the files of its stages, and check that these files belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from pydantic import BaseModel, ValidationError

from eckart.model.targets import Target, Targets
from tasks.artifacts.decision import Decision, decision_file
from tasks.artifacts.errors import StageError
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
from tasks.config import params_file, schema
from tasks.nlp_tasks import kind_of
from tasks.report.results import CandidateResults, Curve, Point, Results, ScoredModel, Settings
from tasks.scoring.bootstrap import resampled

Content = TypeVar("Content", bound=BaseModel)


def load_results() -> Results:
    """Load the results of the study in the current folder.

    Raises:
        StageError: a file is missing or malformed, or belongs to another run than the rest.
    """
    study = params_file.section("study", schema.Study)
    keeps, exported = params_file.keeps(), params_file.exported()
    task = _read(SPLITS / "task.json", Task, "extract")
    benchmarks = _read(BENCHMARKS, Benchmarks, "benchmark").root
    layers = _read(TARGETS, Targets, "importance")
    dense = _read(DENSE_METRICS, DenseReport, "dense")
    candidates = tuple(_read_candidate(recipe, keep, benchmarks) for recipe in study.recipes for keep in keeps)
    exports = {
        name: _read(EXPORTS / f"{name}.json", Exports, _export_command(name))
        for name in (["dense", CONTROL_EXPORT, *exported] if exported else [])
    }
    _check(layers.targets, dense, candidates)
    test = _read_all_predictions("test", dense.score.examples, candidates, exports)
    validation = _read_all_predictions("validation", dense.validation.examples, candidates, exports)
    only = {model: kind_of(task).only_answer(predictions) for model, predictions in test.items()}
    return Results(
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
        dense=dense,
        curve=_read_curve(TEACHER_CURVE, "teacher"),
        control=params_file.section("study.control", str),
        control_curve=_read_curve(CONTROL_CURVE, "control"),
        candidates=candidates,
        exports=exports,
        limits=params_file.section("promotion", schema.Promotion),
        resampled=resampled(task, test),
        validated=resampled(task, validation),
        only_answers={model: answer for model, answer in only.items() if answer is not None},
    )


def _load_settings() -> Settings:
    return Settings(
        seed=params_file.section("seed", schema.Seed),
        data=params_file.section("data", schema.Data),
        model=params_file.section("model", schema.Model),
        teacher=params_file.section("teacher", schema.Training),
        trainer=params_file.section("trainer", schema.Trainer),
        benchmark=params_file.section("benchmark", schema.Benchmark),
        recipes=params_file.section("recipes", dict[str, Any]),
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


def _read_all_predictions(
    split: Split, count: int, candidates: Iterable[CandidateResults], exports: Iterable[str]
) -> dict[ScoredModel, pd.DataFrame]:
    """Load the per-example results of all models, and check that each has `count` examples."""
    commands = {"dense": "dense"}
    commands |= {each.name: f"evaluate {_options(each.recipe, each.keep)}" for each in candidates}
    commands |= {exported_name(name): _export_command(name) for name in exports}
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


def _check(targets: Iterable[Target], dense: DenseReport, candidates: Iterable[CandidateResults]) -> None:
    """Check that all files belong to one run: they have the same targets and the same number of test examples."""
    names = {target.name for target in targets}
    for candidate in candidates:
        evaluation, file = candidate.evaluation, EVALUATIONS / f"{candidate.name}.json"
        scores = filter(None, (evaluation.shaped, evaluation.factorized, evaluation.recovered))
        options = _options(candidate.recipe, candidate.keep)
        if names != {*candidate.decision.ranks}:
            raise _stale(f"{decision_file(candidate.name)} ranks other targets than {TARGETS} has", f"search {options}")
        if names != {*evaluation.targets}:
            raise _stale(f"{file} measures other targets than {TARGETS} has", f"evaluate {options}")
        if {score.examples for score in scores} != {dense.score.examples}:
            raise _stale(f"{file} and {DENSE_METRICS} count different test examples", f"evaluate {options}")


def _stale(problem: str, command: str) -> StageError:
    """Return an error that asks to run a stage again."""
    return StageError(f"{problem}: run `python -m tasks.{command}` again")
