"""Write entries of dvc.lock so that the file is complete at every moment; set aside a dvc.lock that was cut off."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from dvc.repo import Repo
from dvc.rwlock import RWLOCK_FILE
from dvc.rwlock import SCHEMA as RWLOCK_SCHEMA
from dvc.schema import COMPILED_LOCKFILE_SCHEMA
from dvc.stage import PipelineStage
from dvc.stage.serialize import to_lockfile
from dvc.utils.serialize import dumps_yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from voluptuous import Invalid

from tasks.artifacts import atomic_files
from tasks.artifacts.errors import EckartError

log = logging.getLogger(__name__)

LOCK = Path("dvc.lock")
_HEAD = "schema: '2.0'\nstages:\n"
_ENTRIES = re.compile(r"(?:  .*\n|\n)*")
_ENTRY = re.compile(r"^  (\S.*):\n((?:    .*\n|\n)*)", re.MULTILINE)
_OUTPUT = re.compile(r"^    - path: (.*)\n(?:      .*\n)*?      md5: (\S+)", re.MULTILINE)
_ANCHOR = re.compile(r"[&*]id\d{3}")  # YAML's marks of repeated values, numbered throughout the file


def write(stage: PipelineStage) -> None:
    """Write a stage's entry into dvc.lock by replacing its lines, so that other processes always read a whole file.

    DVC rewrites the file in place, and parses and lays out the entries of all stages each time: about a second for the
    60 stages of the default study, against milliseconds here. A file with another layout is left to DVC.
    """
    file = Path(stage.dvcfile.path).with_suffix(".lock")
    before = file.read_text("utf-8") if file.exists() else _HEAD
    entry = dumps_yaml({"stages": to_lockfile(stage)}).removeprefix("stages:\n")
    name = re.escape(entry.partition("\n")[0])
    lines = re.compile(rf"^{name}\n(?:    .*\n|\n)*", re.MULTILINE)
    usual = before.startswith(_HEAD) and _ENTRIES.fullmatch(before, len(_HEAD)) and lines.fullmatch(entry)
    if not usual or _ANCHOR.search(before + entry):
        stage.dump(update_pipeline=False)
        return
    after, replaced = lines.subn(lambda _: entry, before)
    atomic_files.write(file, after if replaced else before + entry)


def digests(entry: Mapping[str, Any], part: Literal["deps", "outs"]) -> dict[str, str]:
    """Return path → digest of a stage's dependencies or outputs, whichever `part` names, from its dvc.lock entry."""
    return {item["path"]: item.get("md5", "") for item in entry.get(part, [])}


def outputs_of(wanted: Callable[[str], bool]) -> dict[str, str]:
    """Return path → digest of the outputs that dvc.lock records for stages with such names.

    It reads lines in the file's usual layout, since YAML would take a second for a thousand stages.
    """
    text = LOCK.read_text("utf-8") if LOCK.exists() else ""
    entries = (entry.partition("    outs:\n")[2] for name, entry in _ENTRY.findall(text) if wanted(name))
    return dict(output for entry in entries for output in _OUTPUT.findall(entry))


def heal(repo: Repo) -> None:
    """Rename dvc.lock to dvc.lock.damaged if a full disk or a kill cut it off, and remove DVC's file of locks if so.

    The results that dvc.lock named are found again with the run cache.

    Raises:
        EckartError: a merge of git left both sides in dvc.lock.
    """
    refuse_conflict()
    rwlock = Path(repo.tmp_dir) / RWLOCK_FILE  # who reads and writes what, now
    if _fails(rwlock, lambda text: RWLOCK_SCHEMA(json.loads(text))):
        rwlock.unlink()
    if _fails(LOCK, _check):
        aside = LOCK.with_name(f"{LOCK.name}.damaged")
        LOCK.replace(aside)
        log.warning("%s was cut off; it is now %s, and results are taken from the cache", LOCK, aside)


def refuse_conflict() -> None:
    """Raise EckartError if a merge of git left both sides in dvc.lock."""
    with suppress(FileNotFoundError):
        if re.search(rb"^<<<<<<< ", LOCK.read_bytes(), re.MULTILINE):
            raise EckartError(
                f"{LOCK} has both sides of a merge: take one, `git checkout --ours {LOCK}` or `--theirs`, or that of a "
                f"commit, `git checkout COMMIT {LOCK}`; the results of the other stay in the cache"
            )


def is_damaged() -> bool:
    """Whether dvc.lock was cut off: DVC cannot read it, or its last line is incomplete (`hash: m` is valid YAML).

    A file that was cut off between two lines is not damaged: the stages that it lacks are just not up to date.
    """
    return _fails(LOCK, _check)


def _check(text: str) -> None:
    COMPILED_LOCKFILE_SCHEMA(YAML(typ="safe").load(text) or {})
    if not text.endswith("\n"):
        raise ValueError("half a line")


def _fails(path: Path, check: Callable[[str], Any]) -> bool:
    """Whether the file exists and fails the check."""
    try:
        check(path.read_text("utf-8"))
    except FileNotFoundError:
        pass
    except (YAMLError, ValueError, Invalid):
        return True
    return False
