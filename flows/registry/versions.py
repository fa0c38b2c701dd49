"""The versions of one model in the model registry. One of them is the champion.

Two things define the state: the alias `champion`, which a single operation moves, and tags of each version (when it
became the champion, whether it was rolled back). The aliases `previous` and `challenger` follow from these. So a
promotion that was killed at any point can be finished or undone.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from flows.environment.redaction import redact
from flows.registry import last_champion, model_package
from flows.registry.last_champion import Noted
from flows.registry.promotion_lock import turn
from flows.registry.smoke_test import SmokeFailed, ask
from flows.tracking import database
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"

CONTENT = "dvc.md5"
"""Tag: DVC's digest of the model's folder."""
ANSWERING = "eckart.answering"
"""Tag: what `model_package.answering` returns. No two versions have the same CONTENT and the same ANSWERING."""
PROMOTED_AT = "eckart.promoted_at"
"""Tag: when the version last became the champion, as text. Alphabetical order is order in time."""
SMOKE = "eckart.smoke"
"""Tag: the smoke test of the version as champion.

It is `pending` from before the alias `champion` is moved until the version has answered under that alias.
"""
DECISION = "eckart.decision"
"""Tag: the outcome of the version's promotion in words."""
ROLLED_BACK = "eckart.rolled_back"
"""Tag: when the version was rolled back, so that its predecessor became the champion again."""

_PENDING = "pending"
_NO_FILE = r"404 Client Error|\(404\)|NoSuchKey|BlobNotFound"  # in an error of MLflow's server, of S3, of Azure
_TRIAL = "eckart.trial"


class RegistryError(EckartError):
    """The registry cannot be used. The message says why and what to do."""


class NothingBefore(EckartError):
    """A rollback is impossible: there is no champion, or no version before it."""


class RegistryLost(RegistryError):
    """The registry has no champion, although this workspace has had one. The message names that champion."""


