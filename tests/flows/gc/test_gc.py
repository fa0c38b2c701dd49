"""Nights that fill the disk, and an end of what nobody names: on toy results, with a real MLflow."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from flows.engine import cached_objects, dvc_transport, stage_processes, stages
from flows.environment.workspaces import WORKSPACES
from flows.gc import collect
from flows.gc.kind import CannotCollect
from flows.registry import versions
from flows.tracking import mirror
from flows.workspace import reproduce, worktrees
from tasks.artifacts.errors import EckartError
from tasks.artifacts.paths import LOGITS
from tests.flows.toy import MLFLOW, Flows, call, commit, stale
from tests.flows.workspace.test_reproduce import MODEL, PARAMS, PIPELINE, repository
from tests.tasks.training.test_saved_logits import recovered
from tests.workspace import digests

PROMOTION = """\
promotion: {model: m, largest_drop: 0.99, standard_errors: 1.0, keep: null, least_speedup: null,
  least_gain: 0.0, continuation: 1}
"""
CURVE = """'{"step":1,"loss":1.0}'"""


@pytest.fixture
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace in which nothing ran, as the working directory; its input is in DVC."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    root = repository(tmp_path / "main")
    (root / "dvc.yaml").write_text(PIPELINE.replace("echo ${item.recipe} > reports", f"echo {CURVE} > reports"))
    (root / "data/raw").mkdir(parents=True)
    monkeypatch.chdir(root)
    write(1)
    call(root, "dvc", "add", "-q", "data/raw")
    return root


def write(night: int) -> None:
    """The parameters and the data of a night."""
    for file in ("params.yaml", "resolved.yaml"):
        Path(file).write_text(PARAMS.replace("gain: 1", f"gain: {night}") + PROMOTION)
    Path("data/raw/rows.csv").write_text(f"rows of night {night}\n")


def run(night: int, told: bool = False) -> list[stages.Outcome]:
    """Run a night, and log it in MLflow if `told`."""
    write(night)
    planned = stages.plan()
    tracking = mirror.Mirror("toy", planned, {})
    if told:
        tracking.start({})
    outcomes = []
    for stage in planned:
        outcomes.append(stages.run(stage, lambda command: stage_processes.run(command, Path.cwd(), print, {})))
        if told:
            tracking.record(outcomes[-1])
    if told:
        tracking.finish(complete=True)
    assert not tracking.down
    return outcomes


def statuses(outcomes: list[stages.Outcome]) -> dict[str, str]:
    return {outcome.stage: outcome.status for outcome in outcomes}


def collected(runs: int = 1, commits: int | None = None) -> dict[str, int]:
    """Remove what goes: kind → how many."""
    with collect.kinds(runs, commits) as kinds:
        for kind in kinds:
            kind.remove()
    return {kind.name: kind.goes.count for kind in kinds}


def lacking(outcomes: list[stages.Outcome]) -> list[str]:
    """The outputs that the cache does not have with all their files."""
    cache = Path(".dvc/cache").resolve()
    outs = [item for outcome in outcomes for item in outcome.outs.items()]
    return sorted(path for path, digest in outs if cached_objects.missing(cache, digest))


def register(night: list[stages.Outcome], run_known: bool) -> str:
    """Make candidate a of a night a version, as a promotion does."""
    own = [outcome for outcome in night if outcome.stage.endswith("@a-0.5")]
    files = Path("models/finetuned/a-0.5")
    with versions.connected("m") as registry:
        experiment = mirror.experiment(registry.client, "toy")
        made = mirror.find(registry.client, experiment, mirror.key_of(own))
        assert made
        # Of a run that is known the rest is found by it.
        inputs = {} if run_known else {path: md5 for outcome in night for path, md5 in outcome.deps.items()}
        tags = {"eckart.candidate": "a-0.5", "dvc.inputs": json.dumps(inputs), **mirror.trace(own)}
        content = own[0].outs[str(files)]
        return str(registry.add(files, "a", content, experiment, made if run_known else None, tags).version)


def test_objects_that_git_or_the_workspace_name_stay_and_all_others_go(main: Path) -> None:
    tagged = run(1)
    commit(main)
    call(main, "git", "tag", "first")
    committed = run(2)
    commit(main)
    uncommitted = run(3)
    last = run(4)
    before = digests(main / ".dvc/cache")
    with collect.kinds(1, None) as kinds:
        told = {kind.name: kind.goes for kind in kinds}
    assert digests(main / ".dvc/cache") == before
    with collect.kinds(1, None) as kinds:
        kinds[1].remove()  # and killed
    collected()
    after = digests(main / ".dvc/cache")
    gone = [main / ".dvc/cache" / name for name in before.keys() - after.keys()]
    assert len(gone) == sum(size.count for size in told.values())
    assert lacking([*tagged, *committed, *last]) == []
    assert [path for path in lacking(uncommitted) if path.endswith("b-0.5")] == ["models/finetuned/b-0.5"]
    assert not any(collected().values())
    assert stale(main) == []
    found = reproduce.reproduce(reproduce.record("a-0.5", "first"))
    assert (found.same, found.origin) == (True, "taken from the cache or the remote")
    assert set(statuses(run(2)).values()) == {"Restored"}
    assert set(statuses(run(3)).values()) == {"Executed"}


def test_commits_before_the_last_ones_go_if_no_tag_names_them(main: Path) -> None:
    first, second, third, fourth = ([*run(night), commit(main)][:-1] for night in range(1, 5))
    call(main, "git", "tag", "second", "HEAD~2")
    collected(commits=1)
    assert lacking([*second, *fourth]) == []
    assert lacking(first)
    assert lacking(third)


def test_what_a_stash_names_stays(main: Path) -> None:
    """Also an earlier one than the last, which no reference of git names."""
    commit(main)
    nights = []
    for night in (1, 2):
        nights.append(run(night))
        call(main, "git", "add", "--all")
        call(main, "git", "stash")
    run(3)
    collected()
    for night in nights:
        assert lacking(night) == []


def test_a_workspace_within_another_repository_is_refused(main: Path) -> None:
    (main / ".git").rename(main.parent / ".git")
    with pytest.raises(CannotCollect, match="dvc gc"), collect.kinds(1, None):
        pass


def test_other_workspaces_keep_their_objects_and_scratch_ones_go(main: Path) -> None:
    first = run(1)
    commit(main)
    folder = WORKSPACES / "other-seed0"
    worktrees.follow(folder, worktrees.sources())
    shutil.copy("dvc.lock", folder)
    call(main, "git", "rm", "-q", "--cached", "dvc.lock")
    call(main, "git", "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-q", "--amend", "-m", "none")
    call(main, "git", "reflog", "expire", "--expire=now", "--all")
    call(folder, "git", "checkout", "-q", "--detach", call(main, "git", "rev-parse", "HEAD").strip())
    shutil.copy("dvc.lock", folder)
    run(2)
    for name in ("reproduce-0123456789", "reproduce-1234567890"):
        worktrees.check_out(WORKSPACES / name, "HEAD")
    with worktrees.locked(WORKSPACES / "reproduce-1234567890"):
        assert collected()["other workspaces"] == 1
    assert lacking(first) == []
    left = {path.name for path in WORKSPACES.iterdir() if path.is_dir()}
    assert left == {"other-seed0", "reproduce-1234567890"}
    call(main, "git", "worktree", "remove", "--force", str(folder))
    collected()
    assert lacking(first)


def test_the_workspace_of_a_study_stays_whatever_its_name(main: Path) -> None:
    commit(main)
    folder = WORKSPACES / "reproduce-0123456789-seed0"
    worktrees.follow(folder, worktrees.sources())
    assert collected()["other workspaces"] == 0
    assert folder.is_dir()


def test_git_forgets_the_scratch_worktrees_and_no_others(main: Path, tmp_path: Path) -> None:
    commit(main)
    own = tmp_path / "disk/own"
    call(main, "git", "worktree", "add", "-q", "--detach", str(own))
    before = call(main, "git", "worktree", "list")
    known, locked, unknown = (WORKSPACES / f"reproduce-012345678{digit}" for digit in "abc")
    for folder in (known, locked):
        worktrees.check_out(folder, "HEAD")
    call(main, "git", "worktree", "lock", str(locked))
    unknown.mkdir()
    unmounted = own.parent.rename(tmp_path / "unmounted")
    assert collected()["other workspaces"] == 3
    unmounted.rename(own.parent)
    assert call(main, "git", "worktree", "list") == before
    assert call(own, "git", "status", "--porcelain") == ""


def test_a_worktree_of_a_bare_repository_is_a_workspace(
    main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(main)
    call(tmp_path, "git", "clone", "-q", "--bare", str(main), "bare.git")
    call(tmp_path / "bare.git", "git", "worktree", "add", "-q", "--detach", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path / "own")
    worktrees.check_out(WORKSPACES / "reproduce-0123456789", "HEAD")
    assert collected()["other workspaces"] == 1


def test_settings_that_dvc_cannot_read_are_no_running_study(main: Path) -> None:
    commit(main)
    worktrees.check_out(WORKSPACES / "other-seed0", "HEAD")
    (WORKSPACES / "other-seed0/.dvc/config").write_text("[core\n")
    with pytest.raises(CannotCollect, match=r"^DVC cannot use .*other-seed0"):
        collected()


def test_nothing_goes_if_git_does_not_know_a_workspace_such_as_after_a_move(
    main: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(main)
    worktrees.follow(WORKSPACES / "other-seed0", worktrees.sources())
    moved = main.rename(main.with_name("moved"))
    monkeypatch.chdir(moved)
    for use in (collected, lambda: worktrees.follow(WORKSPACES / "other-seed0", worktrees.sources())):
        with pytest.raises(EckartError, match="git worktree repair") as caught:
            use()
    (command,) = re.findall(r"`(git [^`]*)`", str(caught.value))
    call(moved, *command.split())
    assert collected()["other workspaces"] == 0
    worktrees.follow(WORKSPACES / "other-seed0", worktrees.sources())


def test_the_workspace_of_an_experiment_of_dvc_is_a_workspace(main: Path) -> None:
    """`dvc exp run --temp` and DVC's queue make clones, which git does not list, and which use this cache."""
    commit(main)
    folder = main / ".dvc/tmp/exps/standalone/tmpabc"
    call(main, "git", "clone", "-q", str(main), str(folder))
    dvc_transport.share_settings(folder)
    first = run(1)
    shutil.copy("dvc.lock", folder)
    run(2)
    collected()
    assert lacking(first) == []
    stage = {"pid": os.getppid(), "cmd": "dvc exp run"}
    (folder / ".dvc/tmp").mkdir(exist_ok=True)
    (folder / ".dvc/tmp/rwlock").write_text(json.dumps({"read": {}, "write": {str(folder / "data/splits"): stage}}))
    with pytest.raises(CannotCollect, match="tmpabc"):
        collected()


