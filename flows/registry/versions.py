"""The model registry: the versions of one model, one of which is the champion.

The alias `champion`, which one operation moves, and tags hold the truth: when a version became the champion, and
whether it was rolled back. The aliases `previous` and `challenger` are derived from them, so that an operation that was
killed half way can be repaired.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from flows.environment.redaction import shown
from flows.registry import last_champion, model_package
from flows.registry.last_champion import Noted
from flows.registry.promotion_lock import turn
from flows.registry.rollback_check import NothingBefore
from flows.registry.smoke_test import SmokeFailed, ask
from flows.tracking import database, mirror
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"

CONTENT = "dvc.md5"
"""Tag: DVC's digest of the model's folder. Two versions never have the same."""
PROMOTED_AT = "eckart.promoted_at"
"""Tag: when the version last became the champion. The text sorts by time."""
SMOKE = "eckart.smoke"
"""Tag: `pending` from before the alias is moved until the version has answered under it."""
DECISION = "eckart.decision"
"""Tag: the outcome of the promotion, in words."""
ROLLED_BACK = "eckart.rolled_back"
"""Tag: when this version was rolled back to the one before it."""

_PENDING = "pending"
_SQLITE = "sqlite:///"


class RegistryError(EckartError):
    """The registry cannot be used; the message says why and what to do."""


class RegistryLost(RegistryError):
    """The registry has no champion, although the workspace has had one; the message says which and what to do."""


@contextmanager
def _explained(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        cause = " ".join(shown(str(error)).split())
        raise RegistryError(
            f"the model registry at {_place()} failed: {cause}. Run again when it works: "
            "the next run finishes or undoes what was begun"
        ) from error


@contextmanager
def connected(name: str, first: bool = False) -> Iterator[Registry]:
    """Open the registry of model `name` for one process at a time; others wait.

    It is the registry of the environment, or that of the working directory. With PostgreSQL the lock holds on all
    machines, otherwise for this user on this machine.

    Args:
        first: whether it may be without a champion although the workspace has had one.

    Raises:
        RegistryError: it fails, now or while it is used.
        RegistryLost: it has no champion, although the workspace has had one.
    """
    database.set_aside_damaged()
    users = os.environ.get("MLFLOW_TRACKING_URI")
    registry = _absolute(database.registry_address())
    with _explained(SQLAlchemyError, ImportError), turn(registry, name) as check:
        mlflow.set_tracking_uri(_absolute(database.address()))  # the processes that ask versions inherit it
        try:
            with _explained(Exception):  # a database fails to open in many ways
                client = MlflowClient()
                client.search_registered_models(max_results=1)
            with _explained(MlflowException):
                models = Registry(name, client, check)
                models.look_for_champion(first)
                yield models
        finally:
            mlflow.set_tracking_uri(users)  # type: ignore[arg-type]  # None unsets it


def _place() -> str:
    """Return the registry's address without its password."""
    return shown(mlflow.get_registry_uri())


def _absolute(address: str) -> str:
    """Return one spelling for every spelling of a path, so that one database has one lock."""
    kind, path = address[: len(_SQLITE)], address[len(_SQLITE) :]
    return f"{_SQLITE}{Path(path).resolve()}" if kind == _SQLITE else address


