"""`eckart init`: make any folder a workspace for the pipeline, with the user's own model and data if they are given."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dvc.utils.flatten import flatten

from flows.engine import cached_objects
from flows.environment.git_variables import environment_without_git
from flows.workspace import installation, worktrees
from flows.workspace.worktrees import CARRIED
from tasks.artifacts.errors import EckartError
from tasks.artifacts.input_folders import BASE, RAW
from tasks.artifacts.task_spec import REFERENCE
from tasks.config import yaml_edit
from tasks.config.params_file import PARAMS, read, sections
from tasks.nlp_tasks import TaskName, task_class

_CONFIG = "[core]\n    analytics = false\n    check_update = false\n    autostage = false\n"
_STAGED = (".dvc", ".dvcignore")  # what `dvc init` stages; a user would commit these without the rest
_RECIPE = "anchored"


class InitError(EckartError):
    """The workspace was not made or not changed. The message says what to do."""


@dataclass(frozen=True)
class InitOptions:
    """The user's own model and data, and the names of its columns. None stands for what the user did not give."""

    base: str | None
    """A folder, a GGUF file, or any other value that model.base may have."""
    data: Path | None
    """A file, or a folder with a file for each split, named by the split."""
    text: str | None
    text_pair: str | None
    label: str | None
    task: TaskName | None


@dataclass(frozen=True)
class Filled:
    """Result of `init`: the values that it wrote into params.yaml."""

    changes: dict[str, Any]
    """Dotted name → new value."""
    before: dict[str, Any]
    """Dotted name → old value of every parameter; in a new workspace, its value in the default study."""
    head: str
    """Sentence that says what happens to the base model's head; may be empty."""


def init(
    folder: Path, options: InitOptions, again: bool = False, step: Callable[[str], None] = lambda words: None
) -> Filled:
    """Make `folder` a workspace, or change one that exists. Files in it stay, and nothing new is staged in git.

    Args:
        again: whether `folder` already is a workspace. Then only the parameters that follow from the options change.
        step: a function that is called at the beginning of each step, with words for it.

    Raises:
        InitError: nothing was changed, unless a file could not be written.
    """
    try:
        return _init(folder, options, again, step)
    except OSError as error:  # shutil.Error has a list of files with the cause of each
        cause = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise InitError(f"{cause}. Fix this and run eckart init again") from error


def _init(folder: Path, options: InitOptions, again: bool, step: Callable[[str], None]) -> Filled:
    _check(folder, options, again)
    # On the same disk as `folder`, so that moving files is fast.
    with TemporaryDirectory(prefix=".eckart-init-", dir=_existing(folder)) as temporary:
        draft = Path(temporary)
        shutil.copy(folder / PARAMS if again else installation.HOME / PARAMS, draft)
        for part in CARRIED:
            worktrees.carry(folder / part, draft / part)
            (draft / part).mkdir(parents=True, exist_ok=True)
        try:
            filled = _fill_in(draft, folder, options, again, step)
        except EckartError as error:  # the message may name copies in the temporary folder
            raise InitError(_by_own_names(str(error), options)) from error
        step("setting up git and DVC")
        folder.mkdir(parents=True, exist_ok=True)
        _set_up(folder)
        for part in CARRIED:
            (folder / part).mkdir(parents=True, exist_ok=True)
            for new in (draft / part).iterdir():
                if not (folder / part / new.name).exists():
                    shutil.move(new, folder / part)
        shutil.move(draft / PARAMS, folder / PARAMS)
    ignored = (installation.HOME / ".gitignore").read_text().partition("\n\n")[2]
    _append(folder / ".gitignore", ignored)
    dvcignore = (installation.HOME / ".dvcignore").read_text()
    for path, text in {**installation.derived(), Path(".dvcignore"): dvcignore, REFERENCE / ".gitkeep": ""}.items():
        if not (folder / path).exists():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    for part in CARRIED:
        step(f"adding {part} to DVC")
        _hand_to_dvc(folder, part)
    return filled


def _by_own_names(message: str, options: InitOptions) -> str:
    for own, place in ((options.base, BASE), (options.data, RAW)):
        message = message.replace(str(place / Path(own).name), str(own)) if own else message
    message = re.sub(r"data\.columns\.(\w+):?", lambda column: f"--{column[1].replace('_', '-')}", message)
    return message.replace("set data.task to ", "write --task ").replace("; write null", "; leave it out")


