"""The registry against a real MLflow database: the champion, the version before it, and the state after a kill."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.models.utils import _enforce_schema

from flows.registry import model_package, versions
from flows.registry.smoke_test import SmokeFailed, ask
from flows.registry.versions import (
    CHALLENGER,
    CHAMPION,
    CONTENT,
    DECISION,
    PREVIOUS,
    PROMOTED_AT,
    ROLLED_BACK,
    SMOKE,
    NothingBefore,
    Registry,
    RegistryError,
    RegistryLost,
    connected,
)
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class
from tests.workspace import a_task


@pytest.fixture(scope="module")
def database(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with four versions."""
    file = Path(shutil.copy(database, tmp_path_factory.mktemp("database")))
    client = MlflowClient(f"sqlite:///{file}")
    client.create_registered_model("m")
    for number in range(1, 5):
        client.create_model_version("m", f"file:///nowhere/{number}", tags={CONTENT: f"content {number}"})
    return file


@pytest.fixture(autouse=True)
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No registry but the test's own, that of a workspace, in which every version answers."""
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Registry, "smoke", lambda *_: [])


@pytest.fixture
def models(database: Path, tmp_path: Path) -> Iterator[Registry]:
    """Four versions without files and without a champion."""
    shutil.copy(database, tmp_path / "mlflow.db")
    with connected("m") as found:
        yield found


@pytest.fixture
def silent(models: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the alias no version answers, under its number each does."""

    def smoke(_: Registry, reference: str, rows: pd.DataFrame | None = None) -> list[object]:
        if reference == f"@{CHAMPION}":
            raise SmokeFailed("it is silent")
        return []

    monkeypatch.setattr(Registry, "smoke", smoke)


def promote(models: Registry, *numbers: str) -> None:
    for number in numbers:
        models.challenge(number)
        assert models.promote(number, models.champion())


def test_the_first_champion_replaces_none(models: Registry) -> None:
    promote(models, "1")
    assert models.aliases() == {CHAMPION: "1"}
    assert models.version("1").tags[SMOKE].startswith("passed")


def test_a_champion_makes_the_one_before_previous_and_is_challenger_no_more(models: Registry) -> None:
    promote(models, "1", "2")
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}


def test_going_back_goes_through_all_that_were_replaced(models: Registry) -> None:
    promote(models, "1", "2", "3")
    assert models.roll_back() == ("3", "2")
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    assert models.roll_back() == ("2", "1")
    assert models.aliases() == {CHAMPION: "1"}
    with pytest.raises(NothingBefore, match=r"\b1 of m\b"):
        models.roll_back()
    assert models.aliases() == {CHAMPION: "1"}
    assert [ROLLED_BACK in models.version(number).tags for number in "123"] == [False, True, True]


def test_a_version_promoted_twice_counts_from_the_last_time(models: Registry) -> None:
    promote(models, "1", "2", "1")
    assert models.before(models.version("1")) == "2"
    assert models.roll_back() == ("1", "2")
    with pytest.raises(NothingBefore):  # for someone went back from version 1
        models.roll_back()


def test_a_version_that_is_promoted_again_is_rolled_back_no_more(models: Registry) -> None:
    promote(models, "1", "2")
    models.roll_back()
    promote(models, "2")
    assert ROLLED_BACK not in models.version("2").tags
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}


def test_without_a_champion_there_is_nothing_to_go_back_from(models: Registry) -> None:
    with pytest.raises(NothingBefore, match=r"^m "):
        models.roll_back()
    models.name = "never-registered"
    with pytest.raises(NothingBefore, match="never-registered"):
        models.roll_back()


def test_the_version_to_go_back_to_must_answer(models: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(models, "1", "2")

    def smoke(_: Registry, reference: str) -> None:
        raise SmokeFailed(reference)

    monkeypatch.setattr(Registry, "smoke", smoke)
    with pytest.raises(SmokeFailed, match="/1"):
        models.roll_back()
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    assert ROLLED_BACK not in models.version("2").tags


@pytest.mark.usefixtures("silent")
def test_a_first_champion_that_does_not_answer_is_taken_back(models: Registry) -> None:
    with pytest.raises(SmokeFailed, match=r"\b1\b.* it is silent$"):
        promote(models, "1")
    assert models.aliases() == {CHALLENGER: "1"}
    assert models.version("1").tags[SMOKE].startswith("failed")


def test_a_champion_that_does_not_answer_gives_way_to_the_one_before(
    models: Registry, request: pytest.FixtureRequest
) -> None:
    promote(models, "1", "2")
    request.getfixturevalue("silent")
    with pytest.raises(SmokeFailed):
        promote(models, "3")
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1", CHALLENGER: "3"}
    assert models.before(models.version("2")) == "1"


def test_a_champion_that_was_changed_meanwhile_is_left_alone(models: Registry) -> None:
    before = models.champion()
    promote(models, "1")
    assert not models.promote("2", before)
    promote(models, "3")
    assert not models.promote("2", models.version("1"))
    assert models.aliases() == {CHAMPION: "3", PREVIOUS: "1"}


def test_a_champion_that_was_set_by_hand_can_be_replaced_and_gone_back_to(models: Registry) -> None:
    models.client.set_registered_model_alias("m", CHAMPION, "1")
    models.client.set_registered_model_alias("m", PREVIOUS, "4")
    models.settle()
    assert models.aliases() == {CHAMPION: "1", PREVIOUS: "4"}  # what it replaced only the hand knows
    with pytest.raises(NothingBefore):
        models.roll_back()
    promote(models, "2")
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    assert models.roll_back() == ("2", "1")


def test_an_old_champion_that_was_set_by_hand_is_the_one_before(models: Registry) -> None:
    promote(models, "1", "2", "3")
    models.roll_back()
    models.client.set_registered_model_alias("m", CHAMPION, "3")
    promote(models, "4")
    assert models.aliases() == {CHAMPION: "4", PREVIOUS: "3"}
    models.client.set_registered_model_alias("m", CHAMPION, "1")
    promote(models, "2")
    assert models.roll_back() == ("2", "1")


def test_a_rollback_skips_versions_that_were_taken_back(models: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a kill came between the two tags of a promotion."""
    promote(models, "1", "2")
    models.mark("3", {PROMOTED_AT: models._now(), SMOKE: "pending"})
    models.client.set_registered_model_alias("m", CHAMPION, "3")

    def silent(_: Registry, reference: str) -> None:
        raise SmokeFailed("it is silent")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "smoke", silent)
        with pytest.raises(SmokeFailed):
            models.settle()
    promote(models, "4")
    assert models.aliases() == {CHAMPION: "4", PREVIOUS: "2"}


