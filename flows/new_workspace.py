"""`eckart init`: a workspace for the pipeline anywhere, in which a person's own model and data may be named at once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import installation, workspaces
from flows.workspaces import CARRIED
from tasks import params_file
from tasks.code_folders import code_folders
from tasks.dataset import REFERENCE
from tasks.errors import EckartError
from tasks.metrics import TaskKindName
from tasks.params import PARAMS

_CONFIG = "[core]\n    analytics = false\n    check_update = false\n    autostage = false\n"
_RECIPE = "anchored"
RAW, BASE = CARRIED


class InitError(EckartError):
    """No workspace was made; the message says what to do."""


@dataclass(frozen=True)
class Wishes:
    """A person's own model and data; None: those of the default study.

    base: a folder, a GGUF file, or what model.base takes besides.
    data: a file, or a folder of files named by split.
    text, text_pair, label: columns of the data.
    task: None: what the label looks like.
    """

    base: str | None
    data: Path | None
    text: str | None
    text_pair: str | None
    label: str | None
    task: TaskKindName | None


def init(folder: Path, wishes: Wishes) -> dict[str, Any]:
    """Make `folder` a workspace; what is in it already stays.

    Returns:
        What params.yaml says otherwise than the default study.

    Raises:
        InitError: there is a workspace already, or a file is missing; nothing is written.
        EckartError: the files cannot be read, or the study would refuse them; the new files are removed.
    """
    _check(folder, wishes)
    made = _Made(folder)
    try:
        made.write(PARAMS, (code_folders()["eckart"] / PARAMS).read_text())
        for path, text in installation.derived().items():
            made.write(path, text)
        made.write(Path(".dvcignore"), (installation.HOME / ".dvcignore").read_text())
        made.write(REFERENCE / ".gitkeep", "")
        ignored = (installation.HOME / ".gitignore").read_text().partition("\n\n")[2]
        made.append(Path(".gitignore"), ignored)
        changes = _named(folder, wishes, made)
        params_file.update(changes, folder / PARAMS)
        _set_up(folder, made)
        for part in CARRIED:
            _hand_to_dvc(part, made)
    except BaseException as error:
        made.remove()
        if isinstance(error, EckartError):  # of copies that are gone by now
            raise InitError(_by_own_names(str(error), wishes)) from error
        raise
    return changes


def _by_own_names(message: str, wishes: Wishes) -> str:
    for own, place in ((wishes.base, BASE), (wishes.data, RAW)):
        message = message.replace(str(place / Path(own).name), str(own)) if own else message
    return message


class _Made:
    """What is new in a folder, so that it can be taken away again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._new: list[Path] = []
        self._before: dict[Path, str] = {}

    def note(self, path: Path) -> Path:
        """Note that `path`, of the folder, is about to be made; what of the way to it is missing is made."""
        whole = self.folder / path
        missing = [one for one in (whole, *whole.parents) if not one.exists()]
        self._new += missing[-1:]
        whole.parent.mkdir(parents=True, exist_ok=True)
        return whole

    def write(self, path: Path, text: str) -> None:
        if not (self.folder / path).exists():
            self.note(path).write_text(text)

    def append(self, path: Path, text: str) -> None:
        whole = self.folder / path
        if not whole.exists():
            self.write(path, text)
        elif text not in (before := whole.read_text()):
            self._before[whole] = before
            whole.write_text(f"{before.rstrip()}\n\n{text}" if before.strip() else text)

    def remove(self) -> None:
        for path, text in self._before.items():
            path.write_text(text)
        for path in self._new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _check(folder: Path, wishes: Wishes) -> None:
    for path in (PARAMS, *installation.derived(), Path(".dvc")):
        if (folder / path).exists():
            raise InitError(f"{folder} has {path} already: it is a workspace, or name another folder")
    if folder.exists() and not folder.is_dir():
        raise InitError(f"{folder} is a file: name a folder")
    if wishes.data and not wishes.data.exists():
        raise InitError(f"--data {wishes.data} does not exist")
    if wishes.base and not Path(wishes.base).exists() and wishes.base.startswith((".", "/", "~")):
        raise InitError(f"--base {wishes.base} does not exist")
    if not wishes.data and (wishes.text or wishes.text_pair or wishes.label or wishes.task):
        raise InitError("--text, --text-pair, --label and --task are about --data: name that, too")


def _named(folder: Path, wishes: Wishes, made: _Made) -> dict[str, Any]:
    """What params.yaml is to say, once the files are where it names them."""
    name = re.sub(r"[^\w-]+", "-", folder.resolve().name).strip("-") or "study"
    changes: dict[str, Any] = {}
    base = wishes.base
    if base and Path(base).exists():
        base = str(_brought(Path(base), BASE, made))
    if base or wishes.data:
        from tasks import first_params  # torch, and transformers
    if base:
        changes["model"] = {"base": base}
        with chdir(folder):
            first_params.read_base(base)
    if wishes.data:
        source = str(_brought(wishes.data, RAW, made))
        with chdir(folder):
            present = base or _default_base()
            found = first_params.of_data(source, present, wishes.text, wishes.text_pair, wishes.label, wishes.task)
        changes |= found
    if changes:
        changes["study"] = {"name": name, "recipes": [_RECIPE], "control": _RECIPE, **changes.get("study", {})}
        changes["promotion"] = {"model": name}
    return changes


def _default_base() -> str:
    from tasks.params import read

    return str(read()["model"]["base"])


def _brought(source: Path, place: Path, made: _Made) -> Path:
    """`source` copied to where DVC sees it change, as the workspace names it; what lies there already is named."""
    root = (made.folder / place).resolve()
    if source.resolve().is_relative_to(root):
        return place / source.resolve().relative_to(root)
    path = place / source.resolve().name
    target = made.note(path)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
    return path


def _hand_to_dvc(part: Path, made: _Made) -> None:
    """So that a commit says which bytes a study read, and others can pull them; an empty folder waits for some."""
    folder = made.folder
    if not (folder / part).exists():
        made.write(part / ".gitkeep", "")
    elif not workspaces.git(folder, "ls-files", "--", str(part)):
        made.note(part.with_name(f"{part.name}.dvc"))
        made.append(part.with_name(".gitignore"), f"/{part.name}\n")
        workspaces.dvc(folder, "add", "--quiet", str(part))


def _set_up(folder: Path, made: _Made) -> None:
    """git and DVC, where they are not set up."""
    if not _in_git(folder):
        made.note(Path(".git"))
        workspaces.git(folder, "init", "--quiet")
    made.note(Path(".dvc"))
    workspaces.dvc(folder, "init", "--quiet", *([] if (folder / ".git").exists() else ["--subdir"]))
    (folder / ".dvc/config").write_text(_CONFIG)


def _in_git(folder: Path) -> bool:
    asked = subprocess.run(
        ["git", "rev-parse", "--git-dir"], cwd=folder, env=workspaces.environment(), capture_output=True
    )
    return asked.returncode == 0


def in_words(changes: Mapping[str, Any], path: str = "") -> list[str]:
    """Each change on a line, by its path in params.yaml."""
    return [
        line
        for key, value in changes.items()
        for line in (
            in_words(value, f"{path}{key}.") if isinstance(value, Mapping) else [f"{path}{key}: {json.dumps(value)}"]
        )
    ]
