"""`eckart init`: a workspace for the pipeline anywhere, in which a person's own model and data may be named at once."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass, replace
from filecmp import cmp
from pathlib import Path
from typing import Any

from flows.workspace import installation, worktrees
from flows.workspace.worktrees import CARRIED
from tasks.artifacts.errors import EckartError
from tasks.artifacts.metrics import TaskKindName
from tasks.artifacts.task_spec import REFERENCE
from tasks.config import yaml_edit
from tasks.config.schema import PARAMS, read, sections

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


@dataclass(frozen=True)
class Laid:
    """What `init` has done: what params.yaml says otherwise than before, which in a new workspace is the default study.

    before: what stood there, by the same keys.
    head: what becomes of the base model's head, in words.
    """

    changes: dict[str, Any]
    before: dict[str, Any]
    head: str


def init(folder: Path, wishes: Wishes, again: bool = False) -> Laid:
    """Make `folder` a workspace, or amend the one that it is; what is in it already stays.

    Args:
        again: whether it is one. What params.yaml says stays, too, but for what the wishes decide.

    Raises:
        InitError: it is a workspace and is not to be amended, or is none and is to be, a file is missing, or another
            one is in its place; nothing is written.
        EckartError: the files cannot be read, or the study would refuse them; all is as it was.
    """
    _check(folder, wishes, again)
    made = _Made(folder)
    try:
        made.keep(PARAMS)
        made.write(PARAMS, (installation.HOME / PARAMS).read_text())
        for path, text in installation.derived().items():
            made.write(path, text)
        made.write(Path(".dvcignore"), (installation.HOME / ".dvcignore").read_text())
        made.write(REFERENCE / ".gitkeep", "")
        ignored = (installation.HOME / ".gitignore").read_text().partition("\n\n")[2]
        made.append(Path(".gitignore"), ignored)
        laid = _named(folder, wishes, made, again)
        yaml_edit.update(laid.changes, folder / PARAMS)
        _set_up(folder, made)
        for part in CARRIED:
            _hand_to_dvc(part, made)
    except BaseException as error:
        made.remove()
        if isinstance(error, EckartError):  # of copies that are gone by now
            raise InitError(_by_own_names(str(error), wishes)) from error
        raise
    return laid


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

    def keep(self, path: Path) -> None:
        """Note a file that is about to change, if it is there."""
        if (whole := self.folder / path).exists():
            self._before[whole] = whole.read_text()

    def append(self, path: Path, text: str) -> None:
        whole = self.folder / path
        if not whole.exists():
            self.write(path, text)
        elif text not in (before := whole.read_text()):
            self.keep(path)
            whole.write_text(f"{before.rstrip()}\n\n{text}" if before.strip() else text)

    def remove(self) -> None:
        for path, text in self._before.items():
            path.write_text(text)
        for path in self._new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _check(folder: Path, wishes: Wishes, again: bool) -> None:
    parts = (PARAMS, *installation.derived(), Path(".dvc"))
    for path in parts:
        if not again and (folder / path).exists():
            raise InitError(
                f"{folder} has {path} already: if it is a workspace, `eckart init {folder} --again` with what is to be "
                "otherwise amends it; if not, name another folder"
            )
        if again and not (folder / path).exists():
            raise InitError(f"{folder} has no {path}: it is no workspace that could be amended; leave out --again")
    if folder.exists() and not folder.is_dir():
        raise InitError(f"{folder} is a file: name a folder")
    if wishes.data and not wishes.data.exists():
        raise InitError(f"--data {wishes.data} does not exist")
    if wishes.base and not Path(wishes.base).exists() and wishes.base.startswith((".", "/", "~")):
        raise InitError(f"--base {wishes.base} does not exist")
    if not (wishes.data or again) and (wishes.text or wishes.text_pair or wishes.label or wishes.task):
        raise InitError("--text, --text-pair, --label and --task are about --data: name that, too")


def _named(folder: Path, wishes: Wishes, made: _Made, again: bool) -> Laid:
    """What params.yaml is to say, once the files are where it names them."""
    present, default = sections(read(folder / PARAMS)), sections(read(installation.HOME / PARAMS))
    name = re.sub(r"[^\w-]+", "-", folder.resolve().name).strip("-") or "study"
    changes: dict[str, Any] = {}
    head = ""
    base = wishes.base
    if base and Path(base).exists():
        base = str(_brought(Path(base), BASE, made))
    source = str(_brought(wishes.data, RAW, made)) if wishes.data else _own_data(present)
    if base or source:
        from flows.workspace import params_from_data  # torch, and transformers
    if base:
        changes["model"] = {"base": base}
        with chdir(folder):
            params_from_data.read_base(base)
    if source:
        told = _completed(wishes, present)
        with chdir(folder):
            found = params_from_data.of_data(
                source, base or present["model"]["base"], told.text, told.text_pair, told.label, told.task
            )
        changes |= found.changes
        head = found.head
    elif wishes.text or wishes.text_pair or wishes.label or wishes.task:
        raise InitError("--text, --text-pair, --label and --task are about data of your own: name them, --data")
    if changes:
        changes["study"] = {"name": name, "recipes": [_RECIPE], "control": _RECIPE, **changes.get("study", {})}
        changes["promotion"] = {"model": name}
    if again:
        changes = _amending(changes, wishes, present, default)
    return Laid(changes, _as_before(changes, present), head)


def _own_data(params: Mapping[str, Any]) -> str | None:
    """The data that an earlier `init`, or its user, has named, if they are the workspace's own."""
    source = str(params["data"]["source"])
    return source if Path(source).is_relative_to(RAW) else None