def test_versions_that_were_deleted_are_passed_over(models: Registry) -> None:
    promote(models, "1", "2", "3", "4")
    models.client.delete_model_version("m", "3")
    models.settle()
    assert models.aliases() == {CHAMPION: "4", PREVIOUS: "2"}
    assert models.roll_back() == ("4", "2")
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}


def test_wrong_aliases_are_repaired(models: Registry) -> None:
    promote(models, "1", "2")
    models.client.set_registered_model_alias("m", PREVIOUS, "4")
    models.client.set_registered_model_alias("m", CHALLENGER, "2")
    models.settle()
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}


def test_a_version_is_found_by_its_content(models: Registry) -> None:
    found = models.with_content("content 3")
    assert found
    assert found.version in (3, "3")
    assert models.with_content("content 9") is None


def test_a_rolled_back_version_stays_so_until_it_answers_as_the_champion(
    models: Registry, request: pytest.FixtureRequest
) -> None:
    promote(models, "1", "2")
    models.roll_back()
    request.getfixturevalue("silent")
    with pytest.raises(SmokeFailed):
        models.promote("2", models.champion())
    assert ROLLED_BACK in models.version("2").tags


def test_a_version_that_loses_the_alias_during_its_smoke_test_is_not_promoted(
    models: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(models, "1")

    def smoke(self: Registry, reference: str) -> None:
        self.client.set_registered_model_alias("m", CHAMPION, "1")

    monkeypatch.setattr(Registry, "smoke", smoke)
    assert not models.promote("2", models.champion())
    assert not models.version("2").tags[SMOKE].startswith("passed")


def test_the_outcome_is_written_below_the_gates(models: Registry) -> None:
    models.describe("2", "checked")
    promote(models, "1", "2")
    version = models.version("2")
    assert version.tags[DECISION].startswith("Promoted at ")
    assert version.tags[DECISION].endswith(", in place of version 1.")
    assert version.description == f"checked\n\n{version.tags[DECISION]}"


def test_files_that_are_gone_are_no_failure_of_the_registry(models: Registry, tmp_path: Path) -> None:
    assert not models.fetch("1", tmp_path).exists()


def test_a_file_that_is_no_database_is_a_registry_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours.db").write_text("no database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'ours.db'}")
    with pytest.raises(RegistryError, match=r"ours\.db"), connected("m"):
        pass


