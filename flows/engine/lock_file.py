"""dvc.lock: a stage's entry in DVC's own words, written without those of all others; and healed where it was cut off.

DVC parses the whole file for each stage and lays it out anew, comments and all, in Python: seconds where a study has
fifty stages. Here the lines of one entry are replaced. A file that is laid out otherwise is left to DVC.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

log = logging.getLogger(__name__)

_LOCK = Path("dvc.lock")
_HEAD = "schema: '2.0'\nstages:\n"
_ENTRIES = re.compile(r"(?:  .*\n|\n)*")
_ANCHOR = re.compile(r"[&*]id\d{3}")  # of what stands twice: numbered throughout the file


def write(stage: PipelineStage) -> None:
    """Put what is noted in a stage into dvc.lock, which is whole at every moment."""
    file = Path(stage.dvcfile.path).with_suffix(".lock")
    before = file.read_text("utf-8") if file.exists() else _HEAD
    entry = dumps_yaml({"stages": to_lockfile(stage)}).removeprefix("stages:\n")
    name = re.escape(entry.partition("\n")[0])
    lines = re.compile(rf"^{name}\n(?:    .*\n|\n)*", re.MULTILINE)
    usual = before.startswith(_HEAD) and _ENTRIES.fullmatch(before, len(_HEAD)) and lines.fullmatch(entry)
    if not usual or _ANCHOR.search(before + entry):
        stage.dump(update_pipeline=False)
        return
    after, found = lines.subn(lambda _: entry, before)
    fresh = file.with_name(f"{file.name}.new")  # beside it: .dvc/tmp may be on another disk
    fresh.write_text(after if found else before + entry, "utf-8")
    fresh.replace(file)


def heal(repo: Repo) -> None:
    """Set aside records that a full disk or a kill left half-written: DVC rewrites them in place.

    dvc.lock names results that are in the cache, where the run cache finds them again; rwlock holds locks only.
    """
    rwlock = Path(repo.tmp_dir) / RWLOCK_FILE
    checks = {_LOCK: _check, rwlock: lambda text: RWLOCK_SCHEMA(json.loads(text))}
    for path, check in checks.items():
        if _fails(path, check):
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            log.warning("%s was cut off; it is now %s, and results are taken from the cache", path.name, aside.name)


def is_damaged() -> bool:
    """Whether dvc.lock is there and was cut off: it is what DVC would not take, or ends in half a line.

    Half a line may be YAML: `hash: m`, say. Cut off between two lines it says less than it did, of which the worst is
    that a stage is not up to date.
    """
    return _fails(_LOCK, _check)


def _check(text: str) -> None:
    COMPILED_LOCKFILE_SCHEMA(YAML(typ="safe").load(text) or {})
    if not text.endswith("\n"):
        raise ValueError("half a line")


def _fails(path: Path, check: Callable[[str], Any]) -> bool:
    """Whether the file is there and does not pass."""
    try:
        check(path.read_text("utf-8"))
    except FileNotFoundError:
        pass
    except (YAMLError, ValueError, Invalid):
        return True
    return False
