"""Services of a team: a registry in PostgreSQL, in which promotions take turns, and a DVC remote in an object store."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy
from mlflow import MlflowClient

from deploy import services
from deploy.services import Postgres
from flows.engine import dvc_transport
from flows.registry.versions import CHAMPION, CONTENT, Registry, RegistryError, connected
from tests.flows import forked
from tests.flows.servers import until
from tests.flows.toy import call, commit, toy_workspace

needs_postgres = pytest.mark.skipif(
    not services.postgres_programs(), reason="PostgreSQL is not installed: apt-get install postgresql"
)


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    """A database whose registry has three versions without files and no champion."""
    with services.postgres() as server:
        client = MlflowClient(server.create("mlflow"))
        client.create_registered_model("m")
        for number in range(1, 4):
            client.create_model_version("m", f"file:///nowhere/{number}", tags={CONTENT: f"content {number}"})
        yield server


def promoting(address: str, number: str, folder: Path) -> None:
    """Promote a version as one of two machines, which move the alias at the same time unless one waits."""
    os.chdir(folder)  # the workspace notes the champion that it has seen
    os.environ["MLFLOW_TRACKING_URI"] = address
    os.environ.pop("MLFLOW_REGISTRY_URI", None)
    Registry.smoke = lambda *_: None  # type: ignore[method-assign]
    move = MlflowClient.set_registered_model_alias

    def together(client: MlflowClient, name: str, alias: str, version: str) -> None:
        (folder / f"moves-{number}").touch()
        until(lambda: len(list(folder.glob("moves-*"))) == 2 or waiting(address))
        move(client, name, alias, version)

    MlflowClient.set_registered_model_alias = together
    with connected("m") as models:
        before = models.champion()
        won = models.promote(number, before)
    (folder / f"{number}.json").write_text(json.dumps([str(before.version) if before else None, won]))


def waiting(address: str) -> bool:
    """Whether someone waits for a turn."""
    with sqlalchemy.create_engine(address).connect() as session:
        question = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        return bool(session.execute(sqlalchemy.text(question)).scalar_one())


@needs_postgres
def test_the_second_of_two_concurrent_promotions_replaces_the_first(database: Postgres, tmp_path: Path) -> None:
    address = database.address("mlflow")
    both = [forked.start(promoting, address, number, tmp_path) for number in "12"]
    for process in both:
        process.join()
        assert not process.exitcode
    replaced = {number: json.loads((tmp_path / f"{number}.json").read_text()) for number in "12"}
    champion = str(MlflowClient(address).get_registered_model("m").aliases[CHAMPION])
    first = "1" if champion == "2" else "2"
    assert replaced == {first: [None, True], champion: [first, True]}


def promote_after(act: Callable[[], object]) -> None:
    with connected("m") as models:
        act()
        models.promote("3", models.champion())


@needs_postgres
def test_a_promotion_that_lost_its_lock_moves_nothing(
    database: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow reconnects to a restarted database, and another machine may have promoted meanwhile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Registry, "smoke", lambda *_: None)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database.address("mlflow"))
    with connected("m") as models:
        before_restart = models.aliases()
    with pytest.raises(RegistryError):
        promote_after(database.restart)
    with connected("m") as models:
        assert models.aliases() == before_restart
        models.settle()
        assert models.promote("3", models.champion())


def test_a_clone_pulls_from_an_object_store_what_another_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with services.object_store(tmp_path, "eckart") as (_, keys):
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        first_clone, second_clone = tmp_path / "one", tmp_path / "two"
        toy_workspace(first_clone)
        call(first_clone, "dvc", "remote", "add", "--default", "storage", "s3://eckart/dvc")
        call(first_clone, "dvc", "repro", "-q")
        commit(first_clone)
        call(tmp_path, "git", "clone", "-q", str(first_clone), str(second_clone))
        monkeypatch.chdir(first_clone)
        assert not dvc_transport.push()
        monkeypatch.chdir(second_clone)
        assert dvc_transport.pull() == dvc_transport.Pulled([], [])
        assert (second_clone / "total.txt").read_bytes() == (first_clone / "total.txt").read_bytes()
