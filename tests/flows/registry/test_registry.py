"""The registry against a real MLflow database: the champion, the version before it, and the state after a kill."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from dvc_data.hashfile.hash import file_md5
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models.utils import _enforce_schema
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, PERMISSION_DENIED, RESOURCE_DOES_NOT_EXIST

from flows.engine import cached_objects
from flows.registry import champion_data, last_champion, model_package, versions
from flows.registry.smoke_test import SmokeFailed, ask
from flows.registry.versions import (
    CHALLENGER,
    CHAMPION,
    CONTENT,
    PREVIOUS,
    PROMOTED_AT,
    ROLLED_BACK,
    SMOKE,
    Registry,
    RegistryError,
    RegistryLost,
    connected,
)
from tasks.artifacts.generation import Generation
from tasks.artifacts.task_spec import REFERENCE, REFERENCE_PARTS, SPLITS
from tasks.nlp_tasks import TASK_NAMES, TaskName, task_class
from tests.flows.servers import one_answer
from tests.workspace import a_task

PASSWORD = "user:hush@127.0.0.1"  # nobody listens there at port 9


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
    with connected("m") as registry:
        yield registry


def silence(patch: pytest.MonkeyPatch) -> None:
    """Have no version answer under the alias, and each under its number."""

    def smoke(_: Registry, reference: str) -> None:
        if reference == f"@{CHAMPION}":
            raise SmokeFailed("it is silent")

    patch.setattr(Registry, "smoke", smoke)


def promote(models: Registry, *numbers: str) -> None:
    for number in numbers:
        models.client.set_registered_model_alias(models.name, versions.CHALLENGER, number)
        assert models.promote(number, models.champion())


def test_going_back_goes_through_all_that_were_replaced(models: Registry) -> None:
    promote(models, "1")
    assert models.aliases() == {CHAMPION: "1"}
    assert models.version("1").tags[SMOKE].startswith("passed")
    promote(models, "2", "3")
    assert models.aliases() == {CHAMPION: "3", PREVIOUS: "2"}
    assert models.roll_back() == ("3", "2")
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    assert models.roll_back() == ("2", "1")
    assert models.aliases() == {CHAMPION: "1"}
    with pytest.raises(versions.NothingBefore, match=r"\b1 of m\b"):
        models.roll_back()
    assert models.aliases() == {CHAMPION: "1"}
    assert [ROLLED_BACK in models.version(number).tags for number in "123"] == [False, True, True]
    for number, decision in {"1": "Promoted", "2": "Rolled back", "3": "Rolled back"}.items():
        version = models.version(number)
        assert version.tags[versions.DECISION].startswith(decision)
        assert version.description.endswith(version.tags[versions.DECISION])


def test_an_alias_or_a_date_that_was_set_by_hand_does_not_hinder_a_rollback(models: Registry) -> None:
    promote(models, "1", "2")
    models.client.set_registered_model_alias("m", CHAMPION, "3")
    assert models.roll_back() == ("3", "2")
    promote(models, "4")
    models.client.set_registered_model_alias("m", CHAMPION, "2")  # since 4 is bad
    assert models.roll_back() == ("2", "1")
    promote(models, "2")
    models.client.set_model_version_tag("m", "1", versions.PROMOTED_AT, "yesterday")
    promote(models, "4")
    assert models.aliases() == {CHAMPION: "4", PREVIOUS: "2"}
    models.client.set_model_version_tag("m", "4", versions.PROMOTED_AT, "today")
    assert models.roll_back() == ("4", "2")
    assert models.roll_back() == ("2", "1")


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"max_length": 32}, True),
        ({"generation": Generation(beams=4)}, True),
        ({"prefix": "summarize: "}, True),
        ({"sizes": {}, "seed": 7}, False),
    ],
)
def test_a_version_is_another_one_if_it_would_answer_otherwise(change: dict[str, Any], counts: bool) -> None:
    task = a_task("summarization", (), "rougeL")
    other = task.model_copy(update=change)
    assert (model_package.answering(task, pairs=False) != model_package.answering(other, pairs=False)) == counts
    assert model_package.answering(task, pairs=True) != model_package.answering(task, pairs=False)


def test_a_champion_that_was_deleted_leaves_the_one_before_to_go_back_to(
    models: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(models, "1", "2", "3")
    assert models.roll_back() == ("3", "2")
    assert (noted := last_champion.last("m"))
    assert noted.version == "2"
    models.client.delete_model_version("m", "2")
    with pytest.raises(RegistryError, match=r"--rollback.* \b1\b.*--first"):
        models.look_for_champion(first=False)
    models.settle()
    assert models.roll_back() == (None, "1")
    assert models.aliases() == {CHAMPION: "1"}
    models.client.delete_model_version("m", "1")
    with pytest.raises(RegistryError, match=r"rolled back.*--first.*--again") as caught:
        models.roll_back()
    assert not isinstance(caught.value, RegistryLost)
    silence(monkeypatch)
    with pytest.raises(SmokeFailed):
        promote(models, "3")  # which was rolled back
    with pytest.raises(RegistryError, match="--first") as caught:
        models.look_for_champion(first=False)
    assert not isinstance(caught.value, RegistryLost)


def test_a_version_promoted_twice_counts_from_the_last_time(models: Registry) -> None:
    promote(models, "1", "2", "1")
    assert models.before(models.version("1")) == "2"
    assert models.roll_back() == ("1", "2")
    with pytest.raises(versions.NothingBefore):  # for someone went back from version 1
        models.roll_back()
    promote(models, "1")
    assert ROLLED_BACK not in models.version("1").tags
    assert models.aliases() == {CHAMPION: "1", PREVIOUS: "2"}


def test_the_version_to_go_back_to_must_answer(models: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(models, "1", "2")

    def smoke(_: Registry, reference: str) -> None:
        raise SmokeFailed(reference)

    monkeypatch.setattr(Registry, "smoke", smoke)
    with pytest.raises(SmokeFailed, match="/1"):
        models.roll_back()
    assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1"}
    assert ROLLED_BACK not in models.version("2").tags


def test_a_champion_that_does_not_answer_gives_way_to_the_one_before(
    models: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or to none; one that was rolled back before stays so."""
    with monkeypatch.context() as patch:
        silence(patch)
        with pytest.raises(SmokeFailed, match=r"\b1\b.* it is silent$"):
            promote(models, "1")
    assert models.aliases() == {CHALLENGER: "1"}
    assert models.version("1").tags[SMOKE].startswith("failed")
    promote(models, "1", "2", "3")
    models.roll_back()
    silence(monkeypatch)
    for number in "34":
        with pytest.raises(SmokeFailed):
            promote(models, number)
        assert models.aliases() == {CHAMPION: "2", PREVIOUS: "1", CHALLENGER: number}
    assert ROLLED_BACK in models.version("3").tags
    assert models.before(models.version("2")) == "1"


