"""The pipeline installed by pip and used in a folder of its own, which has none of this code."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest
from ruamel.yaml import YAML
from transformers import T5Config
from typer.testing import CliRunner

from flows.cli import app
from flows.environment.git_variables import GIT_VARIABLES
from flows.workspace import init as new_workspace
from flows.workspace import installation, worktrees
from flows.workspace.init import InitError, InitOptions
from tasks import resolve
from tasks.config import yaml_edit
from tasks.config.params_file import read
from tasks.config.validation import mistakes
from tasks.runtime import code_folders
from tasks.runtime.code_digests import CodeChanged
from tasks.runtime.code_folders import PACKAGES
from tests.flows.servers import free_port, until
from tests.flows.toy import ENVIRONMENT, call
from tests.workspace import REPOSITORY, bert, reviews, write_base

NONE = InitOptions(None, None, None, None, None, None)
_SMALL: dict[str, Any] = {
    "threads": {"shared": 1, "candidate": 1},
    "data": {"sizes": {"validation": 8, "test": 12, "calibration": 16}},
    "teacher": {"batch_size": 8, "learning_rate": 1e-3},
    "importance": {"batch_size": 8},
    "recipes": {"anchored": {"recovery": {"steps": 2, "batch_size": 8}}},
    "export": {"recipes": []},
    "benchmark": {"shapes": [[2, 8]], "repetitions": 6},
    "promotion": {"largest_drop": 0.9, "keep": 1, "least_speedup": None},
}
"""What cuts the study down to seconds."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with somebody's model and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worktrees, "dvc", lambda folder, *words: call(folder, "dvc", *words))  # without its imports
    for name in GIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    write_base(Path("my-model"))
    reviews().rename(columns={"text": "body", "label": "stars"}).to_csv("reviews.csv", index=False)
    return tmp_path


def tutorial() -> list[str]:
    """The commands of docs/tutorials/your-model.md."""
    return re.findall(r"^\$ (.+)$", (REPOSITORY / "docs/tutorials/your-model.md").read_text(), re.MULTILINE)


def quick_start() -> list[str]:
    """The commands that README gives for a model of one's own."""
    (block,) = re.findall(r"```bash\n(\. .venv.+?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """That of a new virtual environment in which the built wheel is installed, and what it needs is found."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)], check=True)
    python = folder / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # their files alone, not what they put on the path
    for name in ("mlflow", "uvicorn"):
        (python.parent / name).write_text(f'#!/bin/sh\nexec "{python}" -m {name} "$@"\n')
        (python.parent / name).chmod(0o755)
    inherited = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("PYTHON")}
    return inherited | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder / "venv"),
    }


