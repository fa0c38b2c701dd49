"""Sort the saved logits of the original model into those that a recipe of the study distills and those that go."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from flows.gc.kind import Kind, kind
from tasks.artifacts.paths import LOGITS
from tasks.config.params_file import PARAMS, parse, read
from tasks.config.resolved import resolve
from tasks.config.schema import Trainer


def kind_of_logits() -> Kind:
    """Return the `Kind` of saved logits.

    Those for the settings of a recipe in params.yaml stay, since another training may take them. Those of another
    original model or other training data are not recognized; the next training that saves logits removes them.
    """
    folders = [path for path in LOGITS.glob("*/*") if path.is_dir()]
    names = set(_names()) if folders else set()
    go = [folder for folder in folders if not any((folder / name).exists() for name in names)]
    return kind("saved logits", folders, go, partial(_remove, go))


def _names() -> Iterator[str]:
    """Yield a file name for each training that distills saved logits; these have a file of that name."""
    from eckart.recipe import Recipe  # slow imports, and most studies save no logits
    from tasks.training.saved_logits import settings_name

    tree = resolve(read())
    trainer = parse(tree["trainer"], Trainer, PARAMS, "trainer")
    for name in {*tree["study"]["recipes"], tree["study"]["control"]} - {None}:
        recovery = parse(tree["recipes"][name], Recipe, PARAMS, f"recipes.{name}").recovery
        for training in recovery.trainings.values():
            taught = getattr(training, "distillation", None)
            if taught and taught.top is not None:
                yield settings_name(training, trainer, taught.top, taught.temperature, tree["seed"])


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty
            folder.parent.rmdir()
