"""The model registry: the versions of one model, and which of them is the champion.

What is true is the alias `champion`, which one operation moves, and on the version that it names the tag
`eckart.replaces`. The aliases `previous` and `challenger` follow from them, so that what a kill left is put right.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import mlflow
import pandas as pd
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.types.schema import Array, ColSpec, DataType, Schema

import eckart
from flows.registry.served import ANSWERS
from flows.settings import shown
from flows.tracking import mirror
from tasks.dataset import Task
from tasks.errors import EckartError

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"

CONTENT = "dvc.md5"
"""Tag: DVC's digest of the model's folder. Two versions never have the same."""
REPLACES = "eckart.replaces"
"""Tag of a version that is or was the champion: the champions before it, the latest first, as `2 1`."""
SMOKE = "eckart.smoke"
"""Tag: `pending` from before the alias is moved until the version has answered under it."""
DECISION = "eckart.decision"
"""Tag: what came of the promotion, in words."""
ROLLED_BACK = "eckart.rolled_back"
"""Tag: when someone went back from this version to the one before it."""

_PENDING = "pending"
_SQLITE = "sqlite:///"
_LONGEST = 50  # champions that are remembered
_MODEL = "artifacts/model"  # where a version has its Hugging Face folder
_PATIENCE = 600  # seconds until a model must have answered
_PACKAGES = ("mlflow", "torch", "transformers", "safetensors", "accelerate", "pydantic", "pandas")
_EXAMPLE = {"text": "An example.", "text_pair": "Another one."}
_ASKED = "serving_input_example.json"  # where MLflow keeps what `save` gives as an example


class RegistryError(EckartError):
    """The registry cannot be used; the message says why and what to do."""


class NothingBefore(EckartError):
    """There is no version to go back to, or none to go back from."""


class SmokeFailed(EckartError):
    """A version does not answer as it should; the message says how."""


def _explained(method: Callable[Concatenate[Registry, P], T]) -> Callable[Concatenate[Registry, P], T]:
    """A method that does nothing but talk to MLflow, whose stores may fail in any way."""

    @wraps(method)
    def explaining(self: Registry, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except RegistryError:
            raise
        except Exception as error:
            cause = " ".join(shown(str(error)).split())
            raise RegistryError(
                f"the model registry at {shown(self.address)} failed: {cause}. Run again when it works: "
                "what was begun is then finished or undone"
            ) from error

    return explaining


@contextmanager
def connected(root: Path, name: str) -> Iterator[Registry]:
    """The registry of model `name`: the user's, or that of the workspace `root`.

    One process of this user on this machine has it at a time; others wait.
    """
    local = "MLFLOW_TRACKING_URI" not in os.environ
    store = _absolute(f"sqlite:///{root / 'mlflow.db'}" if local else os.environ["MLFLOW_TRACKING_URI"])
    with _turn(_absolute(os.environ.get("MLFLOW_REGISTRY_URI", store)), name), _store(store):
        yield Registry(name, local)


def _absolute(address: str) -> str:
    """The same for every spelling of a path, so that all who mean one database take turns."""
    kind, path = address[: len(_SQLITE)], address[len(_SQLITE) :]
    return f"{_SQLITE}{Path(path).resolve()}" if kind == _SQLITE else address


@contextmanager
def _store(address: str) -> Iterator[None]:
    """MLflow's registry looks models up in the store that the environment names, whatever client it is called by."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = address
    try:
        yield
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI")
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


