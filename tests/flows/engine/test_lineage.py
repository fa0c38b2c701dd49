"""Only a run writes an entry: whatever else puts bytes into a workspace, what was edited stays stale, and says so.

An entry is what dvc.lock, or the run cache, says that some outputs were made from.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from flows.cli import app
from flows.engine import dvc_transport, verify
from flows.gc import collect
from flows.workspace import reproduce
from tests.flows.gc.test_gc import PROMOTION
from tests.flows.toy import Study, call, ran
from tests.flows.workspace.test_reproduce import PARAMS as STUDY
from tests.flows.workspace.test_reproduce import PIPELINE, clone, finish, repository, run
from tests.workspace import digests

PARAMS = STUDY + PROMOTION
CANDIDATE = "finetune@a-0.5"
SCRIPT = "eckart/recover.sh"
"""What counts as code."""
RECORDED = PIPELINE.replace("deps: [data/splits]\n    params", f"deps: [data/splits, {SCRIPT}]\n    params").replace(
    "      - grep gain params.yaml", f"      - sh {SCRIPT}\n      - grep gain params.yaml"
)
EDITS = {
    "parameters": ("params.yaml", PARAMS.replace("gain: 1", "gain: 9")),
    "code": (SCRIPT, "true  # better\n"),
    "data": ("data/raw/rows.csv", "edited\n"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = repository(tmp_path_factory.mktemp("lineage") / "main")
    (root / SCRIPT).parent.mkdir(parents=True)
    (root / SCRIPT).write_text("true\n")
    return finish(root, PARAMS, RECORDED)


@pytest.fixture
def main(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "main"
    shutil.copytree(finished, root, symlinks=True)
    monkeypatch.chdir(root)
    return root


@pytest.fixture(params=EDITS)
def edited(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def edit(root: Path, what: str) -> None:
    file, content = EDITS[what]
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(content)


def entries(root: Path) -> dict[str, str]:
    """dvc.lock and the run cache."""
    files = {"dvc.lock": (root / "dvc.lock").read_text()}
    return files | digests(root / ".dvc/cache/runs")


def assert_made_anew(root: Path) -> None:
    """The edit is nobody's result: the candidate is run."""
    assert run(root)[CANDIDATE] == "Executed"
    assert CANDIDATE in ran(root)


