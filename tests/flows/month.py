"""Four unattended nights: what happens before each, and the expected result.

A night is a run that the schedule would have started, in a process of its own, on a real Prefect server, MLflow store
and DVC; its results are committed to git in the morning. Only the clock is not waited for.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname
from uuid import UUID

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Scheduled
from ruamel.yaml import YAML

from flows.registry import model_package
from tests.flows import forked
from tests.flows.servers import until
from tests.flows.toy import BARE, Study, call, stale
from tests.workspace import BASE, REVIEWS, SUBJECTS, WORDS, tiny_params, write_params

MODEL = "tiny-month"
CANDIDATE = "svd-0.5"
LEEWAY = 0.05
"""Accuracy by which a candidate that knows newer examples may be worse than the champion."""
_PROMOTION = {
    "model": MODEL,
    "largest_drop": 0.3,
    "standard_errors": 0.0,
    "keep": None,
    "least_speedup": None,
    "least_gain": -LEEWAY,
}
_COMMIT = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm")


@dataclass(frozen=True)
class Night:
    before: str
    """Events since the night before, in words."""
    act: Callable[[Month], object] = lambda month: None
    state: str = "Completed"
    """The name of the run's state in Prefect in the morning."""
    champion: Literal["own", "same"] = "same"
    """In the morning: the candidate of this night, or the champion of the evening."""
    begins: timedelta = timedelta()
    """After its time."""
    killed: bool = False


@dataclass(frozen=True)
class Morning:
    """The state after a night."""

    night: Night
    run: FlowRun
    revision: str
    """The commit with the night's results."""
    champion: str
    """Its version; empty if there is none."""

    @property
    def complete(self) -> bool:
        return bool(self.run.state and self.run.state.is_completed())


