"""Log study runs to MLflow: a parent run for each study run, and a child run for each candidate made in it.

All logged values come from the outcomes and outputs of stages. So a study run can later log everything that MLflow
missed: its database may be new, its server may have been down, or somebody may have run `dvc repro`. A failure of
MLflow never stops a study.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import psutil
from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LifecycleStage,
    LoggedModelStatus,
    Metric,
    Param,
    Run,
    RunTag,
    SourceType,
)
from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.mlflow_tags import (
    MLFLOW_GIT_COMMIT,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_SOURCE_NAME,
    MLFLOW_SOURCE_TYPE,
)
from pydantic import BaseModel

from flows.engine.stages import Outcome, Planned
from flows.environment.redaction import redact
from flows.environment.settings import MLFLOW_ADDRESS
from flows.tracking import candidate_models, database
from tasks.artifacts import stage_inputs
from tasks.artifacts.errors import EckartError
from tasks.artifacts.names import FIGURES_STAGE, candidate_of, recipe_and_keep, stage_name
from tasks.artifacts.paths import CONTROL_EXPORT
from tasks.report.choose_candidate import CHOICE, Chosen

log = logging.getLogger(__name__)
P = ParamSpec("P")

_LOCAL = SourceType.to_string(SourceType.LOCAL)
_BACKFILLED = {"eckart.backfilled": "true", MLFLOW_SOURCE_NAME: "dvc.lock", MLFLOW_SOURCE_TYPE: _LOCAL}
_POLL = 1.0  # seconds between two reads of a growing training curve
_PROCESS = "eckart.process"
_WORKSPACE = "eckart.workspace"
_REPORTS = {"compare": None, FIGURES_STAGE: "figures"}  # stage → folder of what it wrote, in the parent run
_TIMES = "benchmark"  # name of the stage that measures the speed of all candidates
_SPEED = "speedup.median"
_TIMES_KEY = "dvc.times"  # tag of a candidate's run: key of the outcome of `benchmark` whose times were logged
LINEAGE = "lineage.json"
"""Artifact of the parent run: each candidate's run id, and each stage's status, key and digests of its outputs."""
_BEST_METRICS = ("validation.metric", "recovered.metric", "target_parameters")  # logged in the parent run, too
VIEW = "candidates"
"""Name of a view of MLflow's list of runs, which shows columns of metrics; the list itself shows none by default."""
_VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"  # tag of the experiment, in which MLflow's pages keep a view
_OTHER_CURVES = ("search", "control")  # folder or file names of the training curves of searches and of the control