@contextmanager
def _explained(*kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise RegistryError(
            f"the model registry at {_place()} failed: {database.message_of(error)}. Run again when it works: "
            "the next run finishes or undoes what was begun"
        ) from error


def _says_missing(error: Exception) -> bool:
    """Whether an error of a download says that there are no such files, rather than that their store fails."""
    code = getattr(error, "error_code", "")
    return code == "RESOURCE_DOES_NOT_EXIST" or re.search(_NO_FILE, str(error)) is not None


@contextmanager
def connected(name: str, first: bool = False) -> Iterator[Registry]:
    """Open the registry for the model `name`. Other promotions of this model wait while the block runs.

    The environment names the registry; by default it is in the main workspace. With PostgreSQL, promotions on all
    machines take turns, otherwise those on this machine (flows/registry/promotion_lock.py).

    Args:
        first: whether to accept a registry without a champion, although this workspace has had a champion.

    Raises:
        RegistryError: the registry fails, now or in the block.
        RegistryLost: the registry has no champion, although this workspace has had one; a RegistryError if versions of
            this registry have been.
    """
    database.check()
    registry = database.registry_address()
    with _explained(SQLAlchemyError, ImportError), turn(registry, name) as check:
        # Only now: while another thread had its turn, it was set to that one's.
        users, users_registry = os.environ.get("MLFLOW_TRACKING_URI"), os.environ.get("MLFLOW_REGISTRY_URI")
        # The processes in which `ask` loads versions inherit both.
        mlflow.set_tracking_uri(database.address())
        if users_registry:  # it may have a path that is relative to the main workspace
            os.environ["MLFLOW_REGISTRY_URI"] = registry
        try:
            with _explained(Exception):  # many kinds of errors can occur when a database is opened
                client = MlflowClient()
                client.search_registered_models(max_results=1)
            with _explained(MlflowException):
                models = Registry(name, client, check)
                models.look_for_champion(first)
                yield models
        finally:
            mlflow.set_tracking_uri(users)  # type: ignore[arg-type]  # None unsets it
            if users_registry:
                os.environ["MLFLOW_REGISTRY_URI"] = users_registry


def _place() -> str:
    """Return the URL of the registry without its password."""
    return redact(mlflow.get_registry_uri())


class Registry:
    """The versions of one model in the registry; `check` raises if the lock on the model was lost."""

    def __init__(self, name: str, client: MlflowClient, check: Callable[[], None]) -> None:
        self.name = name
        self.client = client
        self._check = check

    def _models(self) -> list[RegisteredModel]:
        return list(self.client.search_registered_models(f"name = '{self.name}'"))

    def aliases(self) -> dict[str, str]:
        """Return alias → number of its version."""
        aliases = (item for model in self._models() for item in model.aliases.items())
        return {alias: str(number) for alias, number in aliases}  # some stores return numbers as int

    def version(self, number: str) -> ModelVersion:
        """Return a version with its present tags."""
        return self.client.get_model_version(self.name, number)

    def champion(self) -> ModelVersion | None:
        """Return the version with the alias `champion`, if there is one."""
        number = self.aliases().get(CHAMPION)
        return self.version(number) if number else None

    def look_for_champion(self, first: bool) -> None:
        """Note the present champion in the workspace; if there is none, check that this workspace has had none.

        Args:
            first: whether to accept a registry without a champion, although this workspace has had a champion.

        Raises:
            RegistryError: there is no champion, although versions of this registry have been, and `first` is False.
            RegistryLost: there is no champion, although this workspace has had one, and `first` is False.
        """
        if champion := self.champion():
            if champion.tags.get(SMOKE) != _PENDING:
                self._note(str(champion.version))
            return
        if first:
            return
        begin = "`eckart promote --first` promotes a candidate; add --again for one that was rolled back"
        if promoted := self._promoted():
            raise RegistryError(
                f"{self.name} has no champion: its version or alias was deleted. `eckart promote --rollback` makes "
                f"version {promoted[-1].version} the champion. {begin}"
            )
        if self._champions():
            raise RegistryError(
                f"{self.name} has no champion: its version or alias was deleted, and all others were rolled back. "
                f"{begin}"
            )
        noted = last_champion.last(self.name)
        if noted and noted.registry == _place() and not (database.all_is_local() and database.damaged()):
            raise RegistryLost(
                f"{_place()} no longer has {self.name}, whose last champion known here was version {noted.version}: "
                "restore a copy of that database, give a renamed model its name again, or begin anew with "
                "`eckart promote --first`"
            )
        if had := self._last_known_champion():
            raise RegistryLost(
                f"the model registry at {_place()} has no champion of {self.name}, but this workspace has had {had}. "
                "Restore that registry, or start a new one with `eckart promote --first`"
            )

    def _last_known_champion(self) -> str:
        """Return in words the last champion of this workspace, or the damaged registry that may hold it; else empty."""
        if noted := last_champion.last(self.name):
            return f"version {noted.version} in {noted.registry}"
        damaged = database.damaged() if database.all_is_local() else []
        return f"another registry, which is kept as {damaged[-1]}" if damaged else ""

    def _note(self, number: str) -> None:
        last_champion.note(self.name, Noted(version=number, registry=_place()))

    def before(self, version: ModelVersion) -> str | None:
        """Return the number of the predecessor of `version`, to which a rollback returns.

        It is the version that was the last to be promoted before `version`, of those that were not rolled back. If the
        smoke test of `version` is pending, or somebody made it the champion by hand, all promotions count as earlier.

        Returns:
            None if there is no predecessor.
        """
        when = "" if version.tags.get(SMOKE) == _PENDING else _when(version)
        promoted = [other for other in self._promoted() if other.version != version.version]
        earlier = [other for other in promoted if not when or _when(other) < when]
        return str(earlier[-1].version) if earlier else None

    def _promoted(self) -> list[ModelVersion]:
        """Return the versions that became the champion and were not rolled back, in the order of their promotions."""
        return sorted((version for version in self._champions() if ROLLED_BACK not in version.tags), key=_when)

    def _champions(self) -> list[ModelVersion]:
        """Return the versions that ever became the champion, also those that were rolled back."""
        versions = self.client.search_model_versions(f"name = '{self.name}'")
        return [version for version in versions if PROMOTED_AT in version.tags or ROLLED_BACK in version.tags]

    def _now(self) -> str:
        """Return the current time or, if the clock was set back, a time just after the last promotion.

        So the times of promotions always are in the order of the promotions.
        """
        last = max(map(_when, self._promoted()), default="")
        now = _stamp(datetime.now(UTC))
        return now if now > last else _stamp(datetime.fromisoformat(last) + timedelta(microseconds=1))

    def with_content(self, content: str) -> list[ModelVersion]:
        """Return the versions whose files have DVC's digest `content`, the oldest first."""
        versions = self.client.search_model_versions(f"name = '{self.name}' and tags.`{CONTENT}` = '{content}'")
        return sorted(versions, key=lambda version: int(version.version))

    def mark(self, number: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_model_version_tag(self.name, number, key, value)

    def describe(self, number: str, text: str) -> None:
        """Set the description of a version, which is Markdown."""
        self.client.update_model_version(self.name, number, text)

    def add(
        self, saved: Path, label: str, content: str, experiment: str, run: str | None, tags: Mapping[str, str]
    ) -> ModelVersion:
        """Upload a model to MLflow, and register it as a new version.

        Args:
            saved: the folder that `model_package.save` has written.
            label: name of the candidate.
            content: DVC's digest of the candidate's folder.
            experiment, run: ids of the study's experiment and of the candidate's run in MLflow.
        """
        logged = self.client.create_logged_model(experiment, label.replace(".", "_"), run, {CONTENT: content})
        status: Literal["READY", "FAILED"] = "FAILED"
        try:
            with _explained(Exception):  # each kind of store raises other errors
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
        """Download a version into `folder`.

        Returns:
            Path of the Hugging Face folder; MLflow's model is two folders above. The path does not exist if the
            version's files were deleted, or if it was not made by `promote`.

        Raises:
            RegistryError: the store of the files fails.
        """
        source = self.client.get_model_version_download_uri(self.name, number)
        try:
            files = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(folder)))
        except Exception as error:  # each kind of store raises other errors
            words = redact(database.message_of(error))
            if not _says_missing(error):
                raise RegistryError(
                    f"the files of version {number} cannot be read from {redact(source)}: {words}. Run again when this "
                    "store works: the next run finishes or undoes what was begun"
                ) from error
            log.warning("the files of version %s are missing: %s", number, words)
            files = folder
        return files / model_package.MODEL

    def smoke(self, reference: str) -> None:
        """Check that a version, such as `/3` or `@champion`, can be loaded and answers its own example.

        Raises:
            SmokeFailed: the version does not answer, although the registry works.
        """
        try:
            ask(f"models:/{self.name}{reference}")
        except SmokeFailed:
            self.aliases()  # raises MlflowException if the registry is at fault, not the version
            raise

    def promote(self, number: str, before: ModelVersion | None) -> bool:
        """Make a version the champion in place of `before`, and check that it answers under the alias `champion`.

        Returns:
            True if the version is the champion now; False if someone else has moved the alias since `before` was read.

        Raises:
            SmokeFailed: the version does not answer. The previous champion, if there was one, is the champion again.
        """
        self.mark(number, {_TRIAL: "deleted at once"})
        self._unmark(number, _TRIAL)  # a user who may not delete is refused now, not after the champion was moved
        self.mark(number, {SMOKE: _PENDING})
        if self.aliases().get(CHAMPION) != (str(before.version) if before else None):
            return False
        if before and before.version not in [last.version for last in self._promoted()[-1:]]:
            # Someone has set the alias by hand. Record `before` as promoted now, so that a rollback can return to it.
            self._unmark(before.version, ROLLED_BACK)
            self.mark(before.version, {PROMOTED_AT: self._now()})
        self._move(number)
        return self._confirm(number)

    def settle(self) -> None:
        """Finish or undo a promotion or rollback that was killed.

        Raises:
            SmokeFailed: the champion of a killed promotion does not answer; the promotion was undone.
        """
        champion = self.champion()
        if champion and champion.tags.get(SMOKE) == _PENDING:
            self._confirm(str(champion.version))
        self._follow()

    def roll_back(self) -> tuple[str | None, str]:
        """Make the predecessor of the champion the champion again, if it answers.

        Returns:
            The version numbers of the champion before and after the rollback. The first is None if that version was
            deleted; the second then is the version that was promoted last.

        Raises:
            SmokeFailed: the predecessor does not answer; nothing was changed.
            NothingBefore: there is no champion, or it has no predecessor.
            RegistryError: there is no champion and none to return to, although there has been one.
        """
        champion = self.champion()
        if not champion:
            if not (promoted := self._promoted()):
                self.look_for_champion(first=False)  # raises if there has been a champion
                raise NothingBefore(f"{self.name} has no champion: there is nothing to go back from")
            last = str(promoted[-1].version)
            self.smoke(f"/{last}")
            self._move_back(last)
            return None, last
        if not (before := self.before(champion)):
            raise NothingBefore(
                f"no version before {champion.version} of {self.name} is left to go back to: it replaced none, or they "
                "were rolled back or deleted"
            )
        self.smoke(f"/{before}")
        # Mark before the move: if this process is killed between the two, the next promotion must not promote the
        # marked version again.
        self.mark(champion.version, {ROLLED_BACK: clock()})
        self._conclude(champion.version, f"Rolled back at {clock()}, to version {before}.")
        self._move_back(before)
        return str(champion.version), before

    def _confirm(self, number: str) -> bool:
        """Check that version `number` answers under the alias `champion`; if it does not, undo its promotion.

        Returns:
            Whether the version still is the champion: someone else may have moved the alias meanwhile.

        Raises:
            SmokeFailed: the version does not answer; its promotion was undone.
        """
        try:
            self.smoke(f"@{CHAMPION}")
        except SmokeFailed as error:
            if self.aliases().get(CHAMPION) == number:
                self._unmark(number, PROMOTED_AT)  # a rollback must not return to a version that does not answer
                if before := self.before(self.version(number)):
                    self._move_back(before)
                else:
                    self._drop(CHAMPION)
            self.mark(number, {SMOKE: f"failed {clock()}: {error}"})
            self._conclude(number, f"Taken back at {clock()}: as the champion {error}.")
            raise SmokeFailed(f"version {number} was taken back, since as the champion {error}") from error
        if self.aliases().get(CHAMPION) != number:  # then another version may have answered
            return False
        self._unmark(number, ROLLED_BACK)
        before = self.before(self.version(number))
        self._conclude(number, f"Promoted at {clock()}" + (f", in place of version {before}." if before else "."))
        self.mark(number, {PROMOTED_AT: self._now(), SMOKE: f"passed {clock()}"})
        self._note(number)
        self._follow()
        return True

    def _conclude(self, number: str, decision: str) -> None:
        """Store the outcome of a promotion or rollback in a tag, and at the end of the description, below the gates."""
        self.mark(number, {DECISION: decision})
        self.describe(number, f"{self.version(number).description or ''}\n\n{decision}".strip())

    def _move(self, number: str) -> None:
        self._check()  # just before the move: after a restart of the database MLflow reconnects, but the lock is lost
        self.client.set_registered_model_alias(self.name, CHAMPION, number)
        self._follow()

    def _move_back(self, number: str) -> None:
        """Make an earlier champion the champion again, and note it in the workspace."""
        self._move(number)
        self._note(number)

    def _follow(self) -> None:
        """Update the aliases `previous` and `challenger` to match the champion."""
        champion = self.champion()
        if not champion or champion.tags.get(SMOKE) == _PENDING:
            return
        if before := self.before(champion):
            self.client.set_registered_model_alias(self.name, PREVIOUS, before)
        else:
            self._drop(PREVIOUS)
        if self.aliases().get(CHALLENGER) == str(champion.version):
            self._drop(CHALLENGER)

    def _drop(self, alias: str) -> None:
        if alias in self.aliases():
            self.client.delete_registered_model_alias(self.name, alias)

    def _unmark(self, number: str, key: str) -> None:
        if key in self.version(number).tags:
            self.client.delete_model_version_tag(self.name, number, key)


def _when(version: ModelVersion) -> str:
    """Return when a version became the champion; empty if there is no such tag, or somebody made it another text."""
    when = str(version.tags.get(PROMOTED_AT, ""))
    with suppress(ValueError):
        datetime.fromisoformat(when)
        return when
    return ""


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")


def clock() -> str:
    """Return the current local time as text for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
