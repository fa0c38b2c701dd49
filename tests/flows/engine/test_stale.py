"""The stages that are stale on the real dvc.yaml: those that read a changed value, or can run changed code."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from dvc.repo import Repo

from flows.engine import stages
from tests.flows.toy import call, stale, tiny_repository

Edit = Callable[[str, str, str], None]
"""Path, and the text in that file that is replaced by another."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which every output is there, and recorded as what its stage wrote; none but `resolve` has run."""
    root = tmp_path_factory.mktemp("stale") / "workspace"
    tiny_repository(root, export={"recipes": ["kfac"]})
    with chdir(root):
        stages.resolve_parameters()
        index = Repo().index
        paths = [Path(part.fs_path) for part in (*index.outs, *index.deps)]
        for path in paths:
            is_folder = any(path in other.parents for other in paths)
            if not is_folder and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(path.name)
    call(root, "dvc", "commit", "-q", "--force")
    return root


@pytest.fixture
def edit(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    root = tmp_path / "workspace"
    shutil.copytree(recorded, root, symlinks=True)
    monkeypatch.chdir(root)
    assert stale(root) == []

    def replace(path: str, before: str, after: str) -> None:
        text = Path(path).read_text()
        assert before in text
        Path(path).write_text(text.replace(before, after))

    return replace


def now_stale() -> set[str]:
    stages.resolve_parameters()
    return set(stale(Path()))


CANDIDATES = ("svd-0.5", "kfac-0.5")
OF_SVD = {f"{stage}@svd-0.5" for stage in ("search", "factorize", "finetune", "evaluate")}
SCORING = {"dense", "export_dense", "export@kfac-0.5", *(f"evaluate@{name}" for name in CANDIDATES)}
TRAINING = {"teacher", "control", *(f"{stage}@{name}" for stage in ("search", "finetune") for name in CANDIDATES)}


@pytest.mark.parametrize(
    ("path", "before", "after", "reads_it"),
    [
        ("params.yaml", "study:", "# a comment\nstudy:", set()),
        ("params.yaml", "max_length: 16", "max_length: 17", {"extract", "compare"}),
        ("params.yaml", "batch_size: 8\n  zero_shot", "batch_size: 4\n  zero_shot", SCORING),
        ("params.yaml", "least_gain: 0.0", "least_gain: 0.1", set()),
        ("params.yaml", "  svd:\n    source: teacher", "  svd:\n    source: base", {*OF_SVD, "compare"}),
    ],
)
def test_a_value_makes_the_stages_stale_that_read_it(
    edit: Edit, path: str, before: str, after: str, reads_it: set[str]
) -> None:
    edit(path, before, after)
    assert now_stale() == reads_it


def test_a_default_is_as_good_as_a_value_and_another_one_makes_the_stages_stale_that_read_it(edit: Edit) -> None:
    price = re.compile(r"(embedding_price: \w+ = Field\(\s*)1\.0")
    module = Path("eckart/ranks/waterfill.py")
    edit("params.yaml", "      embedding_price: 1.0\n", "")
    assert now_stale() == set()
    module.write_text(price.sub(r"\g<1>2.0", module.read_text()))
    assert now_stale() == {"search@kfac-0.5", "compare"}


def test_another_resolved_value_makes_the_stages_stale_that_read_its_value(edit: Edit) -> None:
    """As a new version brings one: params.yaml is the same, and the resolved value is another."""
    edit("tasks/resolve.py", "resolve(read())", 'resolve(read()) | {"seed": 9}')
    assert now_stale() == TRAINING | {"compare"}


@pytest.mark.parametrize(
    ("path", "can_run_it"),
    [
        ("tasks/importance.py", {"importance"}),
        ("eckart/ranks/waterfill.py", {"search@kfac-0.5", "compare"}),
        ("eckart/ranks/threshold.py", set()),
        ("tasks/training/loop.py", TRAINING),
        ("tasks/report/page.html.j2", {"compare"}),
    ],
)
def test_code_makes_the_stages_stale_that_can_run_it(edit: Edit, path: str, can_run_it: set[str]) -> None:
    Path(path).write_text(Path(path).read_text() + "\n")
    assert now_stale() == can_run_it


def test_the_plan_is_of_the_parameters_as_they_are_and_names_all_their_mistakes(edit: Edit) -> None:
    edit("params.yaml", "max_length: 16", "max_length: 17")
    planned = {stage.name: stage.cached for stage in stages.plan()}
    assert planned["resolve"]
    assert not planned["extract"]
    edit("params.yaml", "max_length: 17", "max_length: long")
    edit("params.yaml", "metric: accuracy", "metric: none")
    with pytest.raises(stages.WorkspaceUnusable, match=r"(?s)(?=.*data\.metric)(?=.*data\.max_length)"):
        stages.plan()