def test_the_quick_start_and_the_tutorial(
    own: Path, environment: Mapping[str, str], prefect: Mapping[str, str]
) -> None:
    """README's commands as they stand, and then the tutorial's last, on a tiny model and few rows.

    Nobody finds our packages `tasks` and `flows` in the environment, and a folder `tasks` of one's own is not ours.
    """
    env = {**environment, **prefect, "HOME": str(own)}
    look = "from importlib.util import find_spec; print([name for name in ('tasks', 'flows') if find_spec(name)])"
    assert subprocess.run(["python", "-c", look], cwd=own, env=env, check=True, capture_output=True).stdout == b"[]\n"
    activate, *commands = quick_start()
    init, cd, run, promote = commands
    install, *same, serve = tutorial()
    assert "eckart" in install
    assert same == [command.replace("~/", "") for command in commands]

    (own / ".venv").symlink_to(environment["VIRTUAL_ENV"])

    def shell(*lines: str) -> str:
        words = ["bash", "-e", "-c", "\n".join([activate, *lines])]
        return subprocess.run(words, cwd=own, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout

    shell(init)
    here = own / "shop"
    dense = (own / "my-model/model.safetensors").stat().st_size
    # At keep 0.86 its files have this size, so that the search for the goal ends after the first round.
    yaml_edit.update(
        _SMALL | {"study": {"keeps": [0.86], "goals": [{"bytes": int(0.9 * dense)}]}}, here / "params.yaml"
    )
    (here / "tasks").mkdir()
    (here / "tasks/__init__.py").write_text("raise SystemExit('somebody else’s')")
    shell(cd, run)
    assert json.loads((here / "reports/evaluate/anchored-0.86.json").read_text())["size"]["bytes"] <= 0.9 * dense
    assert "Nothing was recomputed" in shell(cd, "eckart run")
    assert shell(cd, promote).splitlines()[-1] == "anchored-0.86 is the champion now: version 1 of shop"
    _serves(serve, here, env)


def _serves(command: str, here: Path, env: Mapping[str, str]) -> None:
    port = free_port()
    words = re.sub(r"--port \d+", f"--port {port}", command)
    with subprocess.Popen(words, shell=True, cwd=here, env=dict(env), start_new_session=True) as server:
        try:
            until(lambda: server.poll() is not None or _answer(f"http://127.0.0.1:{port}/ping", None))
            rows = {"dataframe_split": {"columns": ["text"], "data": [["the plot is brilliant and moving"]]}}
            answer = _answer(f"http://127.0.0.1:{port}/invocations", rows)
            assert answer
            assert answer.json()["predictions"][0]["label"] in ("positive", "negative")
            _refuses_a_page(f"http://127.0.0.1:{port}/invocations", rows)
        finally:
            os.killpg(server.pid, 15)


def _refuses_a_page(url: str, rows: object) -> None:
    """Of another origin: a browser sends without asking what is text or a form, and asks first for all else."""
    evil = {"Origin": "http://evil.example"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        posted = httpx.post(url, content=json.dumps(rows), headers=evil | {"Content-Type": kind}, timeout=60)
        assert posted.status_code == 415
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    first = httpx.options(url, headers=evil | asked)
    assert not first.is_success
    assert "access-control-allow-origin" not in first.headers


def _answer(url: str, rows: Any) -> httpx.Response | None:
    try:
        answer = httpx.post(url, json=rows, timeout=60) if rows else httpx.get(url)
    except httpx.TransportError:
        return None
    return answer if answer.status_code == 200 else None


def test_a_new_workspace_has_the_default_study_and_whole_git_and_dvc(own: Path) -> None:
    assert new_workspace.init(Path("new"), NONE).changes == {}
    assert Path("new/params.yaml").read_text() == (REPOSITORY / "params.yaml").read_text()
    ours = YAML(typ="safe").load((REPOSITORY / "dvc.yaml").read_text())
    theirs = YAML(typ="safe").load(Path("new/dvc.yaml").read_text())
    assert theirs["stages"]["resolve"].pop("deps") == ["params.yaml", "code.yaml"]
    del ours["stages"]["resolve"]["deps"]
    for name, stage in ours["stages"].items():
        stage["cmd"] = stage["cmd"].replace(f"python -m tasks.{name}", f"eckart stage {name}")
    assert theirs == ours
    assert call(Path("new"), "dvc", "stage", "list", "--name-only")
    assert not call(Path("new"), "git", "diff", "--cached", "--name-only")


def test_a_repository_of_ones_own_keeps_what_it_has(own: Path) -> None:
    call(own, "git", "init", "-q")
    call(own, "dvc", "init", "-q")
    call(own, "dvc", "remote", "add", "--default", "mine", "/mine")
    Path(".gitignore").write_text("mine\n")
    new_workspace.init(Path(), NONE)
    assert call(own, "dvc", "remote", "list").split()[:2] == ["mine", "/mine"]
    assert Path(".gitignore").read_text().startswith("mine\n")
    ignored = call(own, "git", "check-ignore", "models/teacher/x", "data/raw/rows.csv", "reports/x", "mine")
    assert len(ignored.split()) == 4
    new_workspace.init(Path("below"), NONE)
    assert not Path("below/.git").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "reviews.csv", "--label", "none"],
        ["--data", "missing.csv"],
        ["--base", "./missing"],
        ["--label", "stars"],
        ["--data", "reviews.csv", "--base", "empty", "--text", "body", "--label", "stars"],
        ["--data", "empty", "--text", "body", "--label", "stars"],
        ["--data", "reviews.csv", "--text", "body", "--label", "body", "--task", "regression"],
        ["--data", "."],  # has the new workspace in it
        ["--base", ".."],
    ],
)
def test_what_cannot_be_made_leaves_nothing(own: Path, words: list[str]) -> None:
    Path("empty").mkdir()
    before = sorted(own.rglob("*"))
    done = CliRunner().invoke(app, ["init", "new/deep", *words])
    assert isinstance(done.exception, SystemExit)
    assert "data/raw/" not in done.output  # which is gone
    assert sorted(own.rglob("*")) == before