def test_a_registry_that_was_lost_is_not_taken_for_a_new_one(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(shutil.copy(database, tmp_path / "mlflow.db"))
    with connected("m") as models:
        promote(models, "1", "2")
    damaged = file.read_bytes()[:100] + b"damaged" * 9999
    for name, content in (("damaged", damaged), ("without", database.read_bytes())):
        root = tmp_path / name  # another workspace for SQLAlchemy, which keeps the file open; the same by what it notes
        shutil.copytree(tmp_path / ".eckart", root / ".eckart")
        (root / "mlflow.db").write_bytes(content)
        monkeypatch.chdir(root)
        with pytest.raises(RegistryLost, match=r"\b2\b.*--first"), connected("m"):
            pass
    assert (tmp_path / "damaged/mlflow.db.damaged").read_bytes() == damaged
    with connected("m", first=True) as begun:
        promote(begun, "3")
    with connected("m") as found:
        assert found.aliases() == {CHAMPION: "3"}


def test_a_clock_that_goes_back_makes_no_other_order(models: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(models, "1")
    back = datetime.now(UTC) - timedelta(days=1)
    monkeypatch.setattr(versions, "datetime", type("Back", (datetime,), {"now": lambda _: back}))
    promote(models, "2", "3")
    assert models.aliases() == {CHAMPION: "3", PREVIOUS: "2"}
    assert models.roll_back() == ("3", "2")


def test_a_pending_champion_is_not_noted_as_the_last_one(database: Path, tmp_path: Path) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    with connected("m") as models:
        models.mark("1", {SMOKE: "pending"})
        models.client.set_registered_model_alias("m", CHAMPION, "1")
    with connected("m"):
        pass
    with connected("m") as models:
        models.client.delete_registered_model_alias("m", CHAMPION)
    with connected("m"):
        pass


def test_two_spellings_of_a_database_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert versions._absolute("sqlite:///mlflow.db") == versions._absolute(f"sqlite:///{tmp_path}/x/../mlflow.db")
    assert versions._absolute("postgresql://host/a") == "postgresql://host/a"


def test_the_environment_is_left_as_it_was(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    with connected("m"):
        assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert "MLFLOW_TRACKING_URI" not in os.environ
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    with connected("m") as found:
        assert found.version("4")
    assert os.environ["MLFLOW_TRACKING_URI"] == f"sqlite:///{database}"


def test_a_registry_apart_from_the_runs_is_honoured(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in ("runs", "registry"):
        shutil.copy(database, tmp_path / f"{store}.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"sqlite:///{tmp_path / 'registry.db'}")
    with connected("m") as found:
        promote(found, "1")
    there = [
        MlflowClient(f"sqlite:///{tmp_path / store}.db", f"sqlite:///{tmp_path / store}.db")
        for store in ("runs", "registry")
    ]
    assert [dict(client.get_registered_model("m").aliases) for client in there] == [{}, {CHAMPION: 1}]


def test_a_registry_that_cannot_be_reached_is_an_error_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hush@127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RegistryError, match=r"http://127\.0\.0\.1:9\b") as said, connected("m"):
        pass
    assert "hush" not in str(said.value)


def test_the_second_of_two_waits_for_the_first(database: Path, tmp_path: Path) -> None:
    """Threads stand for processes here: a lock on a file belongs to the one who opened it."""
    shutil.copy(database, tmp_path / "mlflow.db")
    order: list[str] = []

    def second() -> None:
        with connected("m") as models:
            order.append(f"second finds {models.aliases()}")

    waiting = threading.Thread(target=second)
    with connected("m") as first:
        waiting.start()
        promote(first, "1")
        order.append("first is done")
    waiting.join()
    assert order == ["first is done", "second finds {'champion': '1'}"]


class Killed(BaseException):
    """Stands for a kill: no handler of the code's own sees it. A test of the flow uses a real one."""


WRITES = (
    "set_registered_model_alias",
    "delete_registered_model_alias",
    "set_model_version_tag",
    "delete_model_version_tag",
    "update_model_version",
)


def kill_before(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End what writes to the registry before its write `position`, counted from 0."""
    left = [None] * position

    def deadly(write: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            if not left:
                raise Killed
            left.pop()
            write(*args)

        return counted

    for name in WRITES:
        monkeypatch.setattr(MlflowClient, name, deadly(getattr(MlflowClient, name)))


def trials(models: Registry, work: Callable[[Registry], object]) -> Iterator[dict[str, str]]:
    """Kill `work` before each of its writes, and then at none; the aliases that this leaves, of a new model each time.

    Before it version 2 has replaced version 1, and 3 is the challenger. An exception of `work` is none of ours.
    """
    for position in itertools.count():
        models.name = f"m{position}-{work.__name__}"
        models.client.create_registered_model(models.name)
        for tags in ({PROMOTED_AT: "1", SMOKE: "passed"}, {PROMOTED_AT: "2", SMOKE: "passed"}, {}):
            models.client.create_model_version(models.name, "file:///nowhere", tags=tags)
        for alias, number in ((PREVIOUS, "1"), (CHAMPION, "2"), (CHALLENGER, "3")):
            models.client.set_registered_model_alias(models.name, alias, number)
        with pytest.MonkeyPatch.context() as patch:
            kill_before(position, patch)
            try:
                with suppress(SmokeFailed):
                    work(models)
                killed = False
            except Killed:
                killed = True
        yield models.aliases()
        if not killed:
            return


def settled(models: Registry) -> ModelVersion:
    """The champion after the next one to come has settled what was left; the aliases fit it."""
    with suppress(SmokeFailed):
        models.settle()
    champion = models.champion()
    assert champion
    assert champion.tags[SMOKE].startswith("passed")
    assert models.aliases().get(PREVIOUS) == models.before(champion)
    return champion


def promote_3(models: Registry) -> None:
    models.promote("3", models.champion())


def roll_back(models: Registry) -> None:
    models.roll_back()


class TestKilled:
    """Killed before each of its writes, then settled, then run again: there is a champion at every moment."""

    def test_a_promotion_is_finished_or_not_begun(self, models: Registry) -> None:
        champions = []
        for left in trials(models, promote_3):
            assert left[CHAMPION] in ("2", "3")
            champions.append(str(settled(models).version))
            assert champions[-1] == left[CHAMPION]
            if champions[-1] == "2":
                promote_3(models)
            assert models.aliases() == {CHAMPION: "3", PREVIOUS: "2"}
            assert models.before(settled(models)) == "2"
            assert models.before(models.version("2")) == "1"
        assert len(champions) > 4
        assert champions == sorted(champions)  # once it is moved it stays
        assert set(champions) == {"2", "3"}

    def test_a_version_that_does_not_answer_never_stays(
        self, models: Registry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def smoke(self: Registry, reference: str) -> None:
            if reference == f"@{CHAMPION}" and self.aliases()[CHAMPION] == "3":
                raise SmokeFailed("it is silent")

        monkeypatch.setattr(Registry, "smoke", smoke)
        found = []
        for left in trials(models, promote_3):
            found.append(left[CHAMPION])
            assert settled(models).version in (2, "2")
            with pytest.raises(SmokeFailed):
                promote_3(models)
            assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1", CHALLENGER: "3"}
            assert models.before(settled(models)) == "1"
        assert set(found) == {"2", "3"}

    def test_a_rollback_is_finished_or_not_begun(self, models: Registry) -> None:
        champions = []
        for left in trials(models, roll_back):
            champions.append(left[CHAMPION])
            assert left[CHAMPION] == str(settled(models).version)
            if champions[-1] == "2":
                models.roll_back()
            assert models.aliases() == {CHAMPION: "1", CHALLENGER: "3"}
            assert ROLLED_BACK in models.version("2").tags
        assert champions == sorted(champions, reverse=True)
        assert set(champions) == {"1", "2"}


@pytest.mark.parametrize("kind", TASK_NAMES)
def test_the_example_of_a_version_is_what_it_reads(kind: TaskName) -> None:
    task, pairs = a_task(kind, (), task_class(kind).metrics[0]), kind == "question_answering"
    example, columns = model_package.example(task, pairs), model_package.questions(task, pairs)
    assert list(example) == columns.input_names()
    _enforce_schema(example, columns)


def test_a_version_without_its_example_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(SmokeFailed):
        ask(str(tmp_path))