class Registry:
    """The versions of one model; `check` raises once the lock on it is lost."""

    def __init__(self, name: str, client: MlflowClient, check: Callable[[], None]) -> None:
        self.name = name
        self.client = client
        self._check = check

    def _models(self) -> list[RegisteredModel]:
        return list(self.client.search_registered_models(f"name = '{self.name}'"))

    def aliases(self) -> dict[str, str]:
        """Return the version of each alias."""
        aliases = (item for model in self._models() for item in model.aliases.items())
        return {alias: str(number) for alias, number in aliases}  # a database gives numbers

    def version(self, number: str) -> ModelVersion:
        """Return a version as it is now, tags included."""
        return self.client.get_model_version(self.name, number)

    def champion(self) -> ModelVersion | None:
        """Return the version under the alias `champion`."""
        number = self.aliases().get(CHAMPION)
        return self.version(number) if number else None

    def look_for_champion(self, first: bool) -> None:
        """Note the champion in the workspace.

        Args:
            first: whether there may be none although the workspace has had one.

        Raises:
            RegistryLost: there is none, although the workspace has had one.
        """
        if champion := self.champion():
            if champion.tags.get(SMOKE) != _PENDING:
                self._note(str(champion.version))
        elif not first and (had := self._had()):
            raise RegistryLost(
                f"the model registry at {_place()} has no champion of {self.name}, but this workspace has had {had}. "
                "Restore that registry, or start a new one with `eckart promote --first`"
            )

    def _had(self) -> str:
        """Return in words the last champion, or the place of one that was not noted here."""
        if noted := last_champion.last(self.name):
            return f"version {noted.version} in {noted.registry}"
        damaged = database.damaged() if database.is_local() else []
        return f"another registry, which is kept as {damaged[-1]}" if damaged else ""

    def _note(self, number: str) -> None:
        last_champion.note(self.name, Noted(version=number, registry=_place()))

    def before(self, version: ModelVersion) -> str | None:
        """The champion before `version`; None if there was none, or if the alias was set by hand: then none is known.

        That is the version promoted last before it, without those that were rolled back. A version that has yet to
        answer comes after all others.
        """
        pending = version.tags.get(SMOKE) == _PENDING
        promoted = [other for other in self._promoted() if other.version != version.version]
        earlier = [other for other in promoted if pending or _when(other) < version.tags.get(PROMOTED_AT, "")]
        return str(earlier[-1].version) if earlier else None

    def _promoted(self) -> list[ModelVersion]:
        """Return the versions that became the champion and were not rolled back, the latest last."""
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        return sorted(
            (entry for entry in versions if PROMOTED_AT in entry.tags and ROLLED_BACK not in entry.tags), key=_when
        )

    def _now(self) -> str:
        """Return the time; just after the last promotion if the clock was set back since."""
        last = max(map(_when, self._promoted()), default="")
        now = _stamp(datetime.now(UTC))
        return now if now > last else _stamp(datetime.fromisoformat(last) + timedelta(microseconds=1))

    def origin(self, study: str, key: str) -> tuple[str | None, str]:
        """Return MLflow's run of the candidate whose stages have `key`, or None, and the study's experiment."""
        experiment = mirror.experiment(self.client, study)
        return mirror.find(self.client, experiment, key), experiment

    def with_content(self, content: str) -> ModelVersion | None:
        """Return the version whose files have DVC's digest `content`."""
        versions = self.client.search_model_versions(f"name = '{self.name}' and tags.`{CONTENT}` = '{content}'")
        return min(versions, key=lambda version: int(version.version), default=None)

    def mark(self, number: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_model_version_tag(self.name, number, key, value)

    def describe(self, number: str, text: str) -> None:
        """Set the description of a version, in markdown."""
        self.client.update_model_version(self.name, number, text)

    def challenge(self, number: str) -> None:
        self.client.set_registered_model_alias(self.name, CHALLENGER, number)

    def add(
        self, saved: Path, label: str, content: str, experiment: str, run: str | None, tags: Mapping[str, str]
    ) -> ModelVersion:
        """Store the model that `model_package.save` wrote to `saved` and make it a version.

        Args:
            label: the candidate's name.
            content: DVC's digest of its folder.
            experiment: the id of MLflow's experiment that the model belongs to.
            run: the id of MLflow's run that made it, if known.
            tags: of the version, besides that of its content.
        """
        logged = self.client.create_logged_model(experiment, label.replace(".", "_"), run, {CONTENT: content})
        status: Literal["READY", "FAILED"] = "FAILED"
        try:
            with _explained(Exception):  # stores of files fail in many ways
                self.client.log_model_artifacts(logged.model_id, str(saved))
            status = "READY"
        finally:
            self.client.finalize_logged_model(logged.model_id, status)
        if not self._models():
            self.client.create_registered_model(self.name)
        source = f"models:/{logged.model_id}"
        return self.client.create_model_version(
            self.name, source, run, tags={**tags, CONTENT: content}, model_id=logged.model_id
        )

    def fetch(self, number: str, folder: Path) -> Path:
        """Download a version into `folder`; return the path of its Hugging Face folder, if `promote` made it.

        MLflow loads the version from two folders above that.
        """
        source = self.client.get_model_version_download_uri(self.name, number)
        try:
            files = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(folder)))
        except Exception as error:  # of any store; the registry itself has just answered
            log.warning("the files of version %s cannot be fetched: %s", number, shown(str(error)))
            files = folder
        return files / model_package.MODEL

    def smoke(self, reference: str) -> None:
        """Check that a version, `/3` or `@champion`, loads and answers.

        Raises:
            SmokeFailed: it does not, while the registry does.
        """
        try:
            ask(f"models:/{self.name}{reference}")
        except SmokeFailed:
            self.aliases()
            raise

    def promote(self, number: str, before: ModelVersion | None) -> bool:
        """Make a version the champion in place of `before`, and check that it answers as such.

        Returns:
            True if it is the champion now; False if someone else has moved the alias since `before` was read.

        Raises:
            SmokeFailed: it does not answer; the previous champion is back, or none where there was none.
        """
        self.mark(number, {SMOKE: _PENDING})
        if self.aliases().get(CHAMPION) != (str(before.version) if before else None):
            return False
        if before and before.version not in [last.version for last in self._promoted()[-1:]]:
            # Someone set it by hand: it counts as promoted now, so that a rollback can return to it.
            self._unmark(before.version, ROLLED_BACK)
            self.mark(before.version, {PROMOTED_AT: self._now()})
        self._move(number)
        return self._confirm(number)

    def settle(self) -> None:
        """Finish or undo a promotion or rollback that was killed.

        Raises:
            SmokeFailed: the unconfirmed champion does not answer; it was taken back.
        """
        champion = self.champion()
        if champion and champion.tags.get(SMOKE) == _PENDING:
            self._confirm(str(champion.version))
        self._follow()

    def roll_back(self) -> tuple[str, str]:
        """Go back to the version that the champion replaced, if it answers; return the old and the new champion.

        Raises:
            SmokeFailed: it does not answer; nothing was moved.
            NothingBefore: there is no champion, or none before it.
        """
        champion = self.champion()
        if not champion:
            raise NothingBefore(f"{self.name} has no champion: there is nothing to go back from")
        if not (before := self.before(champion)):
            raise NothingBefore(
                f"version {champion.version} of {self.name} replaced none: there is nothing to go back to"
            )
        self.smoke(f"/{before}")
        # Before the move: a kill between the two must not leave a version that the next promotion would take again.
        self.mark(champion.version, {ROLLED_BACK: clock()})
        self._move(before)
        return str(champion.version), before

    def _confirm(self, number: str) -> bool:
        """Check that the champion, version `number`, answers under its alias; if it does not, take it back.

        Returns:
            Whether it still is the champion.
        """
        try:
            self.smoke(f"@{CHAMPION}")
        except SmokeFailed as error:
            if self.aliases().get(CHAMPION) == number:
                self._take_back(number)
            self.mark(number, {SMOKE: f"failed {clock()}: {error}"})
            self._conclude(number, f"Taken back at {clock()}: as the champion {error}.")
            raise SmokeFailed(f"version {number} was taken back, since as the champion {error}") from error
        if self.aliases().get(CHAMPION) != number:  # then another one was asked
            return False
        self._unmark(number, ROLLED_BACK)
        before = self.before(self.version(number))
        self._conclude(number, f"Promoted at {clock()}" + (f", in place of version {before}." if before else "."))
        self.mark(number, {PROMOTED_AT: self._now(), SMOKE: f"passed {clock()}"})
        self._note(number)
        self._follow()
        return True

    def _take_back(self, number: str) -> None:
        """Make the champion before version `number` the champion again; without one, remove the alias."""
        self._unmark(number, PROMOTED_AT)  # a rollback must not return to a version that does not answer
        if before := self.before(self.version(number)):
            self._move(before)
        else:
            self._drop(CHAMPION)

    def _conclude(self, number: str, decision: str) -> None:
        """Write the outcome of a promotion below its gates."""
        self.mark(number, {DECISION: decision})
        self.describe(number, f"{self.version(number).description or ''}\n\n{decision}".strip())

    def _move(self, number: str) -> None:
        self._check()  # as late as possible: MLflow reconnects to a database that was restarted
        self.client.set_registered_model_alias(self.name, CHAMPION, number)
        self._follow()

    def _follow(self) -> None:
        """Set the other aliases by the champion."""
        if not (champion := self.champion()):
            return
        if PROMOTED_AT in champion.tags:  # else it was set by hand, or has yet to answer
            if before := self.before(champion):
                self.client.set_registered_model_alias(self.name, PREVIOUS, before)
            else:
                self._drop(PREVIOUS)
        if champion.tags.get(SMOKE) != _PENDING and self.aliases().get(CHALLENGER) == str(champion.version):
            self._drop(CHALLENGER)

    def _drop(self, alias: str) -> None:
        if alias in self.aliases():
            self.client.delete_registered_model_alias(self.name, alias)

    def _unmark(self, number: str, key: str) -> None:
        if key in self.version(number).tags:
            self.client.delete_model_version_tag(self.name, number, key)


def _when(version: ModelVersion) -> str:
    return str(version.tags[PROMOTED_AT])


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")


def clock() -> str:
    """Return the time for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