def test_a_file_in_the_place_of_a_folder_is_named_first(own: Path) -> None:
    Path("new").mkdir()
    Path("new/data").touch()
    with pytest.raises(InitError, match=r"^new/data is a file"):
        new_workspace.init(Path("new"), NONE)
    assert [path.name for path in Path("new").iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("rules", "ignored"),
    [("mine\nmodels/\n", "models/"), ("*.dvc\n", r"\*\.dvc"), ("/data/*\n", r"/data/\*"), ("/data/*\n!*.dvc\n", None)],
)
def test_what_git_ignores_cannot_be_in_dvc(own: Path, rules: str, ignored: str | None) -> None:
    call(own, "git", "init", "-q")
    Path(".gitignore").write_text(rules)
    before = sorted(own.rglob("*"))
    options = InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None)
    if not ignored:
        new_workspace.init(Path(), options)
        return
    with pytest.raises(InitError, match=rf"rule {ignored} \(\.gitignore, line \d"):
        new_workspace.init(Path(), options)
    assert sorted(own.rglob("*")) == before


def test_what_a_study_reads_is_in_dvc(own: Path) -> None:
    Path("my-model").chmod(0o555)
    new_workspace.init(Path("shop"), InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None))
    shop = own / "shop"
    call(shop, "git", "add", "-A")
    assert {"data/raw.dvc", "models/base.dvc"} <= set(call(shop, "git", "ls-files").split())
    assert "reviews.csv" not in call(shop, "git", "ls-files")
    assert call(shop, "dvc", "status", "data/raw.dvc", "models/base.dvc").strip().endswith("up to date.")
    assert (shop / "models/base/my-model").stat().st_mode & stat.S_IRWXU == stat.S_IRWXU
    worktrees.carry(own / "my-model", own / "carried")
    assert (own / "carried").stat().st_mode & stat.S_IRWXU == stat.S_IRWXU
    Path("my-model").chmod(0o755)


def test_the_name_of_a_folder_is_cut_to_that_of_a_study(own: Path) -> None:
    folder = Path(60 * "x")
    new_workspace.init(folder, InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None))
    written = params(folder)
    assert written["study"]["name"] == written["promotion"]["model"] == 50 * "x"
    assert mistakes(written) == []


def test_data_behind_a_link_have_the_name_of_the_link(own: Path) -> None:
    """A cache names files by their digests, and nothing there says what format they have."""
    Path("blobs").mkdir()
    Path("reviews.csv").rename("blobs/0a1b2c")
    Path("linked.csv").symlink_to("blobs/0a1b2c")
    Path("linked-model").symlink_to("my-model")
    options = InitOptions("linked-model", Path("linked.csv"), "body", None, "stars", None)
    new_workspace.init(Path("shop"), options)
    written = params(Path("shop"))
    assert (written["data"]["source"], written["model"]["base"]) == ("data/raw/linked.csv", "models/base/linked-model")
    assert Path("shop/data/raw/linked.csv").read_bytes() == Path("blobs/0a1b2c").read_bytes()


def test_a_workspace_is_amended_by_what_is_said_again(own: Path) -> None:
    """What its user has, and has changed, stays; the head is for other labels than those that are named now."""
    shop = own / "shop"
    new_workspace.init(Path("shop"), NONE)
    call(shop, "git", "add", "-A")
    yaml_edit.update({"seed": 7, "study": {"keeps": [0.4]}}, shop / "params.yaml")
    reviews = InitOptions(None, Path("reviews.csv"), "body", None, "stars", None)
    new_workspace.init(shop, reviews, again=True)
    yaml_edit.update({"data": {"metric": "f1"}, "study": {"recipes": ["kfac"]}}, shop / "params.yaml")
    first = params(shop)
    assert first["data"]["columns"]["label"] == "stars"
    assert first["data"]["sizes"]["train"] is None
    assert (first["seed"], first["study"]["keeps"]) == (7, [0.4])
    assert "data/raw.dvc" in call(shop, "git", "ls-files", "--others", "--exclude-standard")

    bert(id2label={0: "joy", 1: "anger", 2: "fear"}).save_pretrained("my-model")
    filled = new_workspace.init(shop, replace(NONE, base="my-model"), again=True)
    assert filled.changes["model.base"] == "models/base/my-model"
    assert filled.before["model.base"] == first["model"]["base"]
    assert "joy" in filled.head
    assert params(shop)["data"] | {"max_length": 0} == first["data"] | {"max_length": 0}
    assert params(shop)["study"] == first["study"]
    same = (shop / "params.yaml").read_bytes()
    assert new_workspace.init(shop, replace(NONE, base="my-model"), again=True).changes == {}
    assert (shop / "params.yaml").read_bytes() == same


