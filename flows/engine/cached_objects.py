"""Check, copy, add and remove the objects of DVC's cache as plain files.

An object is named by the digest of its bytes. DVC trusts a read-only object and never hashes it again, so an object
that the disk has damaged would spread into every workspace. This module compares the bytes with the name.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from dvc.repo import Repo
from dvc_data.hashfile.build import build
from dvc_data.hashfile.hash import file_md5
from dvc_data.hashfile.transfer import transfer
from dvc_data.hashfile.tree import Tree
from dvc_objects.fs.local import LocalFileSystem

log = logging.getLogger(__name__)

_FOLDER = ".dir"  # end of a folder's digest; the object of a folder is a list of its files


def corrupted(cache_dir: Path, digest: str) -> list[Path]:
    """Return the paths of an output's corrupt objects: their bytes do not have the digest that is their name.

    All bytes are read. Missing objects are not reported. If a folder's list of files is corrupt, only the path of the
    list is returned, since its content cannot be trusted.
    """
    path = object_path(cache_dir, digest)
    if path.is_file() and not _whole(path, digest):
        return [path]
    listed = set(_listing(path).values()) if digest.endswith(_FOLDER) and path.exists() else set()
    return sorted(corrupt for file in listed for corrupt in corrupted(cache_dir, file))


def discard_corrupt(cache_dir: Path, digests: Iterable[str]) -> list[Path]:
    """Remove the corrupt objects of these outputs from the cache, and return their paths.

    DVC would use a corrupt object as it is, and never write it anew.
    """
    corrupt = sorted({path for digest in digests for path in corrupted(cache_dir, digest)})
    for path in corrupt:
        log.warning(
            "object %s of DVC's cache is corrupt; it is made again, or fetched", f"{path.parent.name}{path.name}"
        )
        path.unlink()
    return corrupt


def missing(cache_dir: Path, digest: str) -> set[str]:
    """Return the digests of those objects of an output that are not in the cache.

    If the list of a folder's files is missing or corrupt, only the digest of the folder is returned.
    """
    listed = files(cache_dir, digest)
    if listed is None:
        return {digest}
    return {part for part in (digest, *listed.values()) if not object_path(cache_dir, part).exists()}


def copy(cache_dir: Path, digest: str, target: Path) -> None:
    """Copy an output from the cache to `target`, which is replaced. The cache must have all objects of the output."""
    if (listed := files(cache_dir, digest)) is None:
        raise FileNotFoundError(f"the cache has no list of the files of {digest}")
    remove(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if digest.endswith(_FOLDER):
        target.mkdir()
    for name, part in listed.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(object_path(cache_dir, part), target / name)


def add(repo: Repo, path: Path, digest: str) -> None:
    """Add a file or folder to the cache of a workspace, but only if its digest is `digest`."""
    odb = repo.cache.local
    staged, _, built = build(odb, str(path.absolute()), LocalFileSystem(), "md5")
    if built.hash_info.value == digest:
        # shallow=False: if the cache has a folder's list of files but lacks a file, add the file.
        transfer(staged, odb, {built.hash_info}, shallow=False)


def has_all_of(repo: Repo, path: Path) -> bool:
    """Whether the cache has every present file of an output, so that nothing is lost if the output is replaced."""
    if not path.exists():
        return True
    _, _, built = build(repo.cache.local, str(path), LocalFileSystem(), "md5", dry_run=True, ignore=repo.dvcignore)
    digests = [info.value for _, _, info in built] if isinstance(built, Tree) else [built.hash_info.value]
    return all(object_path(Path(repo.cache.local_cache_dir), str(digest)).exists() for digest in digests)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files(cache_dir: Path, digest: str) -> dict[str, str] | None:
    """Return path → digest of the files of an output, according to the cache.

    Paths are relative to the output; if the output is a file, its path is "". The result is None if a folder's list of
    files is missing or corrupt.
    """
    if not digest.endswith(_FOLDER):
        return {"": digest}
    path = object_path(cache_dir, digest)
    return _listing(path) if path.exists() and _whole(path, digest) else None


def measured(path: Path) -> dict[str, str]:
    """Hash all files of `path`, and return path relative to `path` → digest. If `path` is a file, its path is ""."""
    if path.is_file():
        return {"": file_md5(str(path))}
    return {file.relative_to(path).as_posix(): file_md5(str(file)) for file in path.rglob("*") if file.is_file()}


def digest_of(files: Mapping[str, str]) -> str:
    """Return the digest that DVC gives to an output with these files (path → digest, as `measured` returns them)."""
    if set(files) == {""}:
        return files[""]
    tree = Tree.from_list([{"md5": digest, "relpath": name} for name, digest in files.items()])
    tree.digest()
    return str(tree.oid)


def object_path(cache_dir: Path, digest: str) -> Path:
    return cache_dir / "files" / "md5" / digest[:2] / digest[2:]


def _whole(path: Path, digest: str) -> bool:
    return file_md5(str(path)) == digest.removesuffix(_FOLDER)


def _listing(path: Path) -> dict[str, str]:
    return {entry["relpath"]: entry["md5"] for entry in json.loads(path.read_text())}