@contextmanager
def _turn(address: str, name: str) -> Iterator[None]:
    digest = hashlib.sha256(f"{address} {name}".encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"eckart-{os.getuid()}-{digest}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another promotion of %s", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Registry:
    """The versions of one model; `local` if the store is the workspace's own."""

    def __init__(self, name: str, local: bool) -> None:
        self.name = name
        self._local = local
        self.address = mlflow.get_registry_uri()

    @cached_property
    def client(self) -> MlflowClient:
        """Not made before it is needed: that opens a database, which may fail."""
        return MlflowClient()

    @_explained
    def aliases(self) -> dict[str, str]:
        """Alias → version."""
        try:
            found = self.client.get_registered_model(self.name).aliases
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return {}
            raise
        return {alias: str(number) for alias, number in found.items()}  # a database gives numbers, a server words

    @_explained
    def version(self, number: str) -> ModelVersion:
        """A version as it is now, tags included."""
        return self.client.get_model_version(self.name, number)

    def champion(self) -> ModelVersion | None:
        """The version under the alias `champion`."""
        number = self.aliases().get(CHAMPION)
        return self.version(number) if number else None

    @_explained
    def origin(self, root: Path, study: str, key: str) -> tuple[str | None, str]:
        """MLflow's run of the candidate whose stages have `key`, if MLflow knows it, and the study's experiment."""
        experiment = mirror.experiment(self.client, study, root if self._local else None)
        return mirror.find(self.client, experiment, key), experiment

    @_explained
    def with_content(self, content: str) -> ModelVersion | None:
        """The version whose files have DVC's digest `content`."""
        found = self.client.search_model_versions(f"name = '{self.name}' and tags.`{CONTENT}` = '{content}'")
        return min(found, key=lambda version: int(version.version), default=None)

    @_explained
    def mark(self, number: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_model_version_tag(self.name, number, key, value)

    @_explained
    def describe(self, number: str, text: str) -> None:
        """Set the description of a version, in markdown."""
        self.client.update_model_version(self.name, number, text)

    @_explained
    def challenge(self, number: str) -> None:
        self.client.set_registered_model_alias(self.name, CHALLENGER, number)

    @_explained
    def add(
        self, saved: Path, label: str, content: str, experiment: str, run: str | None, tags: Mapping[str, str]
    ) -> ModelVersion:
        """Store the model that `save` wrote to `saved` and make it a version.

        Args:
            label: the candidate's name.
            content: DVC's digest of its folder.
            experiment: the id of MLflow's experiment that the model belongs to.
            run: the id of MLflow's run that made it, if it is known.
            tags: of the version, besides that of its content.
        """
        logged = self.client.create_logged_model(experiment, label.replace(".", "_"), run, {CONTENT: content})
        try:
            self.client.log_model_artifacts(logged.model_id, str(saved))
        except BaseException:
            self.client.finalize_logged_model(logged.model_id, "FAILED")
            raise
        self.client.finalize_logged_model(logged.model_id, "READY")
        try:
            self.client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
                raise
        source = f"models:/{logged.model_id}"
        return self.client.create_model_version(
            self.name, source, run, tags={**tags, CONTENT: content}, model_id=logged.model_id
        )

    def fetch(self, number: str, folder: Path) -> Path:
        """Download a version into `folder`; where its Hugging Face folder is, if all is as `promote` made it.

        Two folders above that is the version as MLflow loads it.
        """
        source = self._source(number)
        try:
            files = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(folder)))
        except Exception as error:  # of any store; the registry itself has just answered
            log.warning("the files of version %s cannot be had: %s", number, shown(str(error)))
            files = folder
        return files / _MODEL

    @_explained
    def _source(self, number: str) -> str:
        return str(self.client.get_model_version_download_uri(self.name, number))

    def smoke(self, reference: str) -> None:
        """See that a version, `/3` or `@champion`, is loaded and answers.

        Raises:
            SmokeFailed: it does not, while the registry does.
        """
        try:
            ask(f"models:/{self.name}{reference}")
        except SmokeFailed:
            self.aliases()
            raise

    def promote(self, number: str, before: ModelVersion | None) -> bool:
        """Make a version the champion in place of `before`, and see that it answers as such.

        Returns:
            Whether it is the champion now; if not, someone else has moved the alias since `before` was read.

        Raises:
            SmokeFailed: it does not answer; the champion is again the one before, or none where there was none.
        """
        champion = str(before.version) if before else None
        chain = [champion, *self.replaced(self.version(champion))][:_LONGEST] if champion else []
        self.mark(number, {REPLACES: " ".join(chain), SMOKE: _PENDING})
        if self.aliases().get(CHAMPION) != champion:
            return False
        self._move(number)
        return self._confirm(number)

    def settle(self) -> None:
        """Finish or undo what a killed promotion or rollback left behind.

        Raises:
            SmokeFailed: a champion that was not seen to answer does not; it was taken back.
        """
        champion = self.champion()
        if champion and champion.tags.get(SMOKE) == _PENDING:
            self._confirm(str(champion.version))
        self._follow()

    def roll_back(self) -> tuple[str, str]:
        """Go back to the version that the champion replaced, if it answers; from and to which.

        Raises:
            SmokeFailed: it does not; nothing was moved.
            NothingBefore: there is no champion, or none before it.
        """
        champion = self.champion()
        if not champion:
            raise NothingBefore(f"{self.name} has no champion: there is nothing to go back from")
        if not (chain := self.replaced(champion)):
            raise NothingBefore(
                f"version {champion.version} of {self.name} replaced none: there is nothing to go back to"
            )
        self.smoke(f"/{chain[0]}")
        # Before the move: a kill between the two must not leave a version that the next promotion would take again.
        self.mark(champion.version, {ROLLED_BACK: now()})
        self._go_back(chain)
        return str(champion.version), chain[0]

    def _confirm(self, number: str) -> bool:
        """See that the champion, which is version `number`, answers under its alias; if it does not, take it back.

        Returns:
            Whether it still is the champion.
        """
        try:
            self.smoke(f"@{CHAMPION}")
        except SmokeFailed as error:
            if self.aliases().get(CHAMPION) == number:
                self._go_back(self.replaced(self.version(number)))
            self.mark(number, {SMOKE: f"failed {now()}: {error}"})
            self._conclude(number, f"Taken back at {now()}: as the champion {error}.")
            raise SmokeFailed(f"version {number} was taken back, since as the champion {error}") from error
        if self.aliases().get(CHAMPION) != number:  # then another one was asked
            return False
        self._unmark(number, ROLLED_BACK)
        before = next(iter(self.replaced(self.version(number))), None)
        self._conclude(number, f"Promoted at {now()}" + (f", in place of version {before}." if before else "."))
        self.mark(number, {SMOKE: f"passed {now()}"})
        self._follow()
        return True

    def _conclude(self, number: str, decision: str) -> None:
        """Write what came of a promotion, below what was checked."""
        self.mark(number, {DECISION: decision})
        self.describe(number, f"{self.version(number).description or ''}\n\n{decision}".strip())

    @_explained
    def replaced(self, version: ModelVersion) -> list[str]:
        """The champions before a version, the latest first, but for those that were deleted since."""
        there = {str(one.version) for one in self.client.search_model_versions(f"name = '{self.name}'")}
        return [number for number in version.tags.get(REPLACES, "").split() if number in there]

    def _go_back(self, chain: Sequence[str]) -> None:
        """Make the first of `chain` the champion; where it is empty there was none."""
        if chain:
            self.mark(chain[0], {REPLACES: " ".join(chain[1:])})
            self._move(chain[0])
        else:
            self._drop(CHAMPION)

    @_explained
    def _move(self, number: str) -> None:
        self.client.set_registered_model_alias(self.name, CHAMPION, number)
        self._follow()

    def _follow(self) -> None:
        """Bring the other aliases after the champion."""
        if not (champion := self.champion()):
            return
        if REPLACES in champion.tags:  # else it was set by hand, and who knows what it has replaced
            self._point(PREVIOUS, next(iter(self.replaced(champion)), None))
        if champion.tags.get(SMOKE) != _PENDING and self.aliases().get(CHALLENGER) == str(champion.version):
            self._drop(CHALLENGER)

    @_explained
    def _point(self, alias: str, number: str | None) -> None:
        if number:
            self.client.set_registered_model_alias(self.name, alias, number)
        else:
            self._drop(alias)

    @_explained
    def _drop(self, alias: str) -> None:
        if alias in self.aliases():
            self.client.delete_registered_model_alias(self.name, alias)

    @_explained
    def _unmark(self, number: str, key: str) -> None:
        if key in self.version(number).tags:
            self.client.delete_model_version_tag(self.name, number, key)