def test_a_commit_of_the_hub_goes_with_what_it_was_of(own: Path) -> None:
    """Or the report would name it beside the new model, or the new data."""
    new_workspace.init(Path("shop"), InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None))
    hub = {"model": {"base": "someone/base", "revision": "0" * 40}}
    hub["data"] = {"source": "someone/reviews", "config": "all", "revision": "1" * 40}
    yaml_edit.update(hub, Path("shop/params.yaml"))
    with chdir("shop"):
        assert mistakes(read()) == []
    options = InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None)
    new_workspace.init(Path("shop"), options, again=True)
    written = params(Path("shop"))
    assert written["model"]["revision"] is None
    assert (written["data"]["config"], written["data"]["revision"]) == (None, None)
    yaml_edit.update({"model": {"revision": "0" * 40}, "data": {"revision": "1" * 40}}, Path("shop/params.yaml"))
    with chdir("shop"):
        assert [line.partition(":")[0] for line in mistakes(read())] == ["model.revision", "data.revision"]


def test_a_file_that_cannot_be_written_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device")])

    monkeypatch.setattr(shutil, "copytree", full)
    before = sorted(own.rglob("*"))
    with pytest.raises(InitError, match="No space left"):
        new_workspace.init(Path("shop"), InitOptions("my-model", None, None, None, None, None))
    assert sorted(own.rglob("*")) == before


def test_other_text_keeps_the_number_of_blocks(own: Path) -> None:
    for name in ("first.txt", "second.txt"):
        Path(name).write_text("\n".join(f"a good movie {number}" for number in range(2000)))
    text = InitOptions("my-model", Path("first.txt"), None, None, None, "language_modeling")
    new_workspace.init(Path("shop"), text)
    yaml_edit.update({"data": {"sizes": {"calibration": 7}}}, Path("shop/params.yaml"))
    new_workspace.init(Path("shop"), replace(text, base=None, data=Path("second.txt")), again=True)
    data = params(Path("shop"))["data"]
    assert (data["source"], data["sizes"]["calibration"]) == ("data/raw/second.txt", 7)


def test_rows_of_another_format_are_joined_in_another_way(own: Path) -> None:
    lines = [f"a good movie {number}" for number in range(9000)]
    Path("long.txt").write_text("\n".join(lines))
    pd.DataFrame({"text": lines}).to_csv("long.csv", index=False)
    for name, again, expected in (("long.txt", False, ""), ("long.csv", True, None), ("long.txt", True, "")):
        base = None if again else "my-model"
        new_workspace.init(
            Path("shop"), InitOptions(base, Path(name), None, None, None, "language_modeling"), again=again
        )
        assert params(Path("shop"))["data"].get("separator") == expected
    yaml_edit.update({"data": {"separator": "\n"}}, Path("shop/params.yaml"))
    new_workspace.init(Path("shop"), replace(NONE, data=Path("long.csv")), again=True)
    assert params(Path("shop"))["data"]["separator"] == "\n"