def test_pull_writes_none_and_push_carries_none(
    main: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    dvc_transport.push()
    shared, before = digests(tmp_path / "eckart-storage"), entries(main)
    other = clone(tmp_path / "other", monkeypatch)
    edit(other, edited)
    done = CliRunner().invoke(app, ["pull"])
    assert done.exit_code == 0
    assert ("extract" if edited == "data" else CANDIDATE) in done.output
    assert "up to date." not in done.output.removesuffix("brings them up to date.\n")
    assert entries(other) == before
    dvc_transport.push()
    assert digests(tmp_path / "eckart-storage") == shared
    assert_made_anew(other)


def test_a_dvc_lock_that_was_cut_off_is_neither_pushed_nor_pulled(main: Path) -> None:
    text = (main / "dvc.lock").read_text()
    (main / "dvc.lock").write_text(text[: text.index("md5") + 1])
    before = entries(main)
    for act in (dvc_transport.push, dvc_transport.pull):
        with pytest.raises(dvc_transport.TransportFailed, match=r"git checkout dvc\.lock"):
            act()
    assert entries(main) == before
    assert "Executed" not in run(main).values()


def test_pull_leaves_an_edited_output_and_says_so(main: Path) -> None:
    dvc_transport.push()
    (main / "data/splits/train").write_text("edited\n")
    before = entries(main)
    assert "extract" in dvc_transport.pull().stale
    assert (main / "data/splits/train").read_text() == "edited\n"
    assert entries(main) == before


def test_a_run_restores_nothing_for_an_edit_even_if_the_lock_file_is_damaged(main: Path, edited: str) -> None:
    edit(main, edited)
    (main / "dvc.lock").write_text((main / "dvc.lock").read_text()[:10])
    for name in ("data/splits", "models", "reports"):
        shutil.rmtree(main / name)
    assert_made_anew(main)


def test_reproduce_keeps_bytes_and_writes_none(main: Path, edited: str) -> None:
    outs = reproduce.record("a-0.5").outs
    edit(main, edited)
    shutil.rmtree(main / ".dvc/cache/files/md5" / next(iter(outs.values()))[:2])
    if edited != "data":
        call(main, "dvc", "push", "-q", "data/raw")
    before = entries(main)
    reproduce.reproduce(reproduce.record("a-0.5"), again=edited == "code")
    assert entries(main) == before
    assert_made_anew(main)


def test_gc_writes_none(main: Path, edited: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    edit(main, edited)
    (main / "resolved.yaml").write_text(PARAMS)
    before = entries(main)
    with collect.kinds(1, 1) as kinds:
        for kind in kinds:
            kind.remove()
    assert entries(main) == before
    assert_made_anew(main)


class TestVerify:
    """On a real study, whose stages record what they were run with."""

    @pytest.fixture
    def root(self, study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        root = study.copied(tmp_path / "main")
        monkeypatch.chdir(root)
        call(root, "dvc", "remote", "add", "-q", "--default", "storage", str(tmp_path / "storage"))
        return root

    def test_every_stage_of_a_run_is_vouched_for_and_a_damaged_entry_hides_no_other(self, root: Path) -> None:
        assert CliRunner().invoke(app, ["verify"]).exit_code == 0
        damaged = next((root / ".dvc/cache/runs").glob("*/*/*")).with_name("0" * 64)
        damaged.write_bytes(b"\xff\x00")
        findings = verify.verify()
        assert findings.damaged == [str(damaged.resolve())]
        assert not findings.false
        assert not findings.unrecorded
        names = {entry.stage for entry in findings.agree if entry.place == "dvc.lock"}
        assert names == set(YAML(typ="safe").load((root / "dvc.lock").read_text())["stages"])

    def test_a_false_entry_is_named_in_dvc_lock_and_in_the_run_cache_of_the_remote(self, root: Path) -> None:
        """As `dvc commit` writes one: it takes outputs for those of whatever the inputs are now."""
        dvc_transport.push()
        params = root / "params.yaml"
        params.write_text(params.read_text().replace("steps: 2", "steps: 9"))
        code = root / "eckart/recovery/finetune.py"
        code.write_text(code.read_text() + "# edited\n")
        call(root, "dvc", "repro", "-q", "resolve")
        call(root, "dvc", "commit", "-q", "--force", "finetune@svd-0.5")
        dvc_transport.push()
        shutil.rmtree(root / ".dvc/cache/runs")  # so that the remote alone has it
        description, places = next(item for item in verify.verify().false.items() if "finetune@svd-0.5" in item[0])
        assert "recipes.*.recovery" in description
        assert "code.finetune.*" in description
        assert len(places) == 2
        assert places[0].place == "dvc.lock"
        assert places[1].place.startswith(str(root.parent / "storage"))
        done = CliRunner().invoke(app, ["verify"])
        assert done.exit_code == 1
        for entry in places:
            assert entry.place in done.output

    def test_parameters_that_were_not_resolved_are_a_false_entry_and_data_make_one_doubtful(self, root: Path) -> None:
        params = root / "params.yaml"
        with (root / "data/raw/reviews.csv").open("a") as file:
            file.write("the edit is nobody's,positive\n")
        call(root, "dvc", "commit", "-q", "--force", "extract")
        params.write_text(params.read_text().replace("steps: 2", "steps: 9"))
        call(root, "dvc", "commit", "-q", "--force", "resolve")
        findings = verify.verify()
        assert [description.partition(":")[0] for description in findings.false] == ["resolve"]
        assert {entry.stage for entry in findings.doubtful} == {"extract"}