def test_nothing_goes_while_a_stage_runs_or_from_a_cache_of_several_clones(main: Path, tmp_path: Path) -> None:
    run(1)
    run(2)
    other = {"pid": os.getppid(), "cmd": "another study"}
    Path(".dvc/tmp/rwlock").write_text(json.dumps({"read": {}, "write": {str(main / "data/splits"): other}}))
    before = digests(main / ".dvc/cache")
    with pytest.raises(CannotCollect):
        collected()
    assert digests(main / ".dvc/cache") == before
    Path(".dvc/tmp/rwlock").unlink()
    call(main, "dvc", "cache", "dir", "--local", str(tmp_path / "shared"))
    with pytest.raises(CannotCollect, match="the workspace that it belongs to"):
        collected()


def test_champions_stay_and_can_be_made_again(main: Path, database: Path) -> None:
    """Five nights that nobody commits: versions of two, one of them with its run; the last is the study's."""
    shutil.copy(database, main)
    nights = {}
    for night in range(1, 6):
        nights[night] = run(night, told=True)
        if night < 4:
            register(nights[night], run_known=night > 1)
    client = MlflowClient(f"sqlite:///{main / MLFLOW}")
    client.delete_model_version("m", "3")
    before = digests(main / "mlruns")
    went = collected()
    after = digests(main / "mlruns")
    # of version 3, and of the candidates of four old nights but for that of version 2
    assert went["models in MLflow"] == 1 + 4 * 2 - 1
    # of four old nights a parent and two children each, but for those that made version 2
    assert went["runs in MLflow"] == 4 * 3 - 2
    assert len(before.keys() - after.keys()) == 2 + 3  # the files of version 3, and three records of lineage
    assert collected()["runs in MLflow"] == 0
    assert lacking(nights[5]) == []
    assert MODEL.rpartition("/")[0] in lacking(nights[3])
    assert lacking([outcome for outcome in nights[1] if outcome.stage == "finetune@a-0.5"]) == []
    assert statuses(run(2)) == {"extract": "Restored", "finetune@a-0.5": "Restored", "finetune@b-0.5": "Executed"}
    commit(main)
    found = reproduce.reproduce(reproduce.record("a-0.5"))
    assert (found.same, found.origin) == (True, "taken from the cache or the remote")
    with versions.connected("m") as registry:
        for number, night in (("1", 1), ("2", 2)):
            (served,) = registry.fetch(number, main.parent / f"version-{number}").parent.parent.rglob("deep/config")
            assert served.read_text().splitlines()[0] == f"gain: {night}"
    assert (found.folder / MODEL).read_bytes() == (served.parents[1] / "model").read_bytes()
    raw = nights[1][0].deps["data/raw"]
    assert not cached_objects.missing(Path(".dvc/cache").resolve(), raw)
    assert statuses(run(5)) == dict.fromkeys(statuses(nights[5]), "Restored")
    assert stale(main) == []
    with pytest.raises(MlflowException):
        client.get_model_version("m", "3")


def test_a_damaged_registry_stops_everything(main: Path) -> None:
    """Its versions may name anything."""
    run(1)
    (main / MLFLOW).write_text("no database")
    for _ in range(2):  # the damaged file stays where it is
        with pytest.raises(CannotCollect, match=rf"{MLFLOW}\.damaged"):
            collected()


@pytest.mark.parametrize("run_known", [True, False])
def test_gc_stops_if_a_version_needs_what_is_in_mlflows_trash(main: Path, database: Path, run_known: bool) -> None:
    """MLflow's gc would empty the trash, with the version's files or its lineage."""
    shutil.copy(database, main)
    night = run(1, told=True)
    number = register(night, run_known)
    run(2, told=True)
    client = MlflowClient(f"sqlite:///{main / MLFLOW}")
    version = client.get_model_version("m", number)
    before = digests(main / "mlruns")

    def stops(advice: str) -> None:
        for _ in range(2):
            with pytest.raises(CannotCollect, match=advice):
                collected()
        assert digests(main / "mlruns") == before

    experiment = client.get_experiment_by_name("toy").experiment_id
    client.delete_experiment(experiment)
    stops(f"mlflow experiments restore --experiment-id {experiment}")
    client.restore_experiment(experiment)
    made = [version.run_id, client.get_run(version.run_id).data.tags["mlflow.parentRunId"]] if run_known else []
    for run_id in made:
        client.delete_run(run_id)
        stops(f"mlflow runs restore --run-id {run_id}")
        client.restore_run(run_id)
    collected()
    assert lacking([outcome for outcome in night if "@b" not in outcome.stage]) == []
    before = digests(main / "mlruns")
    client.delete_logged_model(str(version.source).removeprefix("models:/"))
    stops("delete the version")


def test_of_a_shared_registry_only_the_versions_of_runs_that_are_known_here_can_stop_it(
    main: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of others are in their own stores."""
    stores = {name: f"sqlite:///{shutil.copy(database, main / name)}" for name in (MLFLOW, "theirs.db", "shared.db")}
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", stores["shared.db"])
    with monkeypatch.context() as others:
        others.setenv("MLFLOW_TRACKING_URI", stores["theirs.db"])
        register(run(1, told=True), run_known=True)
    number = register(run(2, told=True), run_known=True)
    collected()
    client = MlflowClient(stores[MLFLOW])
    client.delete_logged_model(str(client.get_model_version("m", number).source).removeprefix("models:/"))
    with pytest.raises(CannotCollect, match=f"^version {number} of m .*delete the version"):
        collected()


def test_saved_logits_stay_while_a_recipe_distills_them(main: Path) -> None:
    run(1)
    distilled = "recipes: {a: {recovery: {steps: 3, batch_size: 4, distillation: {layers: 0.0, top: %d}}}, b: {}}\n"
    study = Path("params.yaml").read_text()
    for top in (3, 4):
        recovered(top)
    Path("params.yaml").write_text(study + distilled % 3)
    before = set(LOGITS.glob("*/*"))
    assert collected()["saved logits"] == 1
    (left,) = LOGITS.glob("*/*")
    recovered(3)
    assert [*LOGITS.glob("*/*")] == [left]
    recovered(4)
    assert set(LOGITS.glob("*/*")) == before
    Path("params.yaml").write_text(study + distilled % 5)
    assert collected()["saved logits"] == 2
    assert [path.name for path in LOGITS.iterdir()] == ["lock"]
    Path("params.yaml").write_text(study)  # whose recipes say nothing
    assert collected()["saved logits"] == 0


def test_the_command_removes_nothing_without_yes(main: Path, flows: Flows) -> None:
    run(1)
    run(2)
    before = digests(main / ".dvc/cache")
    assert flows(main, "gc").exit_code == 0
    assert digests(main / ".dvc/cache") == before
    assert flows(main, "gc", "--yes").exit_code == 0
    assert len(digests(main / ".dvc/cache")) < len(before)