def test_another_task_has_no_option_of_the_one_before(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    T5Config(vocab_size=99, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained("my-model")
    options = InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", "summarization")
    new_workspace.init(Path("shop"), options)
    monkeypatch.chdir("shop")
    assert mistakes(read()) == []
    new_workspace.init(Path(), replace(NONE, task="classification"), again=True)
    assert mistakes(read()) == []


def test_what_its_user_set_is_kept(own: Path) -> None:
    """Also where `init` would write another value now: it would have written that one before."""
    bert(id2label={0: "joy", 1: "anger"}).save_pretrained("my-model")
    new_workspace.init(Path("shop"), InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None))
    mine: dict[str, Any] = {"teacher": {"epochs": 0}, "data": {"sizes": {"train": 30}}, "promotion": {"keep": 0.7}}
    yaml_edit.update(mine, Path("shop/params.yaml"))
    Path("reviews.csv").rename("more.csv")
    for options in (replace(NONE, text="body"), InitOptions(None, Path("more.csv"), "body", None, "stars", None)):
        new_workspace.init(Path("shop"), options, again=True)
        found = params(Path("shop"))
        assert [found["teacher"]["epochs"], found["data"]["sizes"]["train"], found["promotion"]["keep"]] == [0, 30, 0.7]


def test_another_task_has_its_own_limits(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of perplexity would let any accuracy pass, and texts of a language model are refused."""
    Path("long.txt").write_text("\n".join(f"a good movie {number}" for number in range(2000)))
    text = InitOptions("my-model", Path("long.txt"), None, None, None, "language_modeling")
    new_workspace.init(Path("shop"), text)
    default = read(REPOSITORY / "params.yaml")["promotion"]
    new_workspace.init(Path("shop"), InitOptions(None, Path("reviews.csv"), "body", None, "stars", None), again=True)
    monkeypatch.chdir("shop")
    assert params(Path())["promotion"] == default | {"model": "shop"}
    assert mistakes(read()) == []
    assert params(Path())["study"]["goals"]
    yaml_edit.update({"data": {"columns": {"text": "text", "label": None}}})
    monkeypatch.chdir(own)
    new_workspace.init(Path("shop"), replace(text, base=None), again=True)
    assert params(Path("shop"))["promotion"]["largest_drop"] > 1
    assert not params(Path("shop"))["study"]["goals"]  # one of accuracy


def test_zero_epochs_are_taken_back_with_the_head_that_they_were_for(own: Path) -> None:
    known = bert(id2label={0: "negative", 1: "positive"})
    known.save_pretrained("my-model")
    new_workspace.init(Path("shop"), InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None))
    assert params(Path("shop"))["teacher"]["epochs"] == 0
    write_base(Path("bare"))
    new_workspace.init(Path("shop"), replace(NONE, base="bare"), again=True)
    assert params(Path("shop"))["teacher"]["epochs"] == params(REPOSITORY)["teacher"]["epochs"]
    yaml_edit.update({"teacher": {"epochs": 5}}, Path("shop/params.yaml"))
    for options in (replace(NONE, text="body"), replace(NONE, base="my-model")):
        new_workspace.init(Path("shop"), options, again=True)
        assert params(Path("shop"))["teacher"]["epochs"] == 5  # the user's own


def test_what_cannot_be_amended_is_left_as_it_was(own: Path) -> None:
    """Other rows under a name that is taken, say, which would be lost."""
    new_workspace.init(Path("shop"), InitOptions("my-model", Path("reviews.csv"), "body", None, "stars", None))
    Path("other").mkdir()
    Path("other/reviews.csv").write_text("body,stars\nother,positive\n")
    Path("b.csv").write_text("body\nother\n")
    before = {
        file: file.read_bytes() for file in Path("shop").rglob("*") if file.is_file() and ".dvc" not in file.parts
    }
    for words in (
        ["--data", "other/reviews.csv"],
        ["--label", "none"],
        ["--base", "./missing"],
        ["--text", "stars", "--data", "b.csv"],
    ):
        assert CliRunner().invoke(app, ["init", "shop", "--again", *words]).exit_code == 1
        assert all(file.read_bytes() == content for file, content in before.items())
        assert not Path("shop/data/raw/b.csv").exists()


def test_what_is_no_workspace_is_not_amended_and_no_other_params_file_is_written_over(own: Path) -> None:
    Path("params.yaml").write_text("mine")
    done = CliRunner().invoke(app, ["init", ".", "--again", "--base", "my-model"])
    assert done.exit_code == 1
    assert Path("params.yaml").read_text() == "mine"
    assert "--again" in CliRunner().invoke(app, ["init", "."]).output
    assert Path("params.yaml").read_text() == "mine"


def params(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = YAML(typ="safe").load((root / "params.yaml").read_text())
    return content


def test_a_workspace_follows_the_installed_code(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it does, the stage `resolve` refuses: DVC would take its result for that of the code that is named."""
    new_workspace.init(Path("new"), NONE)
    monkeypatch.chdir("new")
    before = Path("code.yaml").read_text()
    installation.refresh()
    assert Path("code.yaml").read_text() == before
    for name, folder in code_folders.code_folders().items():
        shutil.copytree(folder, own / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (own / "other/tasks/extract.py").write_text("# edited\n")
    monkeypatch.setattr(code_folders, "code_folders", lambda: {name: own / "other" / name for name in PACKAGES})
    with pytest.raises(CodeChanged, match=r"code\.yaml"):
        resolve.main()
    installation.refresh()
    assert Path("code.yaml").read_text() != before
