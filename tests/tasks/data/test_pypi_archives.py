"""What a package index carries, through pip itself, from a folder that stands for the index."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tasks.artifacts.errors import StageError
from tasks.data.pypi_archives import member

# A source distribution that builds without anything from an index: its backend lies beside it.
BACKEND = """
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder, "toy_data-2.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: toy-data\\nVersion: 2.0\\n")
    return info.name
"""
BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = f"{name}-{version}.dist-info"
    tag = "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: absent-dependency\n"
        about = {f"{info}/METADATA": metadata, f"{info}/WHEEL": tag, f"{info}/RECORD": ""}
        for file, content in {**files, **about}.items():
            wheel.writestr(file, content)


def write_sdist(folder: Path, root: str, files: dict[str, str]) -> None:
    metadata = "Metadata-Version: 2.1\nName: toy-data\nVersion: 2.0\n"
    with tarfile.open(folder / f"{root}.tar.gz", "w:gz") as sdist:
        for file, content in {**files, "PKG-INFO": metadata, "pyproject.toml": BUILD, "backend.py": BACKEND}.items():
            entry = tarfile.TarInfo(f"{root}/{file}")
            entry.size = len(content.encode())
            sdist.addfile(entry, io.BytesIO(content.encode()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel, `toy_model==1.0`, and a source distribution, `toy_data==2.0`."""
    folder = tmp_path / "index"
    folder.mkdir()
    files = {"toy_model/weights/a.txt": "alpha", "toy_model/b.txt": "beta", "toy_model/__init__.py": "raise SystemExit"}
    write_wheel(folder, "toy_model", "1.0", files)
    write_sdist(folder, "toy_data-2.0", {"extra/c.txt": "gamma"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_folder_of_a_wheel_is_given_whole_and_lasts_as_long_as_the_context(index: Path) -> None:
    """The name as an index normalises it serves as well."""
    with member("pypi://toy-model==1.0/toy_model") as folder:
        assert {str(file.relative_to(folder)) for file in folder.rglob("*.txt")} == {"weights/a.txt", "b.txt"}
    assert not folder.exists()


def test_the_source_distribution_is_taken_where_there_is_a_wheel_too(index: Path) -> None:
    write_wheel(index, "toy_data", "2.0", {"extra/c.txt": "of the wheel"})
    with member("pypi://toy_data==2.0/extra/c.txt", sdist=True) as file:
        assert file.read_text() == "gamma"
    with member("pypi://toy_data==2.0/extra/c.txt") as file:
        assert file.read_text() == "of the wheel"


def test_a_wheel_of_another_python_is_found_by_its_version(index: Path) -> None:
    """Compiled code is never loaded, so files can be read out of a wheel that does not fit."""
    write_wheel(index, "toy_compiled", "1.0", {"d.txt": "delta"})
    (index / "toy_compiled-1.0-py3-none-any.whl").rename(index / "toy_compiled-1.0-cp39-none-any.whl")
    with member("pypi://toy-compiled==1.0/d.txt", python="3.9") as file:
        assert file.read_text() == "delta"
    with pytest.raises(StageError, match="toy-compiled"), member("pypi://toy-compiled==1.0/d.txt"):
        pass


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("absent==1.0/a", "absent==1.0.*absent==1.0"),
        ("toy_data==2.0/extra/c.txt", r"toy_data==2\.0"),  # no wheel: nothing of a package may run, and building would
        ("toy_model==1.0/toy_model/absent", r"toy_model==1\.0 .*toy_model/absent"),
        ("toy_model==1.0/../../../../../../etc/passwd", "toy_model"),
    ],
)
def test_what_cannot_be_had_is_named(index: Path, address: str, named: str) -> None:
    with pytest.raises(StageError, match=named), member(f"pypi://{address}"):
        pass


def test_an_index_that_does_not_answer_is_said(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(StageError, match="network"), member("pypi://absent==1.0/a"):
        pass


@pytest.mark.parametrize(
    "address",
    [
        "pypi://toy_model/a.txt",
        "pypi://toy_model==1.0/",
        "toy_model==1.0/a.txt",
        "pypi://--help==1.0/a.txt",
        "pypi://toy_model==1.0 --index-url=x/a.txt",
    ],
)
def test_a_malformed_address_is_told_how_to_be_written(address: str) -> None:
    """Without a word to pip, which would take a second and look for it."""
    with pytest.raises(StageError, match="pypi://NAME==VERSION/PATH"), member(address):
        pass
