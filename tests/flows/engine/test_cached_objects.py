"""The cache's objects against their names, in a cache that DVC itself filled."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.engine import cached_objects
from tests.flows.toy import call, spoil


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a file and a folder in DVC."""
    root = tmp_path_factory.mktemp("cache")
    call(root, "dvc", "init", "-q", "--no-scm")
    (root / "folder/inner").mkdir(parents=True)
    for name, text in {"file": "one", "folder/a": "two", "folder/inner/b": "three", "folder/empty": ""}.items():
        (root / name).write_text(text)
    call(root, "dvc", "add", "-q", "file", "folder")
    return root


def digest(root: Path, out: str) -> str:
    """As DVC wrote it down."""
    found = re.search(r"md5: (\w+(\.dir)?)", (root / f"{out}.dvc").read_text())
    assert found
    return found[1]


@pytest.fixture
def damage(filled: Path) -> Iterator[Callable[[str], Path]]:
    """A function that changes an object's bytes, and returns its path."""
    changed: dict[Path, bytes] = {}

    def damage(name: str) -> Path:
        path = cached_objects.object_path(filled / ".dvc/cache", name)
        changed[path] = spoil(path)
        return path

    yield damage
    for path, content in changed.items():
        path.unlink()
        path.write_bytes(content)
        path.chmod(0o444)


@pytest.mark.parametrize("out", ["file", "folder"])
def test_what_dvc_wrote_is_whole_and_digests_of_files_are_those_of_dvc(filled: Path, out: str) -> None:
    assert cached_objects.corrupted(filled / ".dvc/cache", digest(filled, out)) == []
    recorded = cached_objects.files(filled / ".dvc/cache", digest(filled, out))
    assert cached_objects.measured(filled / out) == recorded
    assert set(recorded) == ({""} if out == "file" else {"a", "inner/b", "empty"})


def test_a_damaged_file_is_found_alone_and_within_a_folder(filled: Path, damage) -> None:
    paths = [damage(digest(filled, "file")), damage(cached_objects.measured(filled / "folder")["inner/b"])]
    assert [cached_objects.corrupted(filled / ".dvc/cache", digest(filled, out)) for out in ("file", "folder")] == [
        [paths[0]],
        [paths[1]],
    ]


def test_of_a_damaged_list_only_the_list_is_named(filled: Path, damage) -> None:
    damage(cached_objects.measured(filled / "folder")["a"])
    listing = damage(digest(filled, "folder"))
    assert cached_objects.corrupted(filled / ".dvc/cache", digest(filled, "folder")) == [listing]
    assert cached_objects.files(filled / ".dvc/cache", digest(filled, "folder")) is None


def test_what_is_missing_is_not_corrupt(tmp_path: Path) -> None:
    assert cached_objects.corrupted(tmp_path, "0" * 32) == cached_objects.corrupted(tmp_path, "0" * 32 + ".dir") == []
    listing = json.dumps([{"md5": "1" * 32, "relpath": "gone"}])
    (tmp_path / "list").write_text(listing)
    name = cached_objects.measured(tmp_path / "list")[""] + ".dir"
    path = cached_objects.object_path(tmp_path, name)
    path.parent.mkdir(parents=True)
    path.write_text(listing)
    assert cached_objects.corrupted(tmp_path, name) == []