def test_a_champion_that_was_changed_meanwhile_is_left_alone(models: Registry) -> None:
    before = models.champion()
    promote(models, "1")
    assert not models.promote("2", before)
    promote(models, "3")
    assert not models.promote("2", models.version("1"))
    assert models.aliases() == {CHAMPION: "3", PREVIOUS: "1"}


def test_a_champion_that_was_set_by_hand_is_the_one_before(models: Registry) -> None:
    models.client.set_registered_model_alias("m", CHAMPION, "1")
    with pytest.raises(versions.NothingBefore):  # what it replaced only the hand knows
        models.roll_back()
    promote(models, "2", "3")
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

    with monkeypatch.context() as patch:
        silence(patch)
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


@pytest.mark.parametrize(("address", "named"), [("sqlite:///ours.db", r"ours\.db"), (f"http://{PASSWORD}:9", ":9")])
def test_a_registry_that_fails_is_an_error_without_a_password(
    address: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.db").write_text("no database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RegistryError, match=named) as caught, connected("m"):
        pass
    assert "hush" not in str(caught.value)


def test_a_store_of_files_that_fails_is_no_version_without_files(
    models: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such a version, a promotion would say that it must be deleted."""
    for away in (
        MlflowException("503 Server Error: Service Unavailable for url: http://127.0.0.1/404/models", INTERNAL_ERROR),
        OSError("Stale file handle: '/mnt/404'"),
    ):
        monkeypatch.setattr("mlflow.artifacts.download_artifacts", Mock(side_effect=away))
        with pytest.raises(versions.RegistryError, match="cannot be read"):
            models.fetch("1", tmp_path / "fetched")
    for error in (
        MlflowException("404 Client Error: Not Found", INTERNAL_ERROR),
        MlflowException("An error occurred (404) when calling the HeadObject operation", INTERNAL_ERROR),
        MlflowException("No such artifact", RESOURCE_DOES_NOT_EXIST),
    ):
        monkeypatch.setattr("mlflow.artifacts.download_artifacts", Mock(side_effect=error))
        assert not models.fetch("1", tmp_path / "fetched").exists()


@pytest.mark.parametrize(
    ("status", "named"), [(401, r"\bMLFLOW_TRACKING_PASSWORD\b"), (403, r"\bMANAGE\b"), (404, r"\b404\b")]
)
def test_a_user_whom_the_server_refuses_is_told_what_to_do(
    status: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_answer(status) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(RegistryError, match=named), connected("m"):
            pass


def test_a_user_who_may_not_delete_moves_no_champion(models: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(models, "1")
    models.client.set_registered_model_alias(models.name, versions.CHALLENGER, "2")
    before = models.aliases()
    denied = MlflowException("Permission denied", error_code=PERMISSION_DENIED)
    for name in ("delete_model_version_tag", "delete_registered_model_alias"):
        monkeypatch.setattr(models.client, name, Mock(side_effect=denied))
    with pytest.raises(MlflowException, match="denied"):
        models.promote("2", models.champion())
    assert models.aliases() == before
    assert SMOKE not in models.version("2").tags


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


def test_a_model_that_was_deleted_is_named_with_the_registry_that_had_it(models: Registry) -> None:
    promote(models, "1", "2")
    models.look_for_champion(first=False)
    models.client.delete_registered_model("m")
    with pytest.raises(RegistryLost, match=r"no longer has m\b.*\bversion 2\b.*--first"):
        models.look_for_champion(first=False)


def test_a_clock_that_goes_back_makes_no_other_order(models: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(models, "1")
    back = datetime.now(UTC) - timedelta(days=1)
    monkeypatch.setattr(versions, "datetime", type("Back", (datetime,), {"now": lambda _: back}))
    promote(models, "2", "3")
    assert models.aliases() == {CHAMPION: "3", PREVIOUS: "2"}
    assert models.roll_back() == ("3", "2")


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


@pytest.fixture
def apart(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """A registry that is not in the store of the runs, which does not exist so far."""
    address = f"sqlite:///{shutil.copy(database, tmp_path / 'registry.db')}"
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", address)
    return MlflowClient(address)


def test_a_damaged_store_of_runs_beside_another_registry_held_no_champion(apart: MlflowClient) -> None:
    Path("mlflow.db.damaged").touch()
    with connected("m") as found:
        assert found.champion() is None


def test_the_champions_examples_are_replaced_only_where_they_are_wrong(
    apart: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If neither cache nor remote has the right ones, the wrong ones are removed."""
    digests = {}
    for part in REFERENCE_PARTS:
        (made := tmp_path / part).write_text(f"the champion's {part}")
        digests[part] = file_md5(str(made))
        (kept := cached_objects.object_path(tmp_path / "cache", digests[part])).parent.mkdir(parents=True)
        made.rename(kept)
    inputs = json.dumps({str(SPLITS / part): digest for part, digest in digests.items()})
    for key, value in {"eckart.study": "s", "dvc.inputs": inputs}.items():
        apart.set_model_version_tag("m", "1", key, value)
    apart.set_registered_model_alias("m", CHAMPION, "1")
    monkeypatch.setattr(champion_data.stages, "cache_dir", lambda: tmp_path / "cache")

    def fetched(wanted: Iterable[str]) -> bool:
        return not any(cached_objects.missing(tmp_path / "cache", digest) for digest in wanted)

    monkeypatch.setattr(champion_data.dvc_transport, "fetch_outputs", fetched)
    champion_data.refresh("s", "m")
    for lost in (False, True):
        if lost:
            shutil.rmtree(tmp_path / "cache")
        (REFERENCE / "task.json").write_text("another's")
        champion_data.refresh("s", "m")
        right = {part: {"": digest} for part, digest in digests.items() if not lost or part != "task.json"}
        assert {file.name: cached_objects.measured(file) for file in REFERENCE.iterdir()} == right
    champion_data.refresh("another", "m")
    assert not any(REFERENCE.iterdir())


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
    assert len(list(example)) == len(columns.input_names())
    _enforce_schema(example, columns)


def test_a_version_without_its_example_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(SmokeFailed):
        ask(str(tmp_path))