def _append(file: Path, text: str) -> None:
    before = file.read_text() if file.exists() else ""
    if text not in before:
        file.write_text(f"{before.rstrip()}\n\n{text}" if before.strip() else text)


def _check(folder: Path, options: InitOptions, again: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise InitError(f"{folder} is a file: name a folder")
    for place in {place for part in CARRIED for place in (folder / part, *(folder / part).parents)}:
        if place.exists() and not place.is_dir():
            raise InitError(f"{place} is a file: rename it, since a workspace has a folder there")
    ours = (PARAMS, *installation.derived())
    if again and (lacking := [path for path in (*ours, Path(".dvc")) if not (folder / path).exists()]):
        raise InitError(f"{folder} has no {lacking[0]}, so it is not a workspace: leave out --again to make one")
    # `.dvc` may be there: a repository of the user's that uses DVC.
    if not again and (present := [path for path in ours if (folder / path).exists()]):
        raise InitError(
            f"{folder} has {present[0]} already: to change a workspace, run `eckart init {folder} --again` with the "
            "new values; to make one, name another folder"
        )
    if options.data and not options.data.exists():
        raise InitError(f"--data {options.data} does not exist")
    if options.base and not Path(options.base).exists() and options.base.startswith((".", "/", "~")):
        raise InitError(f"--base {options.base} does not exist")
    for option, given in (("base", options.base), ("data", options.data)):
        if given and Path(given).is_dir() and folder.resolve().is_relative_to(Path(given).resolve()):
            raise InitError(f"--{option} {given} contains the workspace {folder}: name another folder for one of them")
    for given, part in ((options.base, BASE), (options.data, RAW)):
        if given and Path(given).exists():
            _check_not_ignored(folder, part)


def _check_not_ignored(folder: Path, part: Path) -> None:
    """Raise an InitError if git ignores the file that DVC is to write beside `part`, since DVC refuses to write it."""
    file = folder.absolute() / f"{part}.dvc"
    try:
        found = worktrees.git(_existing(folder), "check-ignore", "--verbose", "--no-index", str(file))
    except worktrees.WorkspaceError:  # no rule is about it, or there is no repository yet
        return
    rule = re.match(r"(?P<place>.*?):(?P<line>\d+):(?P<rule>.*?)\t", found)
    if rule and not rule["rule"].startswith("!"):
        raise InitError(
            f"the rule {rule['rule']} ({rule['place']}, line {rule['line']}) hides {part}.dvc from git, so that others "
            f"could not get your files: remove the rule; DVC will keep {part} itself out of git"
        )


def _existing(folder: Path) -> Path:
    """Return the innermost folder on the path to `folder` that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _fill_in(draft: Path, folder: Path, options: InitOptions, again: bool, step: Callable[[str], None]) -> Filled:
    """Copy the user's model and data into a draft of the workspace, and adapt the draft's params.yaml to them."""
    present, default = sections(read(draft / PARAMS)), sections(read(installation.HOME / PARAMS))
    base = options.base
    given = [str(value) for value in (base, options.data) if value and Path(value).exists()]
    if given:
        step(f"copying {' and '.join(given)}")
    if base and Path(base).exists():
        base = str(_bring(Path(base), BASE, draft, folder))
    source = str(_bring(options.data, RAW, draft, folder)) if options.data else _own_data(present)
    changes, head = _adapted(draft, options, present, base, source, step)
    if again:
        epochs = _epochs(changes, draft, present, default, step)
        changes = _amending(changes, options, present, default) | epochs
    elif changes:
        # A name has at most 50 characters.
        name = re.sub(r"[^\w-]+", "-", folder.resolve().name).strip("-")[:50] or "study"
        changes["study"] = {"name": name, "recipes": [_RECIPE], "control": _RECIPE, **changes.get("study", {})}
        changes["promotion"] = {"model": name, **changes.get("promotion", {})}
    before = flatten(present)
    new = {path: value for path, value in flatten(changes).items() if not (again and value == before.get(path))}
    if new:
        yaml_edit.update(changes, draft / PARAMS)
    return Filled(new, before, head)


def _adapted(
    draft: Path,
    options: InitOptions,
    present: Mapping[str, Any],
    base: str | None,
    source: str | None,
    step: Callable[[str], None],
) -> tuple[dict[str, Any], str]:
    """Return the parameters that follow from the user's model and data, and what happens to the model's head.

    Args:
        base, source: the model and the data, relative to the draft; None: the user gave none.
    """
    changes: dict[str, Any] = {}
    before = present["model"]
    model = base or before["base"]
    revision = before["revision"] if model == before["base"] else None
    if base or source:
        step("loading torch and transformers")
        from flows.workspace import params_from_data  # slow: it imports both
    if base:
        step(f"reading the config and tokenizer of {options.base}")
        changes["model"] = {"base": base} | ({"new": None} if before["new"] else {})
        if revision != before["revision"]:  # a commit of the model before
            changes["model"]["revision"] = None
        with chdir(draft):
            params_from_data.read_base(base, revision)
    if not source:
        if options.text or options.text_pair or options.label or options.task:
            raise InitError("--text, --text-pair, --label and --task describe your own data: name it with --data")
        return changes, ""
    if not model:
        raise InitError(f"{PARAMS} describes a new model, which no data are needed for: name a model with --base")
    data = _completed(options, present)
    step(f"reading {options.data or source}")
    with chdir(draft):
        decided, head = params_from_data.of_data(
            source, model, revision, data.text, data.text_pair, data.label, data.task
        )
    return changes | decided, head


def _own_data(params: Mapping[str, Any]) -> str | None:
    """Return data.source of params.yaml if it is the user's own data, else None."""
    source = str(params["data"]["source"])
    return source if Path(source).is_relative_to(RAW) else None


def _completed(options: InitOptions, params: Mapping[str, Any]) -> InitOptions:
    """Return `options`, with missing columns and task from params.yaml if that already names the user's own data."""
    if not _own_data(params):
        return options
    data = params["data"]
    task = options.task or (None if options.data or options.label else data["task"])
    read = {
        name: column
        for name, column in data["columns"].items()
        if not task or getattr(task_class(task), name, "optional") != "refused"
    }
    columns = {name: getattr(options, name) or read.get(name) for name in ("text", "text_pair", "label")}
    return replace(options, task=task, **columns)


def _amending(
    changes: Mapping[str, Any], options: InitOptions, present: Mapping[str, Any], default: Mapping[str, Any]
) -> dict[str, Any]:
    """Return only the changes that the user asked for and those that follow from them; other parameters must stay."""
    columns = options.text or options.text_pair or options.label or options.task
    data = changes.get("data", {})
    decided = {"source", "splits", "config", "revision"} if options.data else set()
    if options.base:
        decided |= {"pooling", "prefix"}
    if options.data or columns:
        decided |= {"columns", "task"}
    if options.data or options.base or options.text or options.text_pair:
        decided.add("max_length")
    if options.data or options.base or options.label or options.task:
        decided.add("target_length")
    before = present["data"]
    if options.data and not before["separator"]:
        decided.add("separator")
    changed = bool(data) and data["task"] != before["task"]
    if changed:
        decided.add("metric")
    if (options.data or changed) and "train" in data["sizes"] and _has_initial_size(present, default):
        decided.add("sizes")  # running text has a size only for calibration
    amending = {"data": {name: value for name, value in data.items() if name in decided}}
    if changed:
        amending = _merged(amending, _of_other_task(data["task"], present, default))
    if "model" in changes:
        amending["model"] = changes["model"]
    if (export := changes.get("export")) == {"recipes": []}:  # the task has no ONNX files
        amending["export"] = export
    return {section: values for section, values in amending.items() if values}


def _has_initial_size(present: Mapping[str, Any], default: Mapping[str, Any]) -> bool:
    """Whether data.sizes.train is what `init` writes, so that the user did not set it."""
    all_rows = _own_data(present) and not task_class(present["data"]["task"]).running_text
    return bool(present["data"]["sizes"]["train"] == (None if all_rows else default["data"]["sizes"]["train"]))


def _of_other_task(task: TaskName, present: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from another task: its own limits, and nothing that it refuses.

    Limits of a promotion change even if the user set them, since they are in units of the other task's metric.
    """
    from flows.workspace.params_from_data import of_task

    before, kind = present["data"]["task"], task_class(task)
    was, own = of_task(before), of_task(task)
    changes: dict[str, dict[str, Any]] = {}
    for section, keys in _merged(was, own).items():
        old, new = ({**default[section], **derived.get(section, {})} for derived in (was, own))
        changes[section] = {
            key: new[key]
            for key in keys
            if new[key] != old[key] and (section == "promotion" or present[section][key] == old[key])
        }
    refused: dict[str, dict[str, Any]] = {
        "data": dict.fromkeys(sorted({*task_class(before).options} - {*kind.options})),
        "evaluate": {},
    }
    if not kind.running_text:
        refused["data"] |= {"calibration_texts": {}}
        refused["evaluate"] = {"texts": {}, "zero_shot": []}
    stated = {
        name: {key: none for key, none in keys.items() if present[name][key] != none} for name, keys in refused.items()
    }
    if not kind.running_text and present["data"]["written"]["examples"]:
        stated["data"]["written"] = {"examples": 0}
    return _merged(changes, stated)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of both. Where both have a value, it is that of `second`."""
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in {**first, **second}}


def _epochs(
    changes: Mapping[str, Any],
    draft: Path,
    present: Mapping[str, Any],
    default: Mapping[str, Any],
    step: Callable[[str], None],
) -> dict[str, Any]:
    """Return the section teacher, if its epochs follow from the head and the labels, and now others do."""
    usual = {"epochs": default["teacher"]["epochs"]}
    mine, new = {"epochs": present["teacher"]["epochs"]}, changes.get("teacher", usual)
    if "data" not in changes or mine == new or mine["epochs"] not in (0, usual["epochs"]):
        return {}
    if source := _own_data(present):
        nothing = InitOptions(None, None, None, None, None, None)
        with suppress(EckartError):  # nobody knows what followed from files that cannot be read
            if mine != _adapted(draft, nothing, present, None, source, step)[0].get("teacher", usual):
                return {}  # the user has set them
    return {"teacher": new}


def _bring(source: Path, place: Path, draft: Path, folder: Path) -> Path:
    """Copy `source` into the folder `place` of the draft, unless the workspace has it, and return the relative path."""
    root = (folder / place).resolve()
    if source.resolve().is_relative_to(root):
        return place / source.resolve().relative_to(root)
    own, real = Path(os.path.abspath(source)), source.resolve()
    # A link may lead into a cache, whose files are named by digests, without a suffix.
    path = place / (own if own.suffix or not real.suffix else real).name
    if (folder / path).exists():
        if cached_objects.measured(source) != cached_objects.measured(folder / path):
            raise InitError(f"{folder / path} exists and differs from {source}: rename one of them")
    elif source.is_dir():
        shutil.copytree(source, draft / path)
        worktrees.make_writable(draft / path)
    else:
        shutil.copy2(source, draft / path)
    return path


def _hand_to_dvc(folder: Path, part: Path) -> None:
    """Track a folder with DVC, so that others can pull it. Leave a folder that is empty or has files in git to git."""
    keep = folder / part / ".gitkeep"
    if not any((folder / part).iterdir()):
        keep.touch()
        return
    tracked = worktrees.git(folder, "ls-files", "--", str(part)).split()
    if [path for path in (folder / part).iterdir() if path != keep] and tracked in ([], [str(part / ".gitkeep")]):
        if tracked:  # only .gitkeep: the folder was empty until now
            worktrees.git(folder, "rm", "--quiet", "--cached", "--", *tracked)
        _append(folder / part.with_name(".gitignore"), f"/{part.name}\n")
        worktrees.dvc(folder, "add", str(part))  # with --quiet, it would not say why it fails


def _set_up(folder: Path) -> None:
    inside = ["git", "rev-parse", "--git-dir"]
    if subprocess.run(inside, cwd=folder, env=environment_without_git(), capture_output=True).returncode:
        worktrees.git(folder, "init", "--quiet")
    if not (folder / ".dvc").exists():
        worktrees.dvc(folder, "init", "--quiet", *([] if (folder / ".git").exists() else ["--subdir"]))
        worktrees.git(folder, "reset", "--quiet", "--", *_STAGED)
        (folder / ".dvc/config").write_text(_CONFIG)