def _completed(wishes: Wishes, params: Mapping[str, Any]) -> Wishes:
    """The wishes, and what params.yaml says of the workspace's own data where there is none."""
    if not _own_data(params):
        return wishes
    data = params["data"]
    columns = {name: getattr(wishes, name) or data["columns"][name] for name in ("text", "text_pair", "label")}
    task = wishes.task or (None if wishes.data or wishes.label else data["task"])
    return replace(wishes, task=task, **columns)


def _amending(
    changes: dict[str, Any], wishes: Wishes, present: Mapping[str, Any], default: Mapping[str, Any]
) -> dict[str, Any]:
    """Of all that model and data say what the wishes decide, and what nobody has changed yet."""
    data = changes.get("data", {})
    if not wishes.data:
        data = {key: value for key, value in data.items() if key not in ("source", "splits", "sizes")}
    if data.get("task") == present["data"]["task"]:
        data.pop("metric", None)
    if not (wishes.base or wishes.data or wishes.text or wishes.text_pair):
        data.pop("max_length", None)
    kept = {
        section: {
            key: value
            for key, value in changes.get(section, {}).items()
            if present[section][key] == default[section][key]
        }
        for section in ("study", "promotion")
    }
    teacher = _epochs(changes, wishes, present, default)
    others = {section: value for section, value in changes.items() if section != "teacher"}
    return _differing({**others, "data": data, **teacher, **kept}, present)


def _epochs(
    changes: Mapping[str, Any], wishes: Wishes, present: Mapping[str, Any], default: Mapping[str, Any]
) -> dict[str, Any]:
    """Of a teacher, where the wishes are about what its head knows: none where it knows the labels, else some.

    A number that is neither of these is the user's.
    """
    mine, usual = present["teacher"]["epochs"], default["teacher"]["epochs"]
    if not (wishes.base or wishes.data or wishes.label or wishes.task) or mine not in (0, usual):
        return {}
    return {"teacher": changes.get("teacher", {"epochs": usual})}


def _differing(changes: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Those changes that change something."""
    found = {}
    for key, value in changes.items():
        before = present.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := _differing(value, before):
                found[key] = inner
        elif value != before:
            found[key] = value
    return found


def _as_before(changes: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """What stood in the places of the changes."""
    return {
        key: _as_before(value, present[key])
        if isinstance(value, Mapping) and isinstance(present.get(key), Mapping)
        else present.get(key)
        for key, value in changes.items()
    }


def _brought(source: Path, place: Path, made: _Made) -> Path:
    """`source` copied to where DVC sees it change, as the workspace names it; what lies there already is named.

    Raises:
        InitError: another file of that name lies there.
    """
    root = (made.folder / place).resolve()
    if source.resolve().is_relative_to(root):
        return place / source.resolve().relative_to(root)
    path = place / source.resolve().name
    if (made.folder / path).exists():
        if not _same(source, made.folder / path):
            raise InitError(f"{made.folder / path} is there already, and is not {source}: rename one of them")
        return path
    target = made.note(path)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)
    return path


def _same(one: Path, other: Path) -> bool:
    """Whether two files, or all files of two folders, have the same content."""
    if not (one.is_dir() and other.is_dir()):
        return one.is_file() and other.is_file() and cmp(one, other, shallow=False)
    names = [
        sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file()) for folder in (one, other)
    ]
    return names[0] == names[1] and all(cmp(one / name, other / name, shallow=False) for name in names[0])


def _hand_to_dvc(part: Path, made: _Made) -> None:
    """So that a commit says which bytes a study read, and others can pull them; an empty folder waits for some."""
    folder = made.folder
    if not (folder / part).exists():
        made.write(part / ".gitkeep", "")
        return
    tracked = worktrees.git(folder, "ls-files", "--", str(part)).split()
    if tracked in ([], [str(part / ".gitkeep")]):
        if tracked:  # it was empty until now
            worktrees.git(folder, "rm", "--quiet", "--cached", "--", *tracked)
        made.keep(part.with_name(f"{part.name}.dvc"))
        made.note(part.with_name(f"{part.name}.dvc"))
        made.append(part.with_name(".gitignore"), f"/{part.name}\n")
        worktrees.dvc(folder, "add", "--quiet", str(part))


def _set_up(folder: Path, made: _Made) -> None:
    """git and DVC, where they are not set up."""
    if not _in_git(folder):
        made.note(Path(".git"))
        worktrees.git(folder, "init", "--quiet")
    if (folder / ".dvc").exists():
        return
    made.note(Path(".dvc"))
    worktrees.dvc(folder, "init", "--quiet", *([] if (folder / ".git").exists() else ["--subdir"]))
    (folder / ".dvc/config").write_text(_CONFIG)


def _in_git(folder: Path) -> bool:
    asked = subprocess.run(
        ["git", "rev-parse", "--git-dir"], cwd=folder, env=worktrees.environment(), capture_output=True
    )
    return asked.returncode == 0


def in_words(laid: Laid, again: bool) -> list[str]:
    """Each change on a line, by its path in params.yaml; of what is amended, what stood there, too."""
    now, before = _flat(laid.changes), _flat(laid.before)
    return [f"{path}: {f'{json.dumps(before.get(path))} → ' if again else ''}{json.dumps(now[path])}" for path in now]


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted name → value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return found