@dataclass
class Month:
    """A workspace and its servers, through the nights."""

    root: Path
    prefect: Mapping[str, str]
    rows: int = 100
    mornings: list[Morning] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of all processes."""
        return BARE | dict(self.prefect)

    def begin(self, finished: Study) -> None:
        """Make and commit the workspace of the first night: a study has run and is not promoted."""
        finished.copied(self.root)
        promotion = _PROMOTION | {"largest_drop": 1.0}
        write_params(self.root, tiny_params(study={"recipes": ["svd"]}, promotion=promotion))
        self.rows = len(pd.read_csv(self.root / REVIEWS))
        for file in (REVIEWS, BASE):
            self._hand_over(file)
        self.commit("the study")
        with self._client() as client:
            flow = client.create_flow_from_name("study")
            self._deployment = client.create_deployment(flow, f"month-{self.root.parent.name}")

    def grow(self, more: int) -> None:
        """Write this many more reviews than before, every second one positive."""
        self.rows += more
        sides = [
            [
                {"text": f"the {subject} is {first} and {second}", "label": label}
                for first, second in itertools.product(words, words)
                for subject in SUBJECTS
            ]
            for label, words in WORDS.items()
        ]
        reviews = [row for pair in zip(*sides, strict=True) for row in pair]
        pd.DataFrame(reviews[: self.rows]).to_csv(self.root / REVIEWS, index=False)
        self._hand_over(REVIEWS)

    def _hand_over(self, file: str) -> None:
        """Add the folder of a file to DVC."""
        call(self.root, "dvc", "add", "-q", Path(file).parent.as_posix())

    def change(self, path: str, value: object) -> None:
        """Change a number in params.yaml."""
        params = YAML(typ="safe").load((self.root / "params.yaml").read_text())
        *sections, key = path.split(".")
        reduce(getitem, sections, params)[key] = value
        write_params(self.root, params)

    def command(self, *words: str) -> str:
        """Run `eckart WORDS`, assert that it succeeds, and return its output."""
        code, said = forked.Command(self.root, self.environment, *words).end()
        assert code == 0, said
        return said

    def commit(self, message: str) -> str:
        """Commit everything, and return the revision."""
        call(self.root, "git", "add", "-A")
        if call(self.root, "git", "status", "--porcelain"):
            call(self.root, *_COMMIT, message)
        return call(self.root, "git", "rev-parse", "HEAD").strip()

    def live_through(self, night: Night) -> Morning:
        night.act(self)
        with self._client() as client:
            run = client.create_flow_run_from_deployment(
                self._deployment,
                parameters={"promote": True},
                state=Scheduled(scheduled_time=datetime.now(UTC) - night.begins),
                name=f"night-{len(self.mornings) + 1}",
            ).id
        self._run(night.killed, run)
        revision = self.commit(night.before)
        self.mornings.append(Morning(night, self.flow_run(run), revision, self.champion()))
        return self.mornings[-1]

    def flow_run(self, run: UUID) -> FlowRun:
        """Return a run as Prefect has it now."""
        with self._client() as client:
            return client.read_flow_run(run)

    def locked(self) -> dict[str, Any]:
        """Return the entries of dvc.lock, by stage."""
        file = self.root / "dvc.lock"
        return dict(YAML(typ="safe").load(file.read_text())["stages"]) if file.exists() else {}

    def up_to_date(self) -> bool:
        """Whether nothing is stale."""
        return not stale(self.root)

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.root / 'mlflow.db'}")

    def runs(self) -> list[Run]:
        """Return all runs of MLflow."""
        experiments = [experiment.experiment_id for experiment in self.mlflow.search_experiments()]
        return list(self.mlflow.search_runs(experiments))

    def champion(self) -> str:
        """Return the version with the alias `champion`; empty if there is none."""
        try:
            return str(self.mlflow.get_model_version_by_alias(MODEL, "champion").version)
        except MlflowException:
            return ""

    def versions(self) -> dict[str, ModelVersion]:
        return {str(version.version): version for version in self.mlflow.search_model_versions(f"name = '{MODEL}'")}

    def folder(self, version: str) -> Path:
        """Return the Hugging Face folder of a version, in MLflow's store."""
        place = self.mlflow.get_model_version_download_uri(MODEL, version)
        return Path(url2pathname(urlsplit(place).path)) / model_package.MODEL

    def own(self) -> str:
        """Return the version with the files of the workspace's candidate."""
        stage = self.locked().get(f"finetune@{CANDIDATE}")
        content = stage["outs"][0]["md5"] if stage else ""
        own = [number for number, version in self.versions().items() if version.tags["dvc.md5"] == content]
        return own[0] if own else "none"

    @contextmanager
    def _client(self) -> Iterator[SyncPrefectClient]:
        with (
            temporary_settings({PREFECT_API_URL: self.prefect["PREFECT_API_URL"]}),
            get_client(sync_client=True) as client,
        ):
            yield client

    def _run(self, killed: bool, run: UUID) -> None:
        with tempfile.NamedTemporaryFile("r") as output:
            process = forked.start(one_night, str(self.root), self.environment, run, output.name)
            if killed:
                before = self.locked()["teacher"]
                until(lambda: self.locked()["teacher"] != before or process.exitcode is not None)
                assert process.exitcode is None, output.read()
                process.kill()
            process.join()


def one_night(root: str, environment: Mapping[str, str], run: UUID, said: str) -> None:
    """Do what Prefect's runner does in the process that it starts for a run."""
    become(root, {**environment, "PREFECT__FLOW_RUN_ID": str(run)}, said)
    from prefect.flow_engine import load_flow_run, run_flow

    from flows.study import study

    run_flow(study, flow_run=load_flow_run(run), return_type="state")


def become(root: str, environment: Mapping[str, str], said: str) -> None:
    """Set up the process with only this environment, and without the slow smoke tests of versions."""
    from prefect.context import refresh_global_settings_context

    os.environ.clear()
    os.environ.update(environment)
    refresh_global_settings_context()
    os.chdir(root)
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream)
    from flows.promotion import flow as promotion
    from flows.registry.versions import Registry

    Registry.smoke = promotion._smoke = lambda *_: None  # type: ignore[assignment,method-assign,misc]


def passed(version: ModelVersion) -> bool:
    """Whether a version passed all gates."""
    return all(gate["passed"] for gate in json.loads(version.tags["eckart.gates"]))


def _lost(month: Month) -> None:
    month.grow(-40)


def _better(month: Month) -> None:
    month.grow(50)
    month.change("teacher.epochs", 30)
    month.change("recipes.svd.recovery.steps", 20)


NIGHTS = (
    Night("the first night; the machine was busy", state="Promoted", champion="own", begins=timedelta(minutes=50)),
    Night("most of the reviews are gone", _lost, "Failed"),
    Night("all of them, ten more, and a better study; the machine stops", _better, "Running", killed=True),
    Night("the machine is on again", state="Promoted", champion="own"),
)