def _mirrored(method: Callable[Concatenate[Mirror, P], None]) -> Callable[Concatenate[Mirror, P], None]:
    """Wrap a method that uses MLflow: after a first failure, log a warning and skip all further calls."""

    @wraps(method)
    def forgiving(self: Mirror, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.down:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # a store may raise any error, and none may stop the study
            self.down = True
            message = database.message_of(error)
            log.warning("MLflow cannot be used (%s); results are in DVC, and the next run backfills MLflow", message)

    return forgiving


class Mirror:
    """The runs in MLflow of one study run in the working directory: a parent run, and child runs of candidates.

    Args:
        study: name of the study.
        planned: all stages of the study run, upstream first.
        tags: tags of the results' origin, see `origin`.
    """

    def __init__(self, study: str, planned: Sequence[Planned], tags: Mapping[str, str]) -> None:
        self.study = study
        self.tags = {
            "eckart.study": study,
            _PROCESS: _process(psutil.Process()),
            _WORKSPACE: f"{platform.node()} {Path.cwd()}",
        }
        self.origin = {MLFLOW_SOURCE_NAME: "eckart run", MLFLOW_SOURCE_TYPE: _LOCAL, **tags, **git()}
        """Tags of the results' origin, for the parent run and for candidates whose stages this study run executes."""
        self.down = False
        self.lineage: dict[str, str] = {}
        """Candidate → id of its run, which belongs to this study run or an earlier one."""
        self._stages: dict[str, list[str]] = {}
        for stage in planned:
            self._stages.setdefault(candidate_of(stage.name), []).append(stage.name)
        self._shared = _shared(planned)
        cached = [stage.cached for stage in planned if stage.cached]
        self._known_key = key_of(cached) if len(cached) == len(planned) else ""
        """Result of `key_of` for all stages if all are up to date before the study run; else empty."""
        self._outcomes: dict[str, Outcome] = {}
        self._children: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._points: Counter[tuple[str, str]] = Counter()
        """Candidate and prefix of the metrics of one of its training curves → number of points that were logged."""
        self._guard = threading.RLock()
        self._machine: SystemMetricsMonitor | None = None
        """Monitor that logs this machine's CPU, memory, disk and network in the parent run every ten seconds."""

    @_mirrored
    def start(self, parameters: Mapping[str, Any]) -> None:
        """Open the parent run. If all stages are up to date, reuse a finished run with the same results, if any."""
        self.client = MlflowClient(database.address())
        self.experiment = experiment(self.client, self.study)
        self._metric = str(flatten(parameters).get("data.metric", "metric"))
        self._show_metrics()
        self._end_abandoned()
        self._parameters = _params(parameters)
        earlier = find(self.client, self.experiment, self._known_key) if self._known_key else None
        self._is_known = bool(earlier)
        self.parent = earlier or self._new_parent()

    def _new_parent(self) -> str:
        tags = {**self.tags, **self.origin}
        run = self.client.create_run(self.experiment, run_name=self._name(), tags=tags).info.run_id
        self.client.log_batch(run, params=self._parameters)
        if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            self._machine = SystemMetricsMonitor(run, tracking_uri=self.client.tracking_uri)
            self._machine.start()
        return str(run)

    def _show_metrics(self) -> None:
        """Make the view of the list of runs in which a person compares candidates, unless the experiment has it."""
        columns = [f"metrics.`{name}`" for name in _column_names(self._metric)]
        view = json.dumps({"selectedColumns": columns, "columnOrder": columns})
        if self.client.get_experiment(self.experiment).tags.get(_VIEW_TAG) != view:
            self.client.set_experiment_tag(self.experiment, _VIEW_TAG, view)

    def _columns(self, numbers: Mapping[str, float], dense: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the view, from the numbers of a candidate and of the original model."""
        values = (numbers.get("recovered.metric"), dense.get("dense.score.metric"), numbers.get("size.bytes"))
        names = _column_names(self._metric)
        columns = {name: value for name, value in zip(names, values, strict=False) if value is not None}
        if names[2] in columns:
            columns[names[2]] /= 1e6
        return columns

    def _name(self) -> str:
        """Return the name of the parent run in MLflow's list of runs: study and number of candidates."""
        count = sum(bool(candidate) for candidate in self._stages)
        return f"{self.study}: {count} candidate{'s' * (count != 1)}"

    def _end_abandoned(self) -> None:
        """End the open runs of processes that no longer exist; otherwise the runs would stay RUNNING for ever."""
        for run in self.client.search_runs([self.experiment], "attributes.status = 'RUNNING'"):
            process = run.data.tags.get(_PROCESS)
            if process and _is_gone(process):
                self.client.set_terminated(run.info.run_id, "KILLED")

    @contextmanager
    def following(self, planned: Planned) -> Iterator[None]:
        """While a stage runs, log the new points of its training curves.

        The points are logged in the candidate's run, or in the parent run if the stage belongs to no candidate.
        """
        candidate = candidate_of(planned.name)
        if candidate:
            self._open(candidate, self.origin)
        curves = [Path(path) for path in planned.writes if path.endswith(".jsonl")]
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(candidate, curves, ended))
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _watch(self, candidate: str, curves: Sequence[Path], ended: threading.Event) -> None:
        over = False
        while not over:
            over = ended.wait(_POLL)  # the curves are read once more after the end
            for file in curves:
                self._log_curve(candidate, file)

    @_mirrored
    def _open(self, candidate: str, origin: Mapping[str, str]) -> None:
        with self._guard:
            if self._is_known:  # the reused parent run has no such candidate
                self.parent, self._is_known = self._new_parent(), False
            if candidate not in self._children:
                tags = {**self.tags, **origin, MLFLOW_PARENT_RUN_ID: self.parent, "eckart.candidate": candidate}
                run = self.client.create_run(self.experiment, run_name=candidate, tags=tags)
                self._children[candidate] = run.info.run_id

    @_mirrored
    def _log_curve(self, candidate: str, file: Path) -> None:
        """Log the new points of a training curve; skip the last line if it is not completely written yet.

        A run may have two curves: a candidate's of search and fine-tuning, or the parent's of teacher and control. The
        metrics of search and control get a prefix.
        """
        part = next((name for name in _OTHER_CURVES if name in (file.parent.name, file.stem)), "")
        prefix = f"{part}." if part else ""
        curve = candidate, prefix
        text = file.read_text() if file.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        metrics = []
        for point in map(json.loads, lines[self._points[curve] :]):
            step, now = point.pop("step"), int(time.time() * 1000)
            metrics += [Metric(prefix + key, value, now, step) for key, value in point.items()]
        if metrics:
            self.client.log_batch(self._children.get(candidate, self.parent), metrics=metrics)
            self._points[curve] = len(lines)

    @_mirrored
    def record(self, outcome: Outcome) -> None:
        """Note that a stage is done. After a candidate's last stage, complete its run, or reuse an earlier one."""
        with self._guard:
            self._outcomes[outcome.stage] = outcome
            for candidate, stages in self._stages.items():
                own = [*self._shared, *stages]
                if candidate and outcome.stage in own and all(name in self._outcomes for name in own):
                    self._complete(candidate)
                if candidate and outcome.stage in (*own, _TIMES):
                    self._log_times(candidate)

    def page(self, run: str | None = None) -> str:
        """Return the URL of the page in MLflow of a run, or of the parent run. `start` must have been called."""
        address = database.address()
        server = redact(address).rstrip("/") if address.startswith("http") else MLFLOW_ADDRESS
        return f"{server}/#/experiments/{self.experiment}/runs/{run or self.parent}"

    def _complete(self, candidate: str) -> None:
        outcomes = [self._outcomes[name] for name in self._stages[candidate]]
        finished = _finished(self.client, self.experiment, key_of(outcomes))
        metrics: list[Metric] = []
        if candidate not in self._children and not finished:
            if other := self._elsewhere(candidate):
                self.lineage[candidate] = other
                return
            # Made before this study run, by `dvc repro` or while MLflow was down, from an unknown git revision.
            self._open(candidate, _BACKFILLED)
        if candidate in self._children:
            metrics = self._fill(candidate, outcomes)
            finished = _finished(self.client, self.experiment, key_of(outcomes))
            for copy in finished[1:]:  # by study runs that completed it at the same time
                self.client.set_tag(copy.info.run_id, "eckart.same_as", finished[0].info.run_id)
                self.client.set_terminated(copy.info.run_id, "KILLED")
        self.lineage[candidate] = finished[0].info.run_id
        self._models[candidate] = self._model(candidate, finished[0], outcomes, metrics)

    def _model(self, candidate: str, run: Run, outcomes: Sequence[Outcome], metrics: Sequence[Metric]) -> str:
        """Return the id of the candidate's entry in MLflow's list of models; create the entry if it does not exist."""
        if run.outputs and run.outputs.model_outputs:
            return str(run.outputs.model_outputs[0].model_id)
        key = key_of(outcomes)
        model = candidate_models.find(self.client, self.experiment, key)
        if not model or model.source_run_id != run.info.run_id:  # or it is of a run that was deleted
            tags = {"eckart.study": self.study, "eckart.candidate": candidate, candidate_models.KEY: key}
            model = candidate_models.create(self.client, run.info, candidate, outcomes, tags)
        if model.status != LoggedModelStatus.READY:
            candidate_models.log(self.client, run.info.run_id, model, outcomes, metrics or _points(_numbers(outcomes)))
        return str(model.model_id)

    def _elsewhere(self, candidate: str) -> str | None:
        """Return the id of the candidate's open run in another study run of this workspace, if there is one."""
        query = f"attributes.status = 'RUNNING' and tags.`eckart.candidate` = '{candidate}'"
        for run in self.client.search_runs([self.experiment], query):
            tags = run.data.tags
            if tags.get(_WORKSPACE) == self.tags[_WORKSPACE] and tags.get(_PROCESS) != self.tags[_PROCESS]:
                return str(run.info.run_id)
        return None

    def _fill(self, candidate: str, outcomes: Sequence[Outcome]) -> list[Metric]:
        """Log all results of a candidate in its child run, and close the run; return the metrics of its own stages."""
        # Leave out the control, which belongs to no candidate: a new control must not change the candidates' runs.
        shared = [self._outcomes[name] for name in self._shared if name != "control"]
        others = {name: value for name, value in _numbers(shared).items() if not name.startswith("dense.control.")}
        run, own = self._children[candidate], _points(_numbers(outcomes))
        self._log_curves(candidate, outcomes)
        self.client.log_batch(
            run,
            metrics=[*own, *_points({**others, **self._columns(_numbers(outcomes), others)})],
            params=_params(_parameters(candidate, [*shared, *outcomes])),
            tags=[RunTag(name, value) for name, value in trace(outcomes).items()],
        )
        self.client.log_inputs(run, _datasets([*shared, *outcomes]))
        self.client.set_terminated(run, "FINISHED")
        return own

    def _log_curves(self, candidate: str, outcomes: Sequence[Outcome]) -> None:
        """Log the points that MLflow lacks: `following` logs those of stages that run here."""
        for path in (path for outcome in outcomes for path in outcome.outs if path.endswith(".jsonl")):
            self._log_curve(candidate, Path(path))

    def _log_times(self, candidate: str) -> None:
        """In the candidate's run, log the times that the stage `benchmark` measured, unless they are already there.

        The run may be one of an earlier study run. Nothing is logged before the run is complete.
        """
        times, run = self._outcomes.get(_TIMES), self.lineage.get(candidate)
        if times and run and self.client.get_run(run).data.tags.get(_TIMES_KEY) != times.key:
            metrics = _points(_numbers([times], candidate), self._models.get(candidate))
            self.client.log_batch(run, metrics=metrics, tags=[RunTag(_TIMES_KEY, times.key)])

    def finish(self, complete: bool) -> None:
        """Close the parent run (as failed unless `complete`), and the runs of unfinished candidates as failed."""
        if self._machine:
            self._machine.finish()
        self._close(complete)

    @_mirrored
    def _close(self, complete: bool) -> None:
        if self._is_known:
            return
        for candidate, run in self._children.items():
            if candidate not in self.lineage:
                self.client.set_terminated(run, "FAILED")
        outcomes = list(self._outcomes.values())
        self._log_curves("", [outcome for outcome in outcomes if not candidate_of(outcome.stage)])
        counts = Counter(outcome.status.lower() for outcome in outcomes)
        numbers = {f"stages.{status}": float(counts[status]) for status in ("executed", "restored", "cached")}
        dense = _numbers([outcome for outcome in outcomes if outcome.stage in ("dense", "export_dense")])
        numbers |= dense
        tags = {"dvc.key": key_of(outcomes)} if complete else {}
        if chosen := _chosen(outcomes):
            tags["eckart.best"], measured = chosen
            numbers |= {f"best.{name}": measured[name] for name in _BEST_METRICS if name in measured}
            times = _numbers([outcome for outcome in outcomes if outcome.stage == _TIMES], chosen[0])
            numbers |= self._columns(measured, dense)
            numbers |= {name: value for name, value in times.items() if name == _SPEED}
        self.client.log_batch(self.parent, metrics=_points(numbers), tags=[RunTag(*tag) for tag in tags.items()])
        self.client.log_inputs(self.parent, _datasets(outcomes))
        ran = [f"{counts[status]} {status}" for status in ("executed", "restored") if counts[status]]
        self.client.update_run(self.parent, name=", ".join([self._name(), *(ran or ["none executed"])]))
        stages = {
            outcome.stage: {"status": outcome.status, "key": outcome.key, "outs": outcome.outs} for outcome in outcomes
        }
        self.client.log_dict(self.parent, {"candidates": self.lineage, "stages": stages}, LINEAGE)
        for outcome in outcomes:
            stage = outcome.stage.partition("@")[0]
            for path in outcome.outs if stage in _REPORTS else ():
                self.client.log_artifact(self.parent, path, _REPORTS[stage])
        self.client.set_terminated(self.parent, "FINISHED" if complete else "FAILED")


def _column_names(metric: str) -> tuple[str, ...]:
    """Return the names of the metrics of the view: of the study's metric, such as `accuracy`, of size and speed."""
    return metric, f"{metric} of original", "MB", _SPEED


def _chosen(outcomes: Sequence[Outcome]) -> tuple[str, dict[str, float]] | None:
    """Return the candidate that the stage `compare` chose for a promotion, and its metrics; None if it chose none."""
    if not any(str(CHOICE) in outcome.outs for outcome in outcomes):
        return None
    name = Chosen.model_validate_json(CHOICE.read_text()).candidate
    own = [outcome for outcome in outcomes if name and outcome.stage == stage_name("evaluate", name)]
    return (name, _numbers(own)) if name else None


def _shared(planned: Sequence[Planned]) -> list[str]:
    """Return the names of the stages that depend on no candidate, such as `dense`, in the order of `planned`."""
    own: set[str] = set()
    for stage in planned:  # upstream first
        if candidate_of(stage.name) or own & set(stage.upstream):
            own.add(stage.name)
    return [stage.name for stage in planned if stage.name not in own]


def experiment(client: MlflowClient, study: str) -> str:
    """Return the id of the study's experiment in MLflow; create it if needed.

    If the store is the file in the main workspace, a new experiment stores its artifacts there, too.

    Raises:
        EckartError: the experiment is in MLflow's trash.
    """
    if existing := client.get_experiment_by_name(study):
        if existing.lifecycle_stage == LifecycleStage.DELETED:
            raise EckartError(
                f"the experiment {study} was deleted in MLflow: restore it (`mlflow experiments restore "
                f"--experiment-id {existing.experiment_id}`), or write another study.name"
            )
        return existing.experiment_id
    try:
        return client.create_experiment(study, database.artifacts().resolve().as_uri() if database.is_local() else None)
    except MlflowException:
        if existing := client.get_experiment_by_name(study):  # another study run has just created it
            return existing.experiment_id
        raise


def find(client: MlflowClient, experiment: str, key: str) -> str | None:
    """Return the id of the run, of a candidate or a study, that was the first to finish with this key; see `key_of`."""
    return next((str(run.info.run_id) for run in _finished(client, experiment, key)), None)


def _finished(client: MlflowClient, experiment: str, key: str) -> list[Run]:
    """Return the finished runs with this key, the earliest end first."""
    query = f"tags.`dvc.key` = '{key}' and attributes.status = 'FINISHED'"
    return list(client.search_runs([experiment], query, order_by=["attributes.end_time ASC"]))


def key_of(outcomes: Sequence[Outcome]) -> str:
    """Return a digest of the keys of stages (`Outcome.key`). Runs with the same digest did the same computations."""
    content = json.dumps({outcome.stage: outcome.key for outcome in outcomes}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def git() -> dict[str, str]:
    """Return tags that tell the git revision, and whether tracked files differ from it; {} outside a git repository."""
    revision = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    if revision.returncode:
        return {}
    edited = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return {MLFLOW_GIT_COMMIT: revision.stdout.strip(), "git.edited": str(bool(edited)).lower()}


def trace(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return tags for finding the results of stages in DVC: keys of the stages, and digests of their outputs."""
    return {
        "dvc.key": key_of(outcomes),
        "dvc.stages": json.dumps({outcome.stage: outcome.key for outcome in outcomes}),
        "dvc.outs": json.dumps({path: md5 for outcome in outcomes for path, md5 in outcome.outs.items()}),
    }


def _points(numbers: Mapping[str, float], model: str | None = None) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(name, value, now, 0, model) for name, value in numbers.items()]


def _numbers(outcomes: Sequence[Outcome], candidate: str = "") -> dict[str, float]:
    """Return dotted name → number for all numbers in the JSON reports that the stages wrote.

    Nulls and the section `targets` are left out. Names of numbers of the original model begin with `dense`.

    Args:
        candidate: the entry to read in the output of the stage `benchmark`, which has the times of all candidates.
    """
    numbers: dict[str, float] = {}
    for outcome in outcomes:
        for path in outcome.outs:
            of_inputs = Path(path).is_relative_to(stage_inputs.FOLDER)
            if path.startswith("reports/") and path.endswith(".json") and not of_inputs:
                report = json.loads(Path(path).read_text())
                own = report[candidate] if outcome.stage == _TIMES else report
                values = flatten({name: value for name, value in own.items() if name != "targets"})
                prefix = "dense." if outcome.stage in ("dense", "export_dense") else ""
                prefix += "control." if Path(path).stem == CONTROL_EXPORT else ""
                numbers |= {prefix + name: value for name, value in values.items() if isinstance(value, int | float)}
    return numbers


def _parameters(candidate: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the parameters that the stages read. Their names do not contain the recipe, so runs can be compared."""
    recipe, keep = recipe_and_keep(candidate)
    read = flatten({name: value for outcome in outcomes for name, value in outcome.params.items()})
    own = {name.removeprefix(f"recipes.{recipe}."): value for name, value in read.items()}
    return {"recipe": recipe, "keep": keep} | {
        name: value for name, value in own.items() if not name.startswith("code.")
    }


def _params(values: Mapping[str, Any]) -> list[Param]:
    return [Param(name, str(value)) for name, value in flatten(values).items()]


def _datasets(outcomes: Sequence[Outcome]) -> list[DatasetInput]:
    """Return the data sets that the stages read, with DVC's digests, in MLflow's format for the inputs of a run."""
    read = {path: md5 for outcome in outcomes for path, md5 in outcome.deps.items() if path.endswith(".parquet")}
    return [
        DatasetInput(
            Dataset(path, md5, source_type="code", source=json.dumps({"tags": {"dvc.path": path}})),
            [InputTag("mlflow.data.context", Path(path).stem)],
        )
        for path, md5 in read.items()
    ]


def _process(process: psutil.Process) -> str:
    """Return a unique name of a process: machine, id and start time, because ids are reused."""
    # Relative to the boot, because a correction of the clock changes both times.
    began = process.create_time() - psutil.boot_time()
    return f"{platform.node()} {process.pid} {began:.2f}"


def _is_gone(name: str) -> bool:
    """Whether the named process has ended; False if it is a process of another machine."""
    node, number, _ = name.rsplit(" ", 2)
    if node != platform.node():
        return False
    try:
        return _process(psutil.Process(int(number))) != name
    except psutil.NoSuchProcess:
        return True


def flatten(content: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings and sections of params.yaml: dotted name → value. A list is a value."""
    if isinstance(content, BaseModel):
        content = content.model_dump()
    if not isinstance(content, Mapping):
        return {prefix: content}
    return {
        name: value
        for key, inner in content.items()
        for name, value in flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }
