"""The engine against the dvc command line: same verdicts, same lock file, and nothing lost or run twice."""

import errno
import itertools
import json
import os
import re
import resource
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from flows.engine import (
    cached_objects,
    dvc_transport,
    lock_file,
    locks,
    orphaned_processes,
    stage_processes,
    stage_results,
)
from flows.engine import stages as engine
from flows.engine.stage_processes import CommandFailed
from flows.gc import collect
from tasks.artifacts.errors import EckartError
from tasks.runtime import code_digests
from tests.flows import forked
from tests.flows.servers import until
from tests.flows.toy import ENVIRONMENT, PARAMS, PIPELINE, call, ran, spoil, stale, toy_workspace

ALL = ["source", "total", "work@a", "work@b"]


def execute(root: Path):
    return lambda command: stage_processes.run(command, root, print, {})


def run_all(root: Path) -> dict[str, str]:
    """Every stage in turn: name → status."""
    return {stage.name: engine.run(stage, execute(root)).status for stage in engine.plan(clear=True)}


def planned(name: str, **changes: bool) -> engine.Planned:
    """One stage of the plan."""
    (stage,) = [stage for stage in engine.plan() if stage.name == name]
    return replace(stage, **changes)


def entries(root: Path) -> dict[str, object]:
    """What dvc.lock says of each stage; the order of stages in it is the order in which they ended."""
    return YAML(typ="safe").load((root / "dvc.lock").read_text())["stages"]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    root = toy_workspace(tmp_path / "workspace")
    monkeypatch.chdir(root)
    return root


def test_plan_is_the_graph_of_dvc(workspace: Path) -> None:
    stages = {stage.name: stage for stage in engine.plan()}
    assert set(stages["total"].upstream) == {"work@a", "work@b"}
    assert stages["work@a"].upstream == ("source",)
    assert [name for name, stage in stages.items() if stage.alone] == ["total"]
    assert list(stages).index("source") < list(stages).index("work@a") < list(stages).index("total")


def test_engine_writes_the_lock_file_that_dvc_repro_writes(workspace: Path, tmp_path: Path) -> None:
    run_all(workspace)
    other = toy_workspace(tmp_path / "by-hand")
    call(other, "dvc", "repro")
    for stage in ALL:
        assert entries(workspace)[stage] == entries(other)[stage]


AWKWARD = """\
items: [a, b]
gain:
  a: {long: "WORDS", nil: null, empty: [], "on": "off", tiny: 1.0e-5, lines: "a: b # c\\n\\nd"}
  b: {one: [1, 2], other: [1, 2]}
"""
AWKWARD = AWKWARD.replace("WORDS", "many words " * 20)
TWICE = AWKWARD.replace("one: [1, 2]", "one: &same [3]").replace("other: [1, 2]", "other: *same ")


def test_an_entry_is_written_in_the_bytes_of_dvc(workspace: Path) -> None:
    """First, in between and last; also if a person has changed the layout, or if the same list stands twice."""
    file = workspace / "dvc.lock"

    def after(params: str) -> str:
        (workspace / "params.yaml").write_text(params)
        run_all(workspace)
        return file.read_text()

    written = [after(params) for params in (PARAMS, AWKWARD, TWICE)]
    assert "&id001" in written[-1]
    edited = [f"# by hand\n{written[0]}", written[0].rstrip("\n"), f"{written[0]}datasets: []\n"]
    for params in (PARAMS, AWKWARD, TWICE):
        after(params)
        with locks.repository() as repo:
            for stage, before in itertools.product(repo.index.stages, ["", *written, *edited]):
                file.write_text(before)
                stage.dump(update_pipeline=False)
                expected = file.read_bytes()
                file.write_text(before)
                lock_file.write(stage)
                assert file.read_bytes() == expected


def test_each_finds_the_work_of_the_other_cached(workspace: Path) -> None:
    assert set(run_all(workspace).values()) == {"Executed"}
    assert ran(workspace) == ALL
    assert stale(workspace) == []
    (workspace / "raw.txt").write_text("other\n")
    call(workspace, "dvc", "repro")
    assert ran(workspace) == ALL
    assert set(run_all(workspace).values()) == {"Cached"}


def test_a_parameter_makes_stale_what_dvc_says_and_its_return_restores(workspace: Path) -> None:
    run_all(workspace)
    ran(workspace)
    (workspace / "params.yaml").write_text(PARAMS.replace("b: 2", "b: 3"))
    assert stale(workspace) == ["work@b"]
    assert run_all(workspace) == {"source": "Cached", "work@a": "Cached", "work@b": "Executed", "total": "Executed"}
    (workspace / "params.yaml").write_text(PARAMS)
    assert run_all(workspace) == {"source": "Cached", "work@a": "Cached", "work@b": "Restored", "total": "Restored"}
    assert ran(workspace) == ["total", "work@b"]
    assert stale(workspace) == []


def test_what_a_stage_that_is_gone_left_is_no_input_of_the_others(workspace: Path, tmp_path: Path) -> None:
    """The folder that `total` reads is then as in a clone that never had this stage; back, it is restored."""
    run_all(workspace)
    both = (workspace / "total.txt").read_text()
    one = PARAMS.replace("[a, b]", "[a]")
    (workspace / "params.yaml").write_text(one)
    assert run_all(workspace) == {"source": "Cached", "work@a": "Cached", "total": "Executed"}
    fresh = toy_workspace(tmp_path / "fresh")
    (fresh / "params.yaml").write_text(one)
    call(fresh, "dvc", "repro")
    assert entries(workspace)["total"] == entries(fresh)["total"]
    ran(workspace)
    (workspace / "params.yaml").write_text(PARAMS)
    assert run_all(workspace) == {"source": "Cached", "work@a": "Cached", "work@b": "Restored", "total": "Restored"}
    assert ran(workspace) == []
    assert (workspace / "total.txt").read_text() == both


@pytest.mark.parametrize(
    "kept",
    ["edited", "not in the cache", "corrupt in the cache", "being read", "of a file that was cut off", "looked at"],
)
def test_what_a_stage_that_is_gone_left_stays_where_it_would_be_lost(workspace: Path, kept: str) -> None:
    run_all(workspace)
    left = workspace / "out/b"
    digest = entries(workspace)["work@b"]["outs"][0]["md5"]  # type: ignore[index]
    if kept == "edited":
        left.chmod(0o644)
        left.write_text("mine\n")
    elif kept == "not in the cache":
        cached_objects.object_path(workspace / ".dvc/cache", digest).unlink()
    elif kept == "corrupt in the cache":
        spoil(cached_objects.object_path(workspace / ".dvc/cache", digest))
    if kept == "of a file that was cut off":
        (workspace / "dvc.yaml").write_text(PIPELINE.partition("  work:")[0])
    (workspace / "params.yaml").write_text(PARAMS.replace("[a, b]", "[a]"))
    reader = forked.start(read_out, workspace) if kept == "being read" else None
    until(lambda: not reader or (workspace / "reads").exists())
    engine.plan(clear=kept != "looked at")
    assert left.exists()
    if reader:
        reader.kill()
        reader.join()


@pytest.mark.parametrize("failure", [CommandFailed("no rank", 1), KeyboardInterrupt()])
def test_what_a_stage_that_failed_has_begun_goes(workspace: Path, failure: BaseException) -> None:
    """A stage that reads the whole folder would record it as an input, should the recipe be taken out."""

    def fails(_: str) -> float:
        (workspace / "out").mkdir()
        (workspace / "out/a").write_text("half of it\n")
        raise failure

    engine.run(planned("source"), execute(workspace))
    with pytest.raises(type(failure)):
        engine.run(planned("work@a"), fails)
    assert not (workspace / "out/a").exists()


def test_what_holds_an_output_of_another_stage_stays(workspace: Path) -> None:
    """As after an update, whose stages write files of a folder that one stage wrote as a whole."""
    whole = PIPELINE.replace('outs: ["out/${item.item}"]', "outs: [out]")
    (workspace / "params.yaml").write_text(PARAMS.replace("[a, b]", "[a]"))
    (workspace / "dvc.yaml").write_text(whole)
    run_all(workspace)
    (workspace / "params.yaml").write_text(PARAMS.replace("[a, b]", "[b]"))
    (workspace / "dvc.yaml").write_text(PIPELINE)
    engine.plan(clear=True)
    assert (workspace / "out/a").exists()


def read_out(root: Path) -> None:
    """Hold a lock on the folder `out`, as a stage that reads it does."""
    os.chdir(root)
    with locks.repository() as repo, locks.of_paths(repo, [str(root / "out")], []):
        (root / "reads").touch()
        threading.Event().wait()


def test_what_dvc_repro_computed_is_found_under_another_name(workspace: Path) -> None:
    call(workspace, "dvc", "repro")
    assert set(run_all(workspace).values()) == {"Cached"}
    with locks.repository() as repo:
        for stage in repo.index.stages:
            computation = engine._computation(stage, engine._definition(stage))
            assert stage_results.load(workspace / ".dvc/cache", computation)


@pytest.mark.parametrize("missing", [["data/raw"], ["models/base"], ["data/raw", "models/base"]])
def test_folders_of_the_user_that_are_missing_are_named_together(workspace: Path, missing: list[str]) -> None:
    for folder in ("data/raw", "models/base"):
        (workspace / folder).mkdir(parents=True)
    (workspace / "dvc.yaml").write_text(PIPELINE.replace("deps: [raw.txt]", "deps: [raw.txt, data/raw, models/base]"))
    for folder in missing:
        (workspace / folder).rmdir()
    with pytest.raises(EckartError, match=f"^there is no {' and no '.join(missing)}:"):
        engine.plan()


def test_a_lost_output_is_restored_and_a_damaged_one_replaced(workspace: Path) -> None:
    run_all(workspace)
    ran(workspace)
    (workspace / "out" / "a").unlink()
    (workspace / "total.txt").write_text("damaged\n")
    statuses = run_all(workspace)
    assert (statuses["work@a"], statuses["total"]) == ("Restored", "Restored")
    assert ran(workspace) == []
    assert stale(workspace) == []


CANDIDATES = """\
vars: [params.yaml]
stages:
  search:
    matrix: {recipe: "${study.recipes}", keep: "${study.keeps}"}
    cmd: python toy.py --recipe ${item.recipe} --keep ${item.keep}
    deps: [raw.txt]
    params: ["recipes.${item.recipe}.ranks"]
    outs: ["ranks/${item.recipe}-${item.keep}"]
  finetune:
    matrix: {recipe: "${study.recipes}", keep: "${study.keeps}"}
    cmd: python toy.py --recipe ${item.recipe} --keep ${item.keep} --of ranks/${item.recipe}-${item.keep}
    deps: ["ranks/${item.recipe}-${item.keep}"]
    params: ["recipes.${item.recipe}.recovery"]
    outs: ["tuned/${item.recipe}-${item.keep}"]
"""
"""Two stages of a candidate, of which the second alone reads how it recovers."""
TOY = """\
import pathlib, sys
import ruamel.yaml
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
part, folder = ("recovery", "tuned") if "--of" in words else ("ranks", "ranks")
read = ruamel.yaml.YAML(typ="safe").load(pathlib.Path("params.yaml"))["recipes"][words["--recipe"]][part]
out = pathlib.Path(folder, words["--recipe"] + "-" + words["--keep"])
out.mkdir(parents=True)
(out / "is").write_text(f"{read} {words['--keep']} {pathlib.Path('raw.txt').read_text()}")
print(out, file=open("ran.log", "a"))
"""


class TestTwins:
    """Recipes that differ only in what a later stage reads have the earlier ones in common."""

    @pytest.fixture
    def candidates(self, workspace: Path) -> Path:
        (workspace / "dvc.yaml").write_text(CANDIDATES)
        (workspace / "toy.py").write_text(TOY)
        self.write(workspace, one={"ranks": 1, "recovery": 1}, two={"ranks": 1, "recovery": 2})
        return workspace

    @staticmethod
    def write(root: Path, **recipes: dict[str, int]) -> None:
        content = {"study": {"recipes": list(recipes), "keeps": [0.5, 0.25]}, "recipes": recipes}
        (root / "params.yaml").write_text(json.dumps(content))

    def test_what_is_common_runs_once_and_is_what_dvc_repro_makes(self, candidates: Path, tmp_path: Path) -> None:
        statuses = run_all(candidates)
        assert Counter(statuses.values()) == {"Executed": 6, "Restored": 2}
        assert all(stage.cached and stage.cached.seconds for stage in engine.plan())  # of a twin what the other took
        made = ran(candidates)
        assert sum(name.startswith("ranks/") for name in made) == 2
        assert sum(name.startswith("tuned/") for name in made) == 4
        assert stale(candidates) == []
        by_hand = Path(shutil.copytree(candidates, tmp_path / "by-hand"))
        call(by_hand, "dvc", "repro", "--force", "--no-run-cache")
        assert len(ran(by_hand)) == 8
        assert entries(by_hand) == entries(candidates)

    @pytest.mark.parametrize("new", ["a", "z"])
    def test_a_new_recipe_takes_what_is_there(self, candidates: Path, new: str) -> None:
        self.write(candidates, one={"ranks": 1, "recovery": 1})
        run_all(candidates)
        ran(candidates)
        self.write(candidates, **{"one": {"ranks": 1, "recovery": 1}, new: {"ranks": 1, "recovery": 2}})
        run_all(candidates)
        assert ran(candidates) == [f"tuned/{new}-0.25", f"tuned/{new}-0.5"]

    def test_a_recipe_of_another_name_takes_what_is_in_the_cache(self, candidates: Path) -> None:
        """It was renamed, or another study had it, in a workspace with the same cache."""
        self.write(candidates, one={"ranks": 1, "recovery": 2})
        first = run_all(candidates)
        ran(candidates)
        self.write(candidates, other={"ranks": 1, "recovery": 2})
        assert set(run_all(candidates).values()) == {"Restored"}
        assert ran(candidates) == []
        assert stale(candidates) == []
        shutil.rmtree(candidates / ".dvc/cache/files")
        shutil.rmtree(candidates / "tuned")
        shutil.rmtree(candidates / "ranks")
        self.write(candidates, third={"ranks": 1, "recovery": 2})
        assert set(run_all(candidates).values()) == {"Executed"}
        assert len(first) == len(ran(candidates))

    def test_a_corrupt_twin_is_none_and_leaves_nothing(self, candidates: Path) -> None:
        run_all(candidates)
        second = next(stage for stage in engine.plan() if stage.twin)
        shutil.rmtree(candidates / ".dvc/cache/runs")
        shutil.rmtree(Path(second.writes[0]))
        written = second.cached.outs.values() if second.cached else ()
        listing = cached_objects.files(engine.cache_dir(), next(iter(written)))
        damaged = cached_objects.object_path(engine.cache_dir(), listing["is"])
        whole = spoil(damaged)
        ran(candidates)
        assert engine.run(replace(second, cached=None), execute(candidates)).status == "Executed"
        assert ran(candidates) == [str(Path(second.writes[0]).relative_to(candidates))]
        assert (Path(second.writes[0]) / "is").read_bytes() == whole


def test_a_failed_stage_records_nothing_and_the_rerun_resumes(workspace: Path) -> None:
    (workspace / "dvc.yaml").write_text(PIPELINE.replace("cat out/*", "cat out/* missing"))
    with pytest.raises(stage_processes.CommandFailed, match="missing"):
        run_all(workspace)
    (workspace / "dvc.yaml").write_text(PIPELINE)
    ran(workspace)
    assert run_all(workspace)["work@a"] == "Cached"
    assert ran(workspace) == ["total"]


def test_a_dependency_changed_meanwhile_is_an_error_and_nothing_is_recorded(workspace: Path) -> None:
    def meddle(command: str) -> float:
        (workspace / "raw.txt").write_text("meddled\n")
        return execute(workspace)(command)

    with pytest.raises(engine.StageChanged, match=r"raw\.txt"):
        engine.run(planned("source"), meddle)
    assert "source" in stale(workspace)


def test_a_stage_that_refuses_edited_code_has_changed_and_not_failed(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stage: str) -> None:
        raise code_digests.CodeChanged("the code is other")

    def fail(command: str) -> float:
        raise CommandFailed("its last line")

    monkeypatch.setattr(code_digests, "check_stage", refuse)
    with pytest.raises(engine.StageChanged, match="source: the code is other"):
        engine.run(engine.plan()[0], fail)


def test_outcome_tells_what_dvc_lock_tells(workspace: Path) -> None:
    outcomes = {stage.name: engine.run(stage, execute(workspace)) for stage in engine.plan()}
    again = engine.run(planned("work@b"), execute(workspace))
    assert again.seconds == outcomes["work@b"].seconds > 0
    assert again.key == outcomes["work@b"].key != outcomes["work@a"].key
    assert again.params == {"gain.b": 2}
    assert again.deps == {"source.txt": outcomes["source"].outs["source.txt"]}
    assert f"md5: {again.outs['out/b']}" in (workspace / "dvc.lock").read_text()


def test_threads_of_one_process_run_side_by_side(workspace: Path) -> None:
    """Both work stages are inside their command at once; readers of one file do not end each other's lock."""
    engine.run(planned("source"), execute(workspace))
    both, first = threading.Barrier(2, timeout=600), threading.Event()

    def locks() -> dict[str, dict[str, object]]:
        return json.loads((workspace / ".dvc/tmp/rwlock").read_text())

    def meet(command: str) -> float:
        if command.startswith("echo"):
            both.wait()
        if command.startswith("echo work@b"):
            assert first.wait(600)
            assert str(workspace / "source.txt") in locks()["read"]
        return execute(workspace)(command)

    with ThreadPoolExecutor() as pool:
        a, b = (pool.submit(engine.run, planned(name), meet) for name in ("work@a", "work@b"))
        assert a.result().status == "Executed"
        first.set()
        assert b.result().status == "Executed"
    assert stale(workspace) == ["total"]
    assert not any(locks().values())


def flow(root: Path, bytes_a_file: int | None = None) -> None:
    """Run every stage in a process of its own, on a disk that is full for files of more than so many bytes."""
    os.chdir(root)
    stages = engine.plan()
    if bytes_a_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file,) * 2)
    for stage in stages:
        engine.run(stage, execute(root))


def test_two_flows_at_once_run_nothing_twice(workspace: Path) -> None:
    (workspace / "dvc.yaml").write_text(PIPELINE.replace("cp raw.txt", "sleep 1 && cp raw.txt"))
    both = [forked.start(flow, workspace) for _ in range(2)]
    for process in both:
        process.join(600)
    assert [process.exitcode for process in both] == [0, 0]
    assert ran(workspace) == ALL
    assert stale(workspace) == []


def test_a_stage_alone_waits_for_all_others_and_they_for_it(workspace: Path) -> None:
    """Whatever the order of arrival, no command overlaps the one that must run alone."""
    engine.run(planned("source"), execute(workspace))
    said: list[tuple[str, str]] = []

    def watched(stage: engine.Planned) -> engine.Outcome:
        def execute(command: str) -> float:
            bracketed = f"echo begins; {command}; sleep 0.2; echo ends"
            return engine.execute_here(stage, bracketed, lambda line: said.append((stage.name, line)), None)

        return engine.run(stage, execute)

    with ThreadPoolExecutor() as pool:
        list(pool.map(watched, [planned("work@a", alone=True), planned("work@b")]))
    assert len(said) == 4
    for begins, ends in zip(said[::2], said[1::2], strict=True):
        assert (begins[1], ends) == ("begins", (begins[0], "ends"))


def test_a_stage_that_a_killed_dvc_repro_left_is_refused_until_it_ends(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphaned_processes, "_PATIENCE", 0.0)
    (workspace / "dvc.yaml").write_text(PIPELINE.replace("cp raw.txt", "sleep 600 && cp raw.txt"))
    by_hand = forked.dvc_begun(workspace, ENVIRONMENT, "repro")
    until((workspace / "ran.log").exists)
    left = psutil.Process(by_hand.pid).children(recursive=True)
    by_hand.kill()
    by_hand.join()
    (workspace / "dvc.yaml").write_text(PIPELINE)
    with pytest.raises(orphaned_processes.StillRuns, match=r"\bsource\b") as refused:
        run_all(workspace)
    named = {int(word) for word in re.findall(r"\b\d+\b", str(refused.value).partition("`kill -9")[2])}
    assert named == {process.pid for process in left}
    with pytest.raises(orphaned_processes.StillRuns), collect._no_stage_runs(workspace):
        pass
    for process in left:
        process.kill()
    assert forked.gone(named)
    ran(workspace)
    assert run_all(workspace)["source"] == "Executed"
    assert stale(workspace) == []


def objects(root: Path) -> list[Path]:
    return [path for path in (root / ".dvc/cache/files/md5").rglob("*") if path.is_file()]


FOLDER = """\
stages:
  folder:
    cmd: echo folder >> ran.log && mkdir -p made && cp raw.txt made/one && echo two > made/two
    deps: [raw.txt]
    outs: [made]
"""


@pytest.mark.parametrize("pipeline", [PIPELINE, FOLDER], ids=["files", "folder"])
def test_a_corrupt_object_of_the_cache_is_found_and_made_again(workspace: Path, pipeline: str) -> None:
    """Every object in turn. DVC itself checks a read-only object out as it is."""
    (workspace / "dvc.yaml").write_text(pipeline)
    run_all(workspace)
    ran(workspace)
    outs = [Path(path) for stage in engine.plan() for path in stage.writes]
    before = {path: cached_objects.measured(path) for path in outs}
    for path in objects(workspace):
        whole = spoil(path)
        for out in outs:
            shutil.rmtree(out) if out.is_dir() else out.unlink()
        statuses = run_all(workspace)
        assert sorted(name for name, status in statuses.items() if status == "Executed") == ran(workspace)
        assert "Executed" in statuses.values()
        assert {path: cached_objects.measured(path) for path in outs} == before
        assert path.read_bytes() == whole


def test_a_corrupt_object_that_the_run_cache_alone_names_is_made_again(workspace: Path) -> None:
    params, made = workspace / "params.yaml", workspace / "out/b"
    run_all(workspace)
    whole = made.read_bytes()
    (first,) = [path for path in objects(workspace) if path.read_bytes() == whole]
    params.write_text(PARAMS.replace("b: 2", "b: 3"))
    run_all(workspace)
    spoil(first)
    shutil.rmtree(workspace / ".dvc/cache/computed")
    params.write_text(PARAMS)
    assert run_all(workspace)["work@b"] == "Executed"
    assert first.read_bytes() == made.read_bytes() == whole


def test_a_lock_file_may_be_cut_off_at_any_byte(workspace: Path) -> None:
    """Half an entry may be YAML that is whole; what is not set aside must be of use to DVC."""
    run_all(workspace)
    ran(workspace)
    file = workspace / "dvc.lock"
    whole = file.read_bytes()
    kept = 0
    with locks.repository() as repo:
        for size in range(len(whole)):
            file.write_bytes(whole[:size])
            lock_file.heal(repo)
            if file.exists():
                kept += 1
                engine.plan()
    assert 10 < kept < len(whole) / 2
    assert "Executed" not in run_all(workspace).values()


def test_a_file_of_locks_that_was_cut_off_locks_nothing(workspace: Path) -> None:
    run_all(workspace)
    for content in (b'{"read": {"/so', b"[]", b'{"read": []}', b"\xff"):
        (workspace / ".dvc/tmp/rwlock").write_bytes(content)
        assert set(run_all(workspace).values()) == {"Cached"}
    assert not list((workspace / ".dvc/tmp").glob("*.damaged"))


def test_the_lock_file_is_written_from_another_disk_too(workspace: Path) -> None:
    """.dvc/tmp is a link to one."""
    disks = [Path(disk) for disk in ("/dev/shm", "/var/tmp") if Path(disk).is_dir()]
    other = [disk for disk in disks if disk.stat().st_dev != workspace.stat().st_dev]
    if not other:
        pytest.skip("this machine has one disk")
    with tempfile.TemporaryDirectory(dir=other[0]) as folder:
        shutil.rmtree(workspace / ".dvc/tmp")
        (workspace / ".dvc/tmp").symlink_to(folder)
        assert set(run_all(workspace).values()) == {"Executed"}
        assert set(run_all(workspace).values()) == {"Cached"}


TWO = """\
stages:
  two:
    cmd: echo two >> ran.log && mkdir -p out && cp raw.txt out/one && echo > out/two
    deps: [raw.txt]
    outs: [out/one, out/two]
"""


@pytest.mark.parametrize("ends_before", [None, b"outs", b"- path: out/two"])
def test_a_folder_of_the_run_cache_without_a_whole_entry_is_filled_again(
    workspace: Path, ends_before: bytes | None
) -> None:
    """It is empty, or has what DVC left when it was killed in writing."""
    (workspace / "dvc.yaml").write_text(TWO)
    run_all(workspace)
    expected = entries(workspace)
    (entry,) = (path for path in (workspace / ".dvc/cache/runs").rglob("*") if path.is_file())
    whole = entry.read_bytes()
    entry.unlink()
    if ends_before:
        entry.with_name(".x.tmp").write_bytes(whole[: whole.index(ends_before)])
    for folder in ("out", ".dvc/cache/computed"):
        shutil.rmtree(workspace / folder)
    (workspace / "dvc.lock").unlink()
    assert set(run_all(workspace).values()) == {"Executed"}
    assert entries(workspace) == expected
    assert entry.read_bytes() == whole


KNOWN = {"seconds": 1.5, "outs": [[{"md5": "0" * 32}, {"size": 3}]]}


@pytest.mark.parametrize("content", ["", "[]", b"\xff", None, json.dumps(KNOWN | {"outs": [[{}, {}]]})])
def test_results_that_cannot_be_read_are_not_known_and_new_fields_are_ignored(
    tmp_path: Path, content: str | bytes | None
) -> None:
    file = tmp_path / "computed/one.json"
    file.parent.mkdir()
    file.write_text(json.dumps(KNOWN | {"host": "elsewhere"}))
    assert stage_results.load(tmp_path, "one") == stage_results.Computed(1.5, [({"md5": "0" * 32}, {"size": 3})])
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert stage_results.load(tmp_path, "one") is None


def test_a_computation_with_other_outputs_is_not_taken(workspace: Path) -> None:
    run_all(workspace)
    for file in (workspace / ".dvc/cache/computed").iterdir():
        file.write_text(json.dumps(KNOWN | {"outs": []}))
    shutil.rmtree(workspace / ".dvc/cache/runs")
    (workspace / "dvc.lock").unlink()
    assert set(run_all(workspace).values()) == {"Executed"}


class TestLinks:
    """To another disk. DVC would say that it is outside of the repository once the work is done."""

    def test_outputs_behind_one_are_refused_before_anything_runs(self, workspace: Path, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (workspace / "out").symlink_to(tmp_path / "disk")
        with pytest.raises(engine.WorkspaceUnusable, match=r"^out .*dvc cache dir .*/disk/") as caught:
            engine.plan()
        assert ran(workspace) == []
        (workspace / "out").unlink()
        for command in re.findall(r"`dvc ([^`]*)`", str(caught.value)):
            call(workspace, "dvc", *command.split())
        assert set(run_all(workspace).values()) == {"Executed"}
        assert (workspace / "out/a").is_symlink()
        shutil.rmtree(workspace / "out")
        assert Counter(run_all(workspace).values()) == {"Cached": 2, "Restored": 2}
        assert stale(workspace) == []


def test_a_linked_folder_among_the_inputs_is_refused_and_a_copy_is_not(workspace: Path, tmp_path: Path) -> None:
    """DVC sees an empty folder behind a link, and would never run the stages again."""
    (workspace / "raw.txt").unlink()
    (workspace / "raw.txt").mkdir()
    (workspace / "dvc.yaml").write_text(PIPELINE.replace("cp raw.txt ", "cat raw.txt/*/* > "))
    shared = tmp_path / "sha red"
    shared.mkdir()
    (shared / "rows").write_text("one\n")
    (workspace / "raw.txt/mine").symlink_to(shared)
    with pytest.raises(engine.WorkspaceUnusable, match=r"raw\.txt/mine .*link") as caught:
        engine.plan()
    (workspace / "raw.txt").rename(tmp_path / "elsewhere")
    (workspace / "raw.txt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(engine.WorkspaceUnusable, match=r"^raw\.txt .*link"):
        engine.plan()
    (workspace / "raw.txt").unlink()
    (tmp_path / "elsewhere").rename(workspace / "raw.txt")
    (command,) = re.findall(r"`([^`]*)`", str(caught.value))
    call(workspace, "sh", "-c", command)
    call(workspace, "dvc", "add", "-q", "raw.txt")
    for content in ("one\n", "two\n"):
        (workspace / "raw.txt/mine/rows").write_text(content)
        assert run_all(workspace)["source"] == "Executed"
        assert (workspace / "source.txt").read_text() == content


def test_links_in_the_source_of_an_import_are_its_owner_s(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "big/real").mkdir(parents=True)
    (tmp_path / "big/real/rows").write_text("one\n")
    (tmp_path / "big/link").symlink_to(tmp_path / "big/real")
    call(workspace, "dvc", "import-url", "-q", str(tmp_path / "big"), "big")
    assert engine.plan()


@pytest.mark.parametrize("loud", [False, True])
def test_a_cache_that_takes_no_files_is_an_error_and_costs_no_result(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, loud: bool
) -> None:
    """DVC may only log it."""

    def full(
        _: Any, sources: list[str], __: Any, targets: list[str], *, on_error: Callable[..., None], **___: Any
    ) -> None:
        error = OSError(errno.ENOSPC, "No space left on device")
        if loud:
            raise error
        for source, target in zip(sources, targets, strict=True):
            on_error(source, target, error)

    with monkeypatch.context() as patched:
        patched.setattr("dvc_objects.fs.generic.transfer", full)
        for _ in range(3):
            with pytest.raises(engine.WorkspaceUnusable, match=r"source\.txt.*make room"):
                run_all(workspace)
    assert ran(workspace) == ["source"]
    assert run_all(workspace) == dict.fromkeys(ALL, "Executed") | {"source": "Cached"}
    assert "source" not in ran(workspace)
    shutil.rmtree(workspace / "out")
    assert Counter(run_all(workspace).values()) == {"Cached": 2, "Restored": 2}


def test_both_sides_of_a_merge_in_the_lock_file_are_no_damage(workspace: Path) -> None:
    run_all(workspace)
    lock = (workspace / "dvc.lock").read_text()
    (workspace / "dvc.lock").write_text(lock.replace("stages:\n", "<<<<<<< HEAD\nstages:\n=======\n>>>>>>> other\n", 1))
    ran(workspace)
    for use in (engine.plan, dvc_transport.pull, dvc_transport.push):
        with pytest.raises(EckartError, match=r"merge.*git checkout --ours dvc\.lock"):
            use()
    assert not (workspace / "dvc.lock.damaged").exists()
    assert ran(workspace) == []


BROKEN: dict[str, list[str | None]] = {
    "dvc.yaml": ["stages:\n  source:\n", "stages: [\n", "stages: 3\n", "\udcff", None],
    ".dvc/config": ["[core\n", "[remote]\n    url = 3\n", "[core]\n    colour = red\n", "\udcff"],
    ".dvc/config.local": ["[core\n"],
    ".dvcignore": ["\udcff"],
    "dvc.lock": [None],
    "raw.txt.dvc": ["outs:\n- md5: 3\n", "outs: [", "\udcff"],  # an empty one names nothing
}


@pytest.mark.parametrize(("name", "contents"), BROKEN.items())
def test_what_dvc_cannot_read_is_said_in_words(workspace: Path, name: str, contents: list[str | None]) -> None:
    """None stands for a folder in the place of the file, and comes last."""
    file = workspace / name
    for content in contents:
        file.unlink(missing_ok=True)
        if content is None:
            file.mkdir()
        else:
            file.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises((EckartError, OSError)) as caught:
            engine.plan()
        assert file.name in (message := str(caught.value))
        assert "\n" not in message


def test_what_changed_since_the_run_began_is_not_run(workspace: Path) -> None:
    """Neither with the old parameters nor with the new ones; the stages that it does not concern go on."""
    stages = {stage.name: stage for stage in engine.plan()}
    engine.run(stages["source"], execute(workspace))
    (workspace / "params.yaml").write_text(PARAMS.replace("a: 1", "a: 3"))
    with pytest.raises(engine.StageChanged, match=r"params\.yaml .*dvc\.yaml .*work@a\b"):
        engine.run(stages["work@a"], execute(workspace))
    assert engine.run(stages["work@b"], execute(workspace)).status == "Executed"
    (workspace / "params.yaml").write_text(PARAMS.replace("[a, b]", "[a]"))
    with pytest.raises(engine.StageChanged, match="work@b"):
        engine.run(stages["work@b"], execute(workspace))
    assert ran(workspace) == ["source", "work@b"]


def test_records_that_a_full_disk_cuts_off_cost_nothing(workspace: Path) -> None:
    """Whatever write of DVC's is the first that fails, the next run has the results."""
    run_all(workspace)
    expected = entries(workspace)
    for size in (0, 40, 400, 1200):
        call(workspace, "rm", "-r", ".dvc/cache", "dvc.lock", "source.txt", "out", "total.txt")
        full = forked.start(flow, workspace, size)
        full.join(600)
        assert full.exitcode
        run_all(workspace)
        assert entries(workspace) == expected
        assert stale(workspace) == []


def test_where_git_is_missing_the_message_says_so_alone(workspace: Path) -> None:
    shutil.rmtree(workspace / ".git")
    with pytest.raises(engine.WorkspaceUnusable, match=r"git init") as caught:
        engine.plan()
    assert ".dvcignore" not in str(caught.value)


def test_the_lock_of_the_machine_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All users can write in the folder for temporary files, where they could let it name a file of another."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with locks.machine():
        (lock,) = tmp_path.iterdir()
    (tmp_path / "thesis").write_text("all of it")
    lock.unlink()
    lock.symlink_to("thesis")
    with pytest.raises(OSError, match=re.escape(str(lock))), locks.machine():
        pass
    assert (tmp_path / "thesis").read_text() == "all of it"