def ask(model: str, rows: pd.DataFrame | None = None) -> list[dict[str, Any]]:
    """What a version answers in a process of its own, served as anyone would serve it.

    Args:
        model: its address, `models:/NAME/3`, or the folder of its files.
        rows: what it is asked; by default its own example.

    Raises:
        SmokeFailed: it cannot be loaded, or a number that it answers is not finite.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / _ASKED, Path(folder) / "answer.json"
        if rows is None:
            _fetch_example(model, question.parent)
        else:
            split = rows.to_dict(orient="split", index=False)
            question.write_text(json.dumps({"dataframe_split": split}, default=list))  # words are arrays
        # -P: what lies in the working directory is not there to be imported
        words = ["-P", "-m", "mlflow", "models", "predict", "-m", model, "--env-manager", "local"]
        words += ["-i", str(question), "-t", "json", "-o", str(answer)]
        try:
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise SmokeFailed(f"it did not answer within {_PATIENCE} s") from error
        if done.returncode:
            raise SmokeFailed(shown(" ".join(done.stderr.strip().splitlines()[-1:])) or "it ended without a word")
        answers: list[dict[str, Any]] = json.loads(answer.read_text())["predictions"]
    numbers = [value for row in answers for value in row.values() if isinstance(value, float)]
    if not all(map(math.isfinite, numbers)):
        raise SmokeFailed(f"not all numbers that it answers are finite: {numbers}")
    return answers


def _fetch_example(model: str, folder: Path) -> None:
    try:
        mlflow.artifacts.download_artifacts(f"{model}/{_ASKED}", dst_path=str(folder))
    except Exception as error:  # of any store
        raise SmokeFailed(f"its example cannot be had: {shown(str(error))}") from error


def save(model: Path, folder: Path, task: Task, pairs: bool, batch_size: int, continuation: int) -> None:
    """Write a Hugging Face folder as a model that MLflow serves, eckart's code included.

    Args:
        pairs: whether rows are pairs of texts.
        batch_size: rows that are answered at a time.
        continuation: tokens that a language model writes behind a text.
    """
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "model"  # its name in the version; MLflow refuses links, and DVC may have made some
        shutil.copytree(model, copy)
        mlflow.pyfunc.save_model(
            folder,
            python_model=Path(__file__).with_name("served.py"),
            artifacts={"model": str(copy)},
            code_paths=[str(Path(eckart.__file__).parent)],
            signature=ModelSignature(_questions(task, pairs), ANSWERS[task.kind]),
            input_example=_example(task, pairs),
            pip_requirements=[f"{name}=={_public(name)}" for name in _PACKAGES],
            model_config=settings_of(task, batch_size, continuation),
        )


def settings_of(task: Task, batch_size: int, continuation: int) -> dict[str, Any]:
    """What `flows.served.Served` is told, as `save` has it."""
    read = ("kind", "max_length", "target_length", "prefix", "stride")
    return {**task.model_dump(include=set(read)), "batch_size": batch_size, "continuation": continuation}


def _questions(task: Task, pairs: bool) -> Schema:
    """The columns that a version reads: words come as a list, as the task has them."""
    text = Array(DataType.string) if task.kind == "token_classification" else DataType.string
    return Schema([ColSpec(text, "text"), *([ColSpec(DataType.string, "text_pair")] if pairs else [])])


def _example(task: Task, pairs: bool) -> pd.DataFrame:
    row: dict[str, Any] = {name: _EXAMPLE[name] for name in ("text", "text_pair")[: 1 + pairs]}
    if task.kind == "token_classification":
        row["text"] = row["text"].split()
    return pd.DataFrame([row])


def _public(package: str) -> str:
    """The version that an index knows: without `+cpu`."""
    return importlib.metadata.version(package).partition("+")[0]


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
